"""The Triton kernels of the affine format, interpreted, against the reference.

Equal means equal bits: the format's arithmetic leaves a compiler nothing to round
differently (see `affine.group`), so no difference is allowed for.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import noise
from jaxact_kernels.affine import reference, triton
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.config import Config, heuristic
from jaxact_kernels.numbering import box
from support.subjects import Affine, jit_interpreted as jit, sample
from support.variants import thorough

SEED = np.uint32(7)
SMALL = Config(4, 1)
# Whole groups and blocks; a last block short of groups; padded rows; tiles whose width
# is no power of two; fewer elements than a group.
PADDED = (5, 300)
SHAPES = [(8, 256), (3, 7, 64), PADDED, (40, 31), (6, 224), (1,)]
# Every width and every shape once; the slow tests have more of their product.
ONE_EACH = [
    *((1, (1,)), (2, (8, 256)), (3, PADDED), (4, (3, 7, 64))),
    *((5, (40, 31)), (6, (6, 224)), (7, PADDED), (8, (8, 256))),
]
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
thoroughly = lambda *case: pytest.param(*case, marks=thorough)


def assert_same_bits(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (a, b))
        np.testing.assert_array_equal(a, b)


def both(x, *, seed=SEED, config=SMALL, **options):
    """Stored by the reference and by the kernel; decoded from the former by both."""
    draw = {"stochastic": options.pop("stochastic", True)}
    draw["is_dithered"] = options.pop("is_dithered", False)
    kernel = {"config": config, "interpret": True}
    encodes = [
        functools.partial(reference.encode, **options, **draw),
        functools.partial(triton.encode, **options, **draw, **kernel),
    ]
    stored = [jit(encode)(x, seed) for encode in encodes]
    options |= {"shape": x.shape, "dtype": x.dtype}
    decodes = [
        functools.partial(reference.decode, **options),
        functools.partial(triton.decode, **options, config=config, interpret=True),
    ]
    return stored, [jit(decode)(stored[0]) for decode in decodes]


@thorough
@pytest.mark.parametrize(
    "bits, shape",
    [
        *ONE_EACH,
        *(slow(bits, PADDED) for bits in range(1, 9) if (bits, PADDED) not in ONE_EACH),
        *(
            slow(bits, shape)
            for bits in (2, 3, 8)
            for shape in SHAPES
            if shape != PADDED and (bits, shape) not in ONE_EACH
        ),
    ],
)
def test_every_width_equals_the_reference(bits, shape):
    x = sample(Affine(bits), shape, seed=bits)
    for wanted, got in both(x, bits=bits, group_size=256):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    "dtype, group_size",
    [slow("bfloat16", 32), thoroughly("float16", 64), ("bfloat16", 512)],
)
def test_every_dtype_equals_the_reference(dtype, group_size):
    x = sample(Affine(2, dtype), (6, 300))
    for wanted, got in both(x, bits=2, group_size=group_size):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("bits", [slow(2), thoroughly(7)])
def test_four_million_elements_equal_the_reference(bits):
    # Enough for a product that is contracted with the sum after it to show: at 7 bits
    # that changes one code in 250 000.
    x = np.random.default_rng(bits).standard_normal((16384, 256))
    x = jnp.asarray(x.astype(np.float32))
    for wanted, got in both(x, bits=bits, group_size=256, config=Config(512, 4)):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("bits", [slow(1), thoroughly(2), slow(8)])
def test_rounding_to_nearest_equals_the_reference(bits):
    x = sample(Affine(bits), (4, 200))
    for wanted, got in both(x, bits=bits, group_size=64, stochastic=False):
        assert_same_bits(got, wanted)


def test_noise_that_decoding_draws_again_equals_the_reference():
    """A group with an infinity, in the branch for such, and ordinary ones."""
    x = sample(Affine(2), (8, 200)).at[1, 7].set(np.inf)
    for wanted, got in both(x, bits=2, group_size=64, is_dithered=True):
        assert_same_bits(got, wanted)


@thorough
@pytest.mark.parametrize(
    "bits, dtype", [(1, "float32"), (3, "bfloat16"), (8, "float16"), (8, "float32")]
)
def test_no_value_is_too_odd(bits, dtype):
    top, big = float(jnp.finfo(dtype).max), np.inf
    x = np.asarray(sample(Affine(bits), (16, 64))).astype(np.float32)
    x[0, 3], x[1, 5], x[2, 7] = np.nan, big, -big
    x[3], x[4], x[5], x[6] = 1 / 3, 0, big, np.nan
    x[7, :2], x[8, 0], x[9, 0] = (top, -top), top, -top
    x[10], x[10, 4], x[11, 9:11] = 1 / 7, big, (big, -big)
    x[12], x[12, 1], x[13] = 0, -0.0, 2.0**-20
    with np.errstate(over="ignore"):
        x = jnp.asarray(x).astype(dtype)
    for wanted, got in both(x, bits=bits, group_size=64):
        assert_same_bits(got, wanted)


def test_a_group_with_a_nan_equals_the_reference():
    x = sample(Affine(8), (1024,)).at[3].set(np.nan).at[7].set(np.inf)
    for wanted, got in both(x, bits=8, group_size=1024):
        assert_same_bits(got, wanted)


@thorough
@pytest.mark.parametrize(
    "bits, dtype", [(2, "float16"), (8, "float16"), (8, "bfloat16"), (8, "float32")]
)
def test_the_ends_of_the_range_equal_the_reference(bits, dtype):
    # One group a block, so that none is sent to the definition by another.
    top = float(jnp.finfo(dtype).max)
    x = np.asarray(sample(Affine(bits), (10, 64))).astype(np.float64)
    ends = (top, -top, top / 2, -top / 2, top / 4, -top / 4, top / 8)
    for row, end in enumerate(ends):
        x[row, 0] = end
    x[7, :2], x[8, :2], x[9, :2] = (top, -top), (top, top / 2), (top / 5, -top / 5)
    x = jnp.asarray(x.astype(jnp.dtype(dtype)))
    for wanted, got in both(x, bits=bits, group_size=64, config=Config(1, 1)):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("bits", [2, 8])
def test_any_bit_pattern_equals_the_reference(bits):
    rng = np.random.default_rng(bits)
    x = rng.integers(0, 2**32, (64, 32), np.uint32).view(np.float32)
    # XLA:CPU flushes subnormals in one program and not in another.
    x = np.where(abs(x) < 2.0**-125, np.float32(0), x)
    for wanted, got in both(jnp.asarray(x), bits=bits, group_size=32):
        assert_same_bits(got, wanted)


def test_vmap_equals_a_loop():
    x, seeds = sample(Affine(2), (3, 4, 64)), jnp.arange(3, dtype=jnp.uint32)
    encode = functools.partial(
        triton.encode,
        bits=2,
        group_size=64,
        stochastic=True,
        config=SMALL,
        interpret=True,
    )
    together = jit(jax.vmap(encode))(x, seeds)
    definition = functools.partial(
        reference.encode, bits=2, group_size=64, stochastic=True
    )
    alone = [jit(definition)(*each) for each in zip(x, seeds, strict=True)]
    assert_same_bits(together, jax.tree.map(lambda *parts: jnp.stack(parts), *alone))


def test_a_shard_draws_the_noise_of_its_place():
    # A box of 2 x 1 groups in an array of 6 x 3.
    x = sample(Affine(2), (6, 192), seed=3)
    options = {"bits": 2, "group_size": 64, "stochastic": True}
    whole = jax.jit(functools.partial(reference.encode, **options))(x, SEED)
    numbering = box((2, 1), (6, 3))
    encode = functools.partial(
        triton.encode, **options, numbering=numbering, config=SMALL, interpret=True
    )
    encode = jit(encode)
    for row, column in ((0, 0), (2, 2), (4, 1)):
        part = x[row : row + 2, 64 * column : 64 * column + 64]
        got = encode(part, SEED, jnp.uint32(3 * row + column))
        box_of = lambda a: a[row : row + 2, column : column + 1]  # noqa: B023
        assert_same_bits(got, jax.tree.map(box_of, whole))


def dithered(x, bits, *, draw=None, group_size=64, seed=SEED):
    """Decoded with dither by the reference and by the kernel."""
    options = {"bits": bits, "group_size": group_size}
    encode = functools.partial(reference.encode, **options, stochastic=True)
    stored = jit(encode)(x, seed)
    options |= {"shape": x.shape, "dtype": x.dtype}
    wanted = functools.partial(reference.decode, **options)
    draw = noise.Draw(seed) if draw is None else draw
    got = functools.partial(
        triton.decode, **options, draw=draw, config=SMALL, interpret=True
    )
    return stored, jit(wanted)(stored, seed), got


@pytest.mark.parametrize(
    "bits, shape, dtype",
    [
        *((1, (8, 64), "float32"), (2, (5, 300), "bfloat16"), (3, (40, 31), "float16")),
        *((4, (6, 224), "float32"), (7, (5, 100), "float32"), (8, (8, 64), "float16")),
    ],
)
def test_dithered_decoding_equals_the_reference(bits, shape, dtype):
    top = float(jnp.finfo(dtype).max)
    x = np.asarray(sample(Affine(bits, dtype), shape)).astype(np.float64)
    x[0], x[1, 3], x[2, 2], x[3, :2] = 1 / 3, np.nan, np.inf, (top, -top)
    stored, wanted, decode = dithered(jnp.asarray(x.astype(jnp.dtype(dtype))), bits)
    assert_same_bits(jit(decode)(stored), wanted)


def test_a_shard_takes_off_the_noise_of_its_place():
    x = sample(Affine(2), (6, 192), seed=3)
    stored, wanted, _ = dithered(x, 2)
    draw = noise.Draw(SEED, box((2, 1), (6, 3)), jnp.uint32(3 * 2 + 1))
    part = jax.tree.map(lambda a: a[2:4, 1:2], stored)
    decode = dithered(x[2:4, 64:128], 2, draw=draw)[2]
    assert_same_bits(jit(decode)(part), wanted[2:4, 64:128])


@pytest.mark.slow  # special values are encoded in blocks of one group too
@thorough
def test_block_sizes_change_no_bit():
    x = sample(Affine(3), (7, 128))
    for wanted, got in both(x, bits=3, group_size=128, config=Config(1, 1)):
        assert_same_bits(got, wanted)


def test_the_heuristic_fills_registers_and_no_more():
    for group in (32, 64, 224, 256, 1024, 4096):
        for item_bytes in (2, 4):
            config = heuristic(group, item_bytes)
            per_thread = config.groups * group * item_bytes / (32 * config.num_warps)
            assert per_thread <= 128 or config.groups == 1
            assert per_thread > 64 or config.groups == 1
    with pytest.raises(ValueError, match="positive power of two"):
        Config(groups=3)


def test_a_kernel_is_one_call():
    x = jax.ShapeDtypeStruct((8, 300), jnp.bfloat16)
    encode = functools.partial(
        triton.encode, bits=2, group_size=256, stochastic=True, interpret=True
    )
    jaxpr = str(jax.make_jaxpr(encode)(x, SEED))
    assert jaxpr.count("pallas_call") == 1
    stored = jax.eval_shape(encode, x, SEED)
    assert isinstance(stored, Stored)

"""The affine format against its NumPy twin, bit for bit, and its special values.

Values whose halves are subnormal are left out of the comparison of codes: XLA:CPU
flushes them, NumPy does not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import affine
from support import oracle
from support.subjects import (
    DITHERED,
    Affine,
    Dithered,
    every_affine,
    jitted,
    sample,
)

SHAPES = [(), (3, 300), (2, 5, 31)]
EMPTY = [(0,), (0, 5), (5, 0), (2, 0, 3)]


def check_against_oracle(subject, x, seed):
    encode, decode = jitted(subject, x.shape)
    options = {"bits": subject.bits, "group_size": subject.group_size}
    stored = encode(x, np.uint32(seed))
    wanted = oracle.encode(
        np.asarray(x), seed, **options, stochastic=subject.stochastic
    )
    for name in ("zero_point", "scale", "words"):
        got, want = np.asarray(getattr(stored, name)), getattr(wanted, name)
        np.testing.assert_array_equal(got, want, err_msg=f"{subject} {x.shape} {name}")
        assert got.dtype == want.dtype
    back = np.asarray(decode(stored))
    want = oracle.decode(wanted, shape=x.shape, dtype=back.dtype, **options)
    np.testing.assert_array_equal(back.astype("float32"), want.astype("float32"))
    assert back.dtype == x.dtype and back.shape == x.shape


@every_affine
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_and_metadata_equal_the_oracle(subject, shape):
    check_against_oracle(subject, sample(subject, shape, seed=1), 7)


def check_dithered(subject, x, seed):
    options = {"bits": subject.bits, "group_size": subject.group_size}
    wanted = oracle.encode(np.asarray(x), seed, **options, is_dithered=True)
    encode, decode = jitted(subject, x.shape)
    stored = encode(x, np.uint32(seed))
    np.testing.assert_array_equal(np.asarray(stored.words), wanted.words)
    back = np.asarray(decode(stored))
    want = oracle.decode_dithered(
        wanted, seed, shape=x.shape, dtype=back.dtype, **options
    )
    np.testing.assert_array_equal(back.astype("float32"), want.astype("float32"))


@pytest.mark.parametrize("subject", DITHERED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dithered_values_equal_the_oracle(subject, shape):
    check_dithered(subject, sample(subject, shape, seed=1), 7)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_dithered_ends_constants_and_zeros_equal_the_oracle(bits):
    top = float(jnp.finfo("float16").max)
    x = np.asarray(sample(Affine(bits), (8, 64), seed=5)).copy()
    x[0], x[1], x[2, 0], x[3] = 1 / 3, 0, np.nan, np.maximum(x[3], 0)
    x[4, :2], x[5, 0], x[6, 3] = (top, -top), top, np.inf
    for dtype in ("float16", "float32"):
        subject = Dithered(bits, dtype, 32)
        check_dithered(subject, jnp.asarray(x).astype(dtype), 3)
    encode, decode = jitted(subject, x.shape)
    back = np.asarray(decode(encode(jnp.asarray(x), np.uint32(3))))
    np.testing.assert_array_equal(back[:2], x[:2])
    assert np.isnan(back[2, :32]).all() and np.isfinite(back[2:, 32:]).all()


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_arrays_equal_the_oracle(shape):
    check_against_oracle(Affine(5), sample(Affine(5), shape), 7)


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_any_bit_pattern_equals_the_oracle(bits):
    # Random patterns: groups spanning the whole range, infinities and NaNs included.
    rng = np.random.default_rng(bits)
    x = rng.integers(0, 2**32, (64, 32), np.uint32).view(np.float32)
    x = np.where(abs(x) < 2.0**-125, np.float32(0), x)
    x[::2] = np.where(np.isnan(x[::2]), np.float32(1), x[::2])
    x[:8] = np.where(np.arange(8)[:, None] % 2 > 0, np.inf, x[:8])
    check_against_oracle(Affine(bits, group_size=32), jnp.asarray(x), 2**32 - 1)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_constant_groups_are_exact(bits):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    edges = [0, 1, -1, 2.0**-126, 3.4028235e38, -3.4028235e38, 1 + 2.0**-23]
    edges += [np.nextafter(np.float32(2.0**-126), np.float32(1))]
    values = np.concatenate([values, np.array(edges, np.float32)])
    values = values[np.isfinite(values) & ((abs(values) >= 2.0**-126) | (values == 0))]
    x = jnp.asarray(np.repeat(values[:, None], 32, axis=1))
    subject = Affine(bits, group_size=32)
    encode, decode = jitted(subject, x.shape)
    back = decode(encode(x, np.uint32(0)))
    np.testing.assert_array_equal(np.asarray(back), np.asarray(x))


def test_infinities_in_a_constant_group_take_its_value():
    x = jnp.full((2, 40), np.float32(1) / 3).at[0, 3].set(np.inf).at[1, 5].set(-np.inf)
    encode, decode = jitted(Affine(2), x.shape)
    back = decode(encode(x, np.uint32(0)))
    np.testing.assert_array_equal(np.asarray(back), np.float32(1) / 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_the_ends_of_the_range_stay_finite(dtype, bits):
    top = float(jnp.finfo(dtype).max)
    rows = [[top, -top], [top, 0], [-top, 0], [top, top], [top, 1]]
    if dtype != "float8_e4m3fn":  # has no infinity
        rows += [[np.inf, -np.inf]]
    x = jnp.asarray(np.array(rows, dtype=dtype))
    encode, decode = jitted(Affine(bits, dtype, 32), x.shape)
    back = np.asarray(decode(encode(x, np.uint32(3)))).astype(np.float64)
    assert np.isfinite(back).all()
    if bits > 1:  # one bit cannot span -top .. top
        reached = np.clip(np.asarray(x).astype(np.float64), -top, top)
        # bfloat16 ends of the range, and a scale one bfloat16 smaller: 2**-7 each
        np.testing.assert_allclose(back / top, reached / top, atol=2**-6)


def test_infinities_leave_their_neighbours_alone():
    x = np.asarray(sample(Affine(4), (256,), seed=3)).copy()
    x[[10, 20]] = x.min(), x.max()
    other = x.copy()
    other[[10, 20]] = -np.inf, np.inf
    _, decode = jitted(Affine(4), x.shape)
    # With noise that depends on the metadata alone.
    options = {"bits": 4, "is_dithered": True}
    (plain, with_infinities) = (
        affine.encode(jnp.asarray(v), np.uint32(1), **options) for v in (x, other)
    )
    for a, b in zip(plain, with_infinities, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    top = np.asarray(decode(with_infinities))[20]
    assert abs(top - x.max()) <= 2.0**-7 * np.ptp(x) + 1e-6


def test_a_nan_is_loud_in_its_group_alone():
    x = sample(Affine(4), (4, 512)).at[1, 300].set(np.nan)
    encode, decode = jitted(Affine(4), x.shape)
    is_nan = np.isnan(np.asarray(decode(encode(x, np.uint32(1)))))
    wanted = np.zeros((4, 512), bool)
    wanted[1, 256:] = True
    np.testing.assert_array_equal(is_nan, wanted)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_zeros_at_the_minimum_are_exact(bits):
    x = jnp.maximum(sample(Affine(bits), (8, 300), seed=2), np.float32(0))
    encode, decode = jitted(Affine(bits), x.shape)
    back = np.asarray(decode(encode(x, np.uint32(5))))
    assert (back[np.asarray(x) == 0] == 0).all()


def test_subnormals_and_zeros_of_either_sign():
    x = jnp.asarray(np.array([[1e-40, 0.0, -0.0, -1e-42], [1, -1e-40, -0.0, 0]], "f4"))
    encode, decode = jitted(Affine(8, group_size=32), x.shape)
    back = np.asarray(decode(encode(x, np.uint32(5))))
    np.testing.assert_array_equal(back[0].view(np.uint32), 0)
    np.testing.assert_array_equal(back[1, 1:].view(np.uint32), 0)


def test_float64_beyond_float32_counts_as_infinite():
    with jax.enable_x64(True):
        x = jnp.asarray(np.array([1e300, 1.0, 2.0, -1e300]))
        options = {"bits": 8, "group_size": 32}
        stored = jax.jit(functools.partial(affine.encode, **options))(x, np.uint32(0))
        back = affine.decode(stored, shape=(4,), dtype=x.dtype, **options)
        assert back.dtype == np.float64
        np.testing.assert_allclose(np.asarray(back), [2, 1, 2, 1], atol=2**-7)


def test_bytes_are_those_of_the_oracle():
    for shape in [*SHAPES, *EMPTY, (8, 512, 2048), (7, 1000)]:
        for bits in range(1, 9):
            options = {"bits": bits, "group_size": 128}
            wanted = oracle.stored_bytes(shape, **options)
            assert affine.stored_bytes(shape, **options) == wanted


@pytest.mark.parametrize(
    "given",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": True},
        {"bits": 4.0},
        {"group_size": 0},
        {"group_size": 48},
        {"x": jnp.zeros(4, jnp.int32)},
        {"x": jnp.zeros(4, bool)},
        {"seed": 7},
        {"seed": jnp.zeros(2, jnp.uint32)},
    ],
    ids=lambda given: str(next(iter(given.items()))),
)
def test_encode_refuses(given):
    arguments = {"x": jnp.ones(4), "seed": jnp.uint32(0), "bits": 4} | given
    x, seed = arguments.pop("x"), arguments.pop("seed")
    with pytest.raises(ValueError, match="got .*;.*; .*"):
        affine.encode(x, seed, **arguments)


def test_decode_refuses_what_does_not_fit():
    stored = jax.eval_shape(
        functools.partial(affine.encode, bits=4), jnp.ones((2, 512)), jnp.uint32(0)
    )
    affine_decode = functools.partial(affine.decode, dtype="float32")
    for options in (
        {"shape": (2, 513), "bits": 4},
        {"shape": (2, 512), "bits": 3},
        {"shape": (2, 512), "bits": 4, "group_size": 128},
    ):
        with pytest.raises(ValueError, match="pass the options"):
            affine_decode(stored, **options)
    with pytest.raises(ValueError, match="mask for booleans"):
        affine.decode(stored, shape=(2, 512), dtype=bool, bits=4)

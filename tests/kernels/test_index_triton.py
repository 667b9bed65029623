"""The Triton kernels of indices and masks: the reference's bits, and no detours."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.assembler import assemble
from jaxact_kernels.checks import INTEGERS
from jaxact_kernels.config import Config
from jaxact_kernels.index import reference, triton
from jaxact_kernels.index.reference import index_layout
from jaxact_kernels.mask import reference as mask_reference, triton as mask
from jaxact_kernels.tiles import Tiles, separate
from support.gpu_target import needs_target
from support.subjects import Index, Mask, jit_interpreted as jit, sample
from support.variants import thorough

SMALL = Config(4, 1)
RUN = {"config": SMALL, "interpret": True}
# Whole groups and blocks; a last block short of groups; padded rows; tiles whose width
# is no power of two; fewer elements than a group.
SHAPES = [(8, 256), (3, 5, 512), (5, 300), (40, 31), (6, 224), (2, 1009), (1,), ()]
ONE = (5, 300)  # the shape for every version of JAX
COMPARED = ["float32", "bfloat16", "float16", "int8", "uint32"]
some = lambda case, is_one: pytest.param(*case, marks=() if is_one else thorough)
SOME_SHAPES = [(8, 256), ONE, (2, 1009), ()]
slow = lambda *case: pytest.param(*case, marks=[thorough, pytest.mark.slow])
# Every width and every shape once; the slow tests have more of their product.
ONE_EACH = [
    *((1, (1,)), (2, ()), (3, ONE), (4, (40, 31))),
    *((5, (6, 224)), (6, (8, 256)), (7, (3, 5, 512)), (8, (2, 1009))),
]


@pytest.mark.parametrize(
    ("bits", "shape"),
    [some([bits, shape], bits == 3) for bits, shape in ONE_EACH]
    + [slow(3, shape) for shape in SHAPES if shape != ONE]
    + [slow(bits, ONE) for bits in range(1, 9) if bits != 3],
    ids=str,
)
def test_every_width_equals_the_reference(bits, shape):
    x = sample(Index(bits), shape, seed=bits)
    wanted = jit(functools.partial(reference.encode, bits=bits))(x)
    encode = functools.partial(triton.encode, bits=bits, **RUN)
    np.testing.assert_array_equal(jit(encode)(x), wanted)
    options = {"shape": shape, "dtype": x.dtype, "bits": bits}
    back = jit(functools.partial(triton.decode, **options, **RUN))(wanted)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


@thorough
@pytest.mark.parametrize("dtype", INTEGERS)
def test_any_integer_equals_the_reference(dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(1).integers(info.min, info.max, (5, 300), endpoint=True)
    x = jnp.asarray(x, dtype)
    bits = 8 if info.min else 2  # eight bits wrap in int8
    words = jit(functools.partial(reference.encode, bits=bits))(x)
    encode = functools.partial(triton.encode, bits=bits, **RUN)
    np.testing.assert_array_equal(jit(encode)(x), words)
    options = {"shape": x.shape, "dtype": x.dtype, "bits": bits}
    back = jit(functools.partial(triton.decode, **options, **RUN))(words)
    assert back.dtype == x.dtype
    wanted = jit(functools.partial(reference.decode, **options))(words)
    np.testing.assert_array_equal(back, wanted)


@pytest.mark.parametrize(
    "shape",
    [some([shape], shape == ONE) for shape in SOME_SHAPES]
    + [slow(shape) for shape in SHAPES if shape not in SOME_SHAPES],
    ids=str,
)
def test_a_mask_equals_the_reference(shape):
    x = sample(Mask(), shape)
    wanted = mask_reference.encode(x)
    encode = functools.partial(mask.encode, **RUN)
    np.testing.assert_array_equal(jit(encode)(x), wanted)
    back = jit(functools.partial(mask.decode, shape=shape, **RUN))(wanted)
    assert back.dtype == np.bool_
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [some([dtype, ONE], dtype in ("bfloat16", "uint32")) for dtype in COMPARED]
    + [some(["float32", (8, 256)], False)]
    + [slow(dtype, (8, 256)) for dtype in COMPARED[1:]],
    ids=str,
)
def test_a_comparison_equals_the_reference(dtype, shape):
    x = np.random.default_rng(3).standard_normal(shape, np.float32) * 9
    special = [] if "int" in dtype else [0, -0.0, np.inf, -np.inf, np.nan]
    x.flat[: len(special)] = special[: x.size]
    x = jnp.asarray(abs(x) if dtype == "uint32" else x).astype(dtype)
    encode = jit(functools.partial(mask.encode, **RUN))
    # Padding counts as 0, which is above the second.
    for above in (0, 3) if dtype == "uint32" else (0, -2):
        above = jnp.asarray(above, dtype)
        wanted = mask_reference.encode(x, above)
        np.testing.assert_array_equal(encode(x, above), wanted)


def test_vmap_equals_a_loop():
    x, above = sample(Index(8), (3, 4, 64)), jnp.arange(3, dtype=jnp.int32) * 50
    encode = functools.partial(mask.encode, **RUN)
    together = jit(jax.vmap(encode))(x, above)
    alone = [mask_reference.encode(*each) for each in zip(x, above, strict=True)]
    np.testing.assert_array_equal(together, jnp.stack(alone))


@thorough
def test_block_sizes_change_no_bit():
    x = sample(Index(3), (7, 512))
    wanted = reference.encode(x, bits=3)
    for config in (None, Config(1, 1), Config(16, 4)):
        options = {"bits": 3, "config": config, "interpret": True}
        got = jit(functools.partial(triton.encode, **options))(x)
        np.testing.assert_array_equal(got, wanted)


def test_declines_what_it_cannot_do():
    declines = lambda shape, dtype, bits=2: triton.declines(
        index_layout(shape), dtype, bits
    )
    assert declines((8, 256), "int8") is None
    for shape in ((0,), (0, 5), (5, 0)):
        assert "without elements" in declines(shape, "int8")
    assert "not bool" in declines((8,), "bool")
    assert mask.declines(index_layout((8,)), np.bool_) is None
    assert "not float64" in mask.declines(index_layout((8,)), np.float64)
    # One byte an element: offsets beyond 2**31.
    assert "beyond 31 bits" in declines((2**15, 2**16), "uint8")
    assert "beyond 31 bits" in mask.declines(index_layout((2**15, 2**16)), np.bool_)
    assert declines((2**15, 2**16), "int16") is None
    assert declines((2**15, 2**16 - 256), "uint8") is None
    # Rows of one group.
    for bits, longest in ((1, 2**16), (3, 2**15), (8, 2**16)):
        assert declines((4, longest - 1), "int32", bits) is None
        assert "too long" in declines((4, longest + 1), "int32", bits)
        assert declines((4, 4 * longest), "int32", bits) is None


def test_the_heuristic_fills_registers_and_no_more():
    for length in (32, 224, 1009, 4096, 3136, 12321, 50257):
        for bits, item_bytes in ((1, 1), (1, 4), (8, 1), (8, 4)):
            layout = index_layout((64, length))
            config = triton.heuristic(layout, bits, item_bytes)
            tiles = Tiles(layout, bits, config.groups, separate(bits))
            elements = config.groups * tiles.count * tiles.padded_width
            per_thread = elements * item_bytes / (32 * config.num_warps)
            assert 64 <= per_thread <= 128 or config == Config(1, 16)


def pick(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def words_of(shape, bits):
    return pick(reference.words_shape(shape, bits), np.uint32)


def mask_case(shape):
    return lambda words: mask.decode(words, shape=shape), words_of(shape, 1)


def index_case(shape, dtype, bits):
    options = {"shape": shape, "dtype": jnp.dtype(dtype), "bits": bits}
    return functools.partial(triton.decode, **options), words_of(shape, bits)


WHOLE, PADDED, LONG = (512, 1024), (64, 1000), (64, 50257)
COMPILED = {
    "mask": (mask.encode, pick(WHOLE, np.bool_)),
    "mask padded": (mask.encode, pick(PADDED, np.bool_)),
    "mask long": (mask.encode, pick(LONG, np.bool_)),
    "mask float32": (mask.encode, pick(WHOLE, np.float32), pick((), np.float32)),
    "mask bfloat16": (mask.encode, pick(WHOLE, jnp.bfloat16), pick((), jnp.bfloat16)),
    "mask long float32": (mask.encode, pick(LONG, np.float32), pick((), np.float32)),
    "mask decode": mask_case(WHOLE),
    "mask decode padded": mask_case(PADDED),
    "mask decode long": mask_case(LONG),
    "index 2": (functools.partial(triton.encode, bits=2), pick(WHOLE, np.int32)),
    "index 4": (functools.partial(triton.encode, bits=4), pick(WHOLE, np.int8)),
    "index 7": (functools.partial(triton.encode, bits=7), pick(WHOLE, np.int32)),
    "index decode 2": index_case(WHOLE, np.int32, 2),
    "index decode 4": index_case(WHOLE, np.int8, 4),
    "index decode 7": index_case(WHOLE, np.int32, 7),
}


@needs_target
@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED)
def test_one_kernel_that_spills_nothing(case):
    program = assemble(*case)
    (kernel,) = program.kernels
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
    assert kernel.registers <= 64, kernel
    text = program.compiled.as_text()
    assert text.count(" custom-call(") == 1
    assert not re.findall(r" (?:copy|pad|transpose|convert|fusion)\(", text)

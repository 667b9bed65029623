"""The Mosaic GPU kernels of the affine format against the definition, bit for bit."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxact._memory.compiling import abstract_on, device_of, lowering_for
from jaxact_kernels.affine import Stored, mosaic_gpu, reference
from jaxact_kernels.device import Device
from jaxact_kernels.layout import layout_of
from jaxact_kernels.numbering import box
from support.gpu_target import needs_target
from support.variants import thorough

interprets = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this version of JAX has no interpreter of Mosaic GPU kernels",
)

SHAPE = (3, 24, 256)
CASES = [  # bits, dtype, group size
    (1, "float16", 256),
    (2, "bfloat16", 64),
    (3, "bfloat16", 128),
    (4, "bfloat16", 256),
    (4, "float16", 32),
    (5, "float32", 64),
    (6, "float16", 256),
    (7, "bfloat16", 256),
    (8, "float32", 128),
    (8, "bfloat16", 96),
]
cases = pytest.mark.parametrize(("bits", "dtype", "group_size"), CASES)


def ordinary(shape, dtype, seed=0):
    """Rows of different size and place."""
    rng = np.random.default_rng(seed)
    rows = (*shape[:-1], 1)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 3, rows))
    return jnp.asarray(x + rng.integers(-2, 3, rows), dtype)


def special(shape, dtype):
    """Some ordinary rows, and some of each that the definition treats by itself."""
    x = np.array(ordinary(shape, "float32")).reshape(-1, shape[-1])
    info = jnp.finfo(dtype)
    top, tiny = float(info.max), float(info.tiny)
    x[1, 5::32] = np.nan
    x[2, 7::32], x[2, 9::32] = np.inf, -np.inf
    x[3], x[4], x[5] = np.inf, -np.inf, np.nan
    x[6], x[7, ::2], x[7, 1::2] = 1 / 3, np.inf, -np.inf
    x[8], x[8, ::32], x[8, 1::32] = -1 / 3, np.inf, -np.inf
    x[9] = np.where(x[9] > 0, top, -top)
    x[10] = -top * (1 - abs(x[10]) / 4096)
    x[11], x[12] = x[11] * tiny, -0.0
    x[13], x[14], x[15] = top, -top, tiny
    return jnp.asarray(x.reshape(shape)).astype(dtype)


@functools.cache
def definition(bits, group_size, **options):
    options = {"stochastic": True, "bits": bits, "group_size": group_size} | options
    return jax.jit(functools.partial(reference.encode, **options))


def kernel(bits, group_size, **options):
    options = {"stochastic": True, "bits": bits, "group_size": group_size} | options
    return jax.jit(functools.partial(mosaic_gpu.encode, **options))


def patterns(x):
    """The bits of an array; those of a NaN are open."""
    x = np.asarray(x)
    if x.dtype == np.uint32:
        return x
    x = np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def assert_same(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(patterns(got), patterns(want))


def assert_same_stored(got, want):
    assert_same(got.metadata, want.metadata)
    assert_same(got.words, want.words)


@interprets
@cases
def test_encode_and_decode_equal_the_definition(bits, dtype, group_size):
    shape = (*SHAPE[:-1], 3 * group_size) if group_size % 64 else SHAPE
    x, seed = special(shape, dtype), np.uint32(7)
    want = definition(bits, group_size)(x, seed)
    assert_same_stored(kernel(bits, group_size, interpret=True)(x, seed), want)
    options = {"shape": shape, "dtype": dtype, "bits": bits, "group_size": group_size}
    decode = functools.partial(mosaic_gpu.decode, **options, interpret=True)
    back = jax.jit(functools.partial(reference.decode, **options))(want)
    assert_same(jax.jit(decode)(want), back)


@interprets
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_nearest_equals_the_definition(bits):
    x = special(SHAPE, "float32")
    got = kernel(bits, 256, stochastic=False, interpret=True)(x, np.uint32(0))
    assert_same_stored(got, definition(bits, 256, stochastic=False)(x, np.uint32(0)))


@interprets
def test_noise_that_decoding_draws_again_equals_the_definition():
    x, options = special(SHAPE, "float32"), {"is_dithered": True}
    got = kernel(4, 256, interpret=True, **options)(x, np.uint32(0))
    assert_same_stored(got, definition(4, 256, **options)(x, np.uint32(0)))


@interprets
@pytest.mark.parametrize("bits", [4, 8])
def test_any_finite_numbers_equal_the_definition(bits):
    # Fine fractions of a code: those that rounding once instead of twice would change.
    x = np.random.default_rng(bits).standard_normal((512, 256)).astype(np.float32)
    got = kernel(bits, 256, interpret=True)(x, np.uint32(3))
    assert_same_stored(got, definition(bits, 256)(x, np.uint32(3)))


@interprets
@pytest.mark.parametrize("rows", [8, 33, 40, 71])
def test_the_last_block_need_not_be_whole(rows):
    x = ordinary((rows, 256), "bfloat16")
    got = kernel(8, 256, interpret=True)(x, np.uint32(3))
    assert_same_stored(got, definition(8, 256)(x, np.uint32(3)))


@interprets
def test_a_shard_draws_the_noise_of_the_whole_array():
    x = ordinary((4, 16, 512), "bfloat16")
    whole = definition(8, 256)(x, np.uint32(5))
    numbering = box((2, 8, 2), (4, 16, 2))
    shard = kernel(8, 256, interpret=True, numbering=numbering)
    origin = np.uint32(1 * 32 + 4 * 2)  # of group [1, 4, 0]
    got = shard(x[1:3, 4:12], np.uint32(5), origin)
    assert_same_stored(got, Stored(*(part[1:3, 4:12] for part in whole)))


@interprets
def test_blocks_do_not_race():
    x = special((64, 256), "bfloat16")
    options = {"shape": x.shape, "dtype": x.dtype, "bits": 8, "group_size": 256}
    want = definition(8, 256)(x, np.uint32(5))
    if "on_race" not in inspect.signature(plgpu.InterpretGPUParams).parameters:
        pytest.skip("this version of JAX only prints a race")
    detecting = plgpu.InterpretGPUParams(detect_races=True, on_race="raise")
    with plgpu.force_gpu_interpret_mode(detecting):
        assert_same_stored(kernel(8, 256)(x, np.uint32(5)), want)
        back = mosaic_gpu.decode(want, **options)
    assert_same(back, reference.decode(want, **options))


@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "group_size", "reason"),
    [
        ((64, 300), "float32", 4, 256, "300 elements needs padding"),
        ((64, 256), "float64", 4, 256, "not float64"),
        ((64, 256), "float8_e4m3fn", 4, 256, "not float8_e4m3fn"),
        ((3, 256), "float32", 4, 256, "has 3 groups, fewer than a block's 4"),
        ((15, 256), "float32", 1, 256, "has 15 groups, fewer than a block's 16"),
        ((64, 160), "float32", 1, 160, "160 elements, more than 64"),
    ],
)
def test_declines_and_says_why(shape, dtype, bits, group_size, reason):
    layout = layout_of(shape, group_size)
    assert reason in mosaic_gpu.declines(layout, jnp.dtype(dtype), bits)
    with pytest.raises(ValueError, match=reason):
        mosaic_gpu.encode(
            jax.ShapeDtypeStruct(shape, dtype),
            None,
            bits=bits,
            group_size=group_size,
            stochastic=False,
        )


def test_declines_devices_before_hopper():
    layout = layout_of((64, 256), 256)
    declines = functools.partial(mosaic_gpu.declines, layout, "float32", 4)
    assert "A100 has 8.0" in declines(Device("A100"))
    assert declines(Device("H100")) is declines(Device("B200")) is declines() is None


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group_size", [64, 128, 256, 512, 1024])
def test_serves_groups_of_any_width_of_code(bits, group_size):
    layout = layout_of((256, 2048), group_size)
    assert mosaic_gpu.declines(layout, "bfloat16", bits) is None


@thorough
@needs_target
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(1, "bfloat16"), (2, "bfloat16"), (4, "bfloat16"), (4, "float32"), (8, "float16")],
)
def test_h100_spills_nothing_and_rounds_as_written(bits, dtype, tmp_path, monkeypatch):
    # Mosaic GPU assembles its kernels itself and leaves the assembler's words here.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    options = {"bits": bits, "group_size": 256}
    x, seed, stored = jax.tree.map(
        abstract_on(device_of("h100")),
        (
            jax.ShapeDtypeStruct((512, 1024), dtype),
            jax.ShapeDtypeStruct((), np.uint32),
            Stored(
                jax.ShapeDtypeStruct((512, 4, 8 * bits), np.uint32),
                jax.ShapeDtypeStruct((512, 4), np.uint32),
            ),
        ),
    )
    encode = kernel(**options)
    decode = functools.partial(mosaic_gpu.decode, shape=x.shape, dtype=dtype, **options)
    with lowering_for("h100"):
        for f, args in (encode, (x, seed)), (jax.jit(decode), (stored,)):
            f.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    # A sum may take in a product by a constant, which is exact, and no other.
    (ptx,) = (path.read_text() for path in tmp_path.glob("*encode*.ptx"))
    sums = re.findall(r"fma\.rn\.f32[^;]*;", ptx)
    assert sums and all(", 0f" in each for each in sums), sums
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(reports) == 2
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        # 168: three blocks of 128 threads share a multiprocessor's 65536 registers.
        assert int(re.search(r"Used (\d+) registers", report)[1]) <= 168

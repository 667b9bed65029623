"""The mask format against its NumPy twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import mask
from support import oracle
from support.subjects import Mask, jitted, sample

pytestmark = pytest.mark.unoptimized  # comparisons and integers alone

SHAPES = [(), (1,), (64,), (3, 300), (2, 5, 31), (2, 3, 512), (8, 3, 7, 96), (4, 1009)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle_and_comes_back(shape):
    x = sample(Mask(), shape)
    encode, decode = jitted(Mask(), shape)
    words = encode(x, np.uint32(0))
    np.testing.assert_array_equal(words, oracle.mask_pack(np.asarray(x)))
    assert words.dtype == np.uint32 and words.nbytes == mask.stored_bytes(shape)
    back = decode(words)
    assert back.dtype == np.bool_
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)], ids=str)
def test_empty(shape):
    words = mask.encode(jnp.zeros(shape, bool))
    assert words.size == 0 and mask.stored_bytes(shape) == 0
    assert mask.decode(words, shape=shape).shape == shape


def test_a_row_wastes_at_most_31_bits():
    for length in range(128, 1100):
        assert mask.stored_bytes((6, length)) == 6 * 4 * -(-length // 32)


SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]


def values(shape, dtype):
    """Numbers of both signs, with zeros, ties, infinities and NaN where there are."""
    if jnp.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        x = np.random.default_rng(2).integers(info.min, info.max, shape, endpoint=True)
        x.flat[:3] = 0, info.min, info.max
        return jnp.asarray(x, dtype)
    x = np.random.default_rng(2).standard_normal(shape, np.float32)
    x.flat[: len(SPECIAL)] = SPECIAL
    return jnp.asarray(x).astype(dtype)


def same_as_comparing(x, above):
    wanted = np.asarray(mask.encode(x > above))
    got = mask.encode(x, above=above)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(got, oracle.mask_pack(np.asarray(x > above)))
    traced = jax.jit(lambda x, t: mask.encode(x, above=t))(x, above)
    np.testing.assert_array_equal(traced, wanted)


@pytest.mark.parametrize(
    "above", [0, 0.1, -1.0, -0.0, np.inf, -np.inf, np.nan], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_above_is_a_comparison(dtype, above):
    x = values((5, 300), dtype)
    same_as_comparing(x, above)
    if dtype != "float8_e4m3fn":
        same_as_comparing(x, jnp.asarray(above, dtype))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32"])
def test_integers_compare_with_integers(dtype):
    x = values((5, 300), dtype)
    info = np.iinfo(dtype)
    for above in (0, 3, info.min, info.max):
        same_as_comparing(x, np.asarray(above, dtype)[()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_padding_is_above_a_negative_threshold(shape):
    same_as_comparing(jnp.zeros(shape), -1.0)


def test_a_threshold_rounds_as_in_a_comparison():
    # To float32 and then on: straight to float16 it would be 1 + 2**-10.
    above = 1 + 2.0**-11 + 2.0**-30
    x = jnp.asarray([1, 1 + 2.0**-10], np.float16)
    same_as_comparing(x, above)
    assert mask.encode(x, above=above).tolist() == [2]


@pytest.mark.unoptimized(False)
def test_comparing_makes_no_array_of_booleans():
    shape = 64, 4096
    x, above = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, ()))
    encode = jax.jit(lambda x, above: mask.encode(x, above=above))
    memory = encode.lower(x, above).compile().memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes == mask.stored_bytes(shape)
    assert memory.temp_size_in_bytes < 1024


def test_refuses_a_comparison_in_another_dtype():
    half, whole = jnp.zeros(4, jnp.bfloat16), jnp.zeros(4, jnp.uint8)
    with pytest.raises(ValueError, match="would compare in float32.*jnp.asarray"):
        mask.encode(half, above=jnp.float32(0.1))
    with pytest.raises(ValueError, match="would compare in float32.*jnp.floor"):
        mask.encode(whole, above=0.5)
    with pytest.raises(ValueError, match="would compare in int32"):
        jax.eval_shape(lambda t: mask.encode(whole, above=t), jnp.int32(1))
    for above in (-1, 256):
        with pytest.raises(ValueError, match="a value from 0 to 255"):
            mask.encode(whole, above=above)
    with pytest.raises(ValueError, match="requires a scalar; compare first"):
        mask.encode(half, above=half)
    with pytest.raises(ValueError, match="leave above out for booleans"):
        mask.encode(jnp.zeros(4, bool), above=0)
    with pytest.raises(ValueError, match="integers or floating point"):
        mask.encode(jnp.zeros(4, jnp.complex64), above=0)


def test_refuses_what_is_no_mask():
    with pytest.raises(ValueError, match="pass above=0 to store x > 0"):
        mask.encode(jnp.zeros(4))
    words = jax.ShapeDtypeStruct((2, 3), jnp.uint32)
    with pytest.raises(ValueError, match="pass the shape that was encoded"):
        jax.eval_shape(lambda w: mask.decode(w, shape=(2, 70, 3)), words)

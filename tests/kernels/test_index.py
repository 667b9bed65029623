"""The index format against its NumPy twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import index, mask
from support import oracle
from support.subjects import Index, jitted, sample

pytestmark = pytest.mark.unoptimized  # integers alone

SHAPES = [(), (1,), (64,), (3, 300), (2, 5, 31), (2, 3, 512), (8, 3, 7, 96), (4, 1009)]
DTYPES = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]


def check(subject, x):
    encode, decode = jitted(subject, x.shape)
    words = encode(x, np.uint32(0))
    np.testing.assert_array_equal(words, oracle.index_pack(np.asarray(x), subject.bits))
    assert words.dtype == np.uint32
    assert words.nbytes == index.stored_bytes(x.shape, bits=subject.bits)
    return decode(words)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_equals_the_oracle_and_comes_back(bits, shape):
    subject = Index(bits)
    x = sample(subject, shape, seed=bits)
    back = check(subject, x)
    assert back.dtype == np.int32
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype):
    for bits in (3, 7):
        subject = Index(bits, dtype)
        x = sample(subject, (3, 300))
        back = check(subject, x)
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_of_other_values_the_lowest_bits_are_kept(bits, dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(1).integers(info.min, info.max, (3, 300), endpoint=True)
    x = jnp.asarray(x, dtype)
    back = check(Index(bits, dtype), x)
    wanted = np.asarray(x).astype(np.int64) % 2**bits
    np.testing.assert_array_equal(back, wanted.astype(dtype))
    if bits == 8 and info.bits == 8:
        np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)], ids=str)
def test_empty(shape):
    words = index.encode(jnp.zeros(shape, jnp.int32), bits=3)
    assert words.size == 0 and index.stored_bytes(shape, bits=3) == 0
    back = index.decode(words, shape=shape, dtype=jnp.int32, bits=3)
    assert back.shape == shape


def test_one_bit_is_a_mask():
    for shape in SHAPES:
        x = sample(Index(1), shape)
        words = index.encode(x, bits=1)
        np.testing.assert_array_equal(words, mask.encode(x != 0))
        assert index.stored_bytes(shape, bits=1) == mask.stored_bytes(shape)


def test_a_row_wastes_at_most_31_codes():
    for length in range(128, 1100):
        for bits in (3, 8):
            stored_bytes = index.stored_bytes((6, length), bits=bits)
            assert stored_bytes == 6 * 4 * bits * -(-length // 32)


def test_refuses_what_is_no_index():
    with pytest.raises(ValueError, match=r"got float32\[4\]; .* convert indices"):
        index.encode(jnp.zeros(4), bits=2)
    with pytest.raises(ValueError, match="use jaxact_kernels.mask for booleans"):
        index.encode(jnp.zeros(4, bool), bits=1)
    for bits in (0, 9, 2.0, True):
        with pytest.raises(ValueError, match="an integer number of bits from 1 to 8"):
            index.encode(jnp.zeros(4, jnp.int32), bits=bits)
        with pytest.raises(ValueError, match="an integer number of bits from 1 to 8"):
            index.stored_bytes((4,), bits=bits)
    words = index.encode(jnp.zeros((2, 70, 3), jnp.int32), bits=2)
    options = {"shape": (2, 70, 3), "dtype": jnp.int32, "bits": 2}
    for wrong in ({"shape": (2, 70)}, {"bits": 3}):
        with pytest.raises(ValueError, match="pass the options that encode was called"):
            index.decode(words, **options | wrong)
    with pytest.raises(ValueError, match="the index format holds"):
        index.decode(words, **options | {"dtype": jnp.float32})
    with pytest.raises(ValueError, match="pass the options that encode was called"):
        jax.eval_shape(lambda w: index.decode(w, **options), words[:1])

"""The mask format against its NumPy twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jaxact_kernels import mask
from subjects import Mask, jitted, sample

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


def test_refuses_what_is_no_mask():
    with pytest.raises(ValueError, match="a mask is boolean; compare first"):
        mask.encode(jnp.zeros(4))
    words = jax.ShapeDtypeStruct((2, 3), jnp.uint32)
    with pytest.raises(ValueError, match="pass the shape that was encoded"):
        jax.eval_shape(lambda w: mask.decode(w, shape=(2, 70, 3)), words)

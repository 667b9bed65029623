"""`Rounded(codec)`: the gradient's bits are those of the codec, packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from support.variants import thorough


def loss(w, x):
    hidden = jnp.tanh(x @ w)
    return jnp.sum(jax.nn.softmax(hidden @ w.T) ** 2)


@thorough
@pytest.mark.parametrize(
    "codec",
    [jaxact.Quantize(2), jaxact.Dithered(3), jaxact.Rotated(1), jaxact.Cast("float16")],
    ids=str,
)
def test_gradients_have_the_same_bits_as_packed(codec):
    keys = jax.random.split(jax.random.key(0), 2)
    w, x = (jax.random.normal(key, (64, 64)) for key in keys)

    def gradient(codec):
        policy = jaxact.Policy(default=codec)
        compressed = jaxact.compress(loss, policy=policy, activations=("x",))
        return jax.jit(jax.grad(compressed))(w, x)

    packed, rounded = gradient(codec), gradient(jaxact.Rounded(codec))
    np.testing.assert_array_equal(packed, rounded)
    assert not np.array_equal(packed, jax.jit(jax.grad(loss))(w, x))


def test_it_stores_an_array_that_decoding_leaves_alone():
    x, seed = jax.random.normal(jax.random.key(1), (4, 96)), jnp.uint32(3)
    codec = jaxact.Rounded(jaxact.Quantize(1))
    stored = codec.encode(x, seed)
    assert stored.shape == x.shape and stored.dtype == x.dtype
    assert len(np.unique(stored[0])) == 2
    assert codec.decode(stored, x.shape, x.dtype) is stored
    inner = codec.codec
    wanted = inner.decode(inner.encode(x, seed), x.shape, x.dtype)
    np.testing.assert_array_equal(stored, wanted)


def test_it_is_described_as_its_codec_is():
    codec = jaxact.Rounded(jaxact.Rotated(2))
    assert (codec.bias, codec.bits) == (jaxact.Bias.OVER_ROTATIONS, 2)
    assert codec.label == "2 bits, rotated, not packed"
    assert "complex64" in codec.declines((4,), np.dtype("complex64"))


@pytest.mark.parametrize("wrong", [4, jaxact.Rounded(jaxact.Quantize(2))])
def test_another_thing_than_a_codec_is_refused(wrong):
    with pytest.raises(TypeError, match="Write Rounded"):
        jaxact.Rounded(wrong)

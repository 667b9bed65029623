"""A network around a compressed call is computed as around the uncompressed one.

XLA fuses a block's last operations with the statistics that the next block begins with,
and fusion decides about the order of sums and about roundings. So the block's end must
be no border for it. Outputs are compiled in a program of their own: others are beside
gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact import Policy
from support.programs import assert_same_bits

C = 16
W = jax.random.normal(jax.random.key(0), (1, 1, C, C)) / C**0.5


def normalized(x, axes):
    mean = x.mean(axes, keepdims=True)
    variance = (x * x).mean(axes, keepdims=True) - mean * mean
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def conv(w, x):
    x = jax.nn.relu(normalized(x, (0, 1, 2)))
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)


def pooled(x):
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, np.float32(0), lax.add, window, window, "VALID") / 4


ENDS = {
    "a pool": lambda w, x: pooled(conv(w, x)),
    "a scaled pool": lambda w, x: 0.7 * pooled(jax.nn.relu(conv(w, x))),
    "a join": lambda w, x: x + 0.5 * (jax.nn.relu(normalized(x, -1)) @ w[0, 0]),
}
READERS = {
    "a norm": lambda y: jnp.square(jnp.sin(normalized(y, (0, 1, 2)))).mean((1, 2, 3)),
    "sums": lambda y: y.sum((0, 1)),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_readers_of_a_call_keep_their_bits(end, reader):
    compressed = jaxact.compress(end, policy=Policy(bits=8), activations="x")
    step = lambda f: jax.jit(lambda w, x: jax.vjp(lambda *a: reader(f(*a)), w, x)[0])
    for batch, size in (2, 8), (4, 8), (3, 9):
        x = jax.random.normal(jax.random.key(1), (batch, size, size, C))
        assert_same_bits(step(compressed)(W, x), step(end)(W, x))

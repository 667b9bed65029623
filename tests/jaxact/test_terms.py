"""Values that XLA rounds once with a sum: the same bits with and without compression.

Only programs whose bits do not depend on whether gradients are asked for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact


def noise(x):
    return lax.stop_gradient(jnp.cos(x))


SAMPLES = {
    "a normal's sample": lambda a, b, c: c + jnp.exp(a / 2) * noise(b),
    "less": lambda a, b, c: c - jnp.exp(a / 2) * noise(b),
    "in another shape": lambda a, b, c: (
        c + (jnp.exp(a / 2) * noise(b)).reshape(64, 2, 128).reshape(c.shape)
    ),
    "a product that JAX keeps": lambda a, b, c: c + a * b + jnp.sin(a * b),
    "a factor twice": lambda a, b, c: c + jnp.exp(a) * jnp.exp(a),
    "a constant factor": lambda a, b, c: c + jnp.exp(a) * jnp.float32(0.3),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_product_and_its_sum_are_rounded_as_without_compression(sample):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(64, 256)] + 3 * [(256, 256)] + [(256, 64)]
    x, *ws = (jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True))

    def loss(ws, x):
        *inner, outer = ws
        y = sample(*(jnp.tanh(x) @ w for w in inner))
        return ((y @ outer) ** 2).sum(), y

    results = [
        jax.jit(jax.value_and_grad(f, has_aux=True))(ws, x)[0]
        for f in (loss, jaxact.compress(loss))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)

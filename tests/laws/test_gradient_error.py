"""The noise of a deep network's gradient, and that it averages out.

An 8-layer pre-LN transformer at initialization, batch 4, length 128, width 256. The
bars are those of a network of this kind whose matmul operands, attention weights,
normalized values and local derivatives are rounded, at 2 and at 4 bits.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxact
from examples.models import transformer

SIZE = transformer.Size(layers=8, batch=4, length=128, width=256, hidden=1024)
DRAWS = 32


def ravel(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.parametrize("bits, limit", [(2, 0.19), (4, 0.033)])
def test_noise_of_a_gradient(bits, limit):
    layers = transformer.init(jax.random.key(0), SIZE.scanned)
    x = jax.random.normal(jax.random.key(1), SIZE.input.shape)
    policy = jaxact.Policy(bits=bits)
    small = jaxact.compress(transformer.block, policy=policy, activations=(1,))

    def gradient(block):
        return ravel(jax.grad(transformer.scanned_loss, 1)(block, layers, x))

    @jax.jit
    def run(keys):
        true = gradient(transformer.block)

        def draw(total, key):
            error = gradient(functools.partial(small, rounding_key=key)) - true
            return total + error, jnp.linalg.norm(error)

        total, errors = jax.lax.scan(draw, jnp.zeros_like(true), keys)
        return jnp.linalg.norm(true), errors, jnp.linalg.norm(total) / DRAWS

    norm, errors, of_mean = run(jax.random.split(jax.random.key(2), DRAWS))
    one = float(errors.mean() / norm)
    assert one <= limit
    # Unbiased noise leaves 1 / sqrt(32) of one draw, within 1 % for so many elements.
    assert of_mean / norm <= 1.15 * one / DRAWS**0.5

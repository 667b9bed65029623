"""Losses over two views that hardly differ, whose gradients are small differences.

The oracle is JAX's own gradient, which one draw at 8 bits must lie near.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

X, NOISE, OTHER = jax.random.normal(jax.random.key(0), (3, 64, 32))
W = jax.random.normal(jax.random.key(1), (32, 64)) / 32**0.5
VIEW = X + 0.01 * NOISE


def unit(v):
    return v / jnp.linalg.norm(v, axis=-1, keepdims=True)


def length(v):
    return jnp.linalg.norm(v, axis=-1)


def mahalanobis(v):
    return jnp.einsum("bd,de,be->b", v, W.T @ W, v)


LOSSES = {
    "consistency": lambda a, b, c: ((unit(a) - unit(b)) ** 2).sum(-1),
    "triplet": lambda a, b, c: jax.nn.relu(
        length(unit(a) - unit(b)) - length(unit(a) - unit(c)) + 1.5
    ),
    "probabilities": lambda a, b, c: (
        (jax.nn.softmax(a) - jax.nn.softmax(b) + 1e-6) ** 2
    ).sum(-1),
    "dot product": lambda a, b, c: jax.vmap(jnp.vdot)(*[unit(a) - unit(b)] * 2),
    "Mahalanobis": lambda a, b, c: mahalanobis(unit(a) - unit(b)),
    "angle": lambda a, b, c: jnp.sqrt(1 - (unit(a) * unit(b)).sum(-1)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_two_views(loss):
    """Errors were 0.5 to 0.8 gradients."""
    f = lambda *views: loss(*(jnp.sin(x) @ W for x in views))
    policy = Policy(bits=8)
    assert gradient_error(f, X, VIEW, OTHER, policy=policy, argnums=(0, 1)) < 0.03


def test_a_difference_that_is_no_distance_is_not_stored():
    """That between two products which are stored themselves."""

    def f(w, x):
        a, b = x @ w, x @ w[::-1]
        return (a - b) @ w.T + jnp.sin(a @ w.T) + jnp.sin(b @ w.T)

    small = jaxact.compress(f, policy=Policy(bits=8), activations=1)
    rows = jaxact.residuals(small, W, X).rows
    assert sum(row.shape == (64, 64) for row in rows) == 2

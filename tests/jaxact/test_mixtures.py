"""Densities with several components, whose slopes meet their share of the likelihood.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

X = jax.random.normal(jax.random.key(0), (1024, 64))
DEVIATIONS = {
    "softplus": lambda h: jax.nn.softplus(h) + 1e-3,
    "elu": lambda h: jax.nn.elu(h) + 1 + 1e-6,
    "exp": jnp.exp,
    "inverse": lambda h: 1 / jnp.exp(-h),
    "clipped": lambda h: jnp.exp(jnp.clip(h, -7, 7)),
}
# Logarithms of densities of mean / s.
DENSITIES = {
    "normal": lambda z: -(z**2) / 2,
    "logistic": lambda z: -z - 2 * jax.nn.softplus(-z),
    "laplace": lambda z: -jnp.abs(z),
}


def of_mixture(h, deviation):
    """The likelihood of 0 in mixtures of normals, by parts of a network's output."""
    weights, means, deviations = jnp.split(h, 3, -1)
    s = deviation(deviations)
    terms = jax.nn.log_softmax(weights) + DENSITIES["normal"](means / s) - jnp.log(s)
    return jax.nn.logsumexp(terms, -1)


def by_exponentials(h, density):
    """The same of any density, with exp(-h) for 1 / s."""
    weights, means, deviations = jnp.split(h, 3, -1)
    z = means * jnp.exp(-deviations)
    terms = jax.nn.log_softmax(weights) + density(z) - deviations
    return jax.nn.logsumexp(terms, -1)


@pytest.mark.thorough
@pytest.mark.parametrize("deviation", DEVIATIONS.values(), ids=DEVIATIONS)
def test_a_mixture_by_any_deviation(deviation):
    """Errors were up to 2e3 gradients."""
    loss = lambda w, x: of_mixture(x @ w, deviation)
    w = jax.random.normal(jax.random.key(6), (64, 96)) / 4
    assert gradient_error(loss, w, X, policy=Policy(bits=8), argnums=(0, 1)) < 0.05


@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
def test_a_mixture_by_exponentials(density):
    """They are as large as inverses near a pole: 1.4 gradients, 8e3 with normals."""
    loss = lambda w, x: by_exponentials(x @ w, density)
    w = jax.random.normal(jax.random.key(6), (64, 96)) / 4
    assert gradient_error(loss, w, X, policy=Policy(bits=8), argnums=(0, 1)) < 0.05


def in_several_dimensions(w, x, targets):
    """The likelihood of targets that all components share."""
    h = (x @ w).reshape(-1, 8, 9)
    weights, means, deviations = h[..., 0], h[..., 1:5], h[..., 5:]
    z = (targets[:, None] - means) * jnp.exp(-deviations)
    densities = (DENSITIES["normal"](z) - deviations).sum(-1)
    return jax.nn.logsumexp(jax.nn.log_softmax(weights) + densities, -1)


def test_targets_that_are_activations():
    """They are the third source of a slope: at 8 bits the noise was 1e3 gradients."""
    w = jax.random.normal(jax.random.key(6), (64, 72)) / 4
    loss = in_several_dimensions
    assert gradient_error(loss, w, X, X[:, :4], policy=Policy(bits=8)) < 0.05

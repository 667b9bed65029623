"""Exponentials times arrays of floats: masks that nothing but their values tells.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error, relative_error

pytestmark = pytest.mark.unoptimized

SIZE = 64
KEYS = jax.random.split(jax.random.key(0), 6)
X = jax.random.normal(KEYS[0], (SIZE, SIZE))
FEATURES = jax.random.normal(KEYS[1], (SIZE, 16))
IMAGES = jax.random.normal(KEYS[2], (SIZE, 32))
EYE = jnp.eye(SIZE)
OTHERS = 1 - EYE
EDGES = jax.random.bernoulli(KEYS[3], 0.1, X.shape) | (EYE > 0)

OFF_DIAGONAL = {
    "1 - eye": lambda e: e * (1 - jnp.eye(SIZE)),
    "1 - one_hot": lambda e: (1 - jax.nn.one_hot(jnp.arange(SIZE), SIZE)) * e,
    "closed over": lambda e: e * OTHERS,
    "difference": lambda e: e - e * EYE,
    "mask and weights": lambda e: e * OTHERS * jnp.exp(FEATURES[:, :1]),
}


def others_likelihood(scores, mask):
    return scores - jnp.log(mask(jnp.exp(scores)).sum(-1, keepdims=True))


@pytest.mark.parametrize("mask", OFF_DIAGONAL.values(), ids=OFF_DIAGONAL)
def test_a_contrastive_loss(mask):
    """The exponentials on the diagonal are e^10; unmasked, 0.5 gradients off."""

    def f(z):
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        scores = z @ z.T / 0.1
        return others_likelihood(scores - scores.max(-1, keepdims=True), mask)

    assert gradient_error(f, IMAGES, policy=Policy(bits=8)) < 0.05


@pytest.mark.parametrize("activations", ["scores", ["scores", "mask"], None])
def test_a_mask_that_is_given(activations):
    def f(scores, mask):
        return others_likelihood(scores + 10 * EYE, lambda e: e * mask)

    compressed = jaxact.compress(f, policy=Policy(bits=8), activations=activations)
    assert relative_error(*gradients(X, OTHERS, of=(compressed, f))) < 0.05


def gradients(*args, of):
    """Of several functions by the first argument, with normal cotangents."""
    weights = jax.random.normal(KEYS[4], X.shape)
    weighted = lambda *args, f: jnp.vdot(f(*args), weights)
    return [jax.grad(weighted)(*args, f=f) for f in of]


def attention(scores, values, edges):
    scores = scores - scores.max(-1, keepdims=True)
    weights = jnp.exp(scores) * edges.astype(jnp.float32)
    return (weights / weights.sum(-1, keepdims=True)) @ values


FLOATS = EDGES.astype(jnp.float32)
GIVEN = {
    "floats": lambda s, v: attention(s, v, FLOATS),
    "made inside": lambda s, v: attention(s, v, jnp.minimum(FLOATS + EYE, 1)),
}


@pytest.mark.parametrize("attend", GIVEN.values(), ids=GIVEN)
def test_attention_along_edges(attend):
    """A row's largest score is mostly at no edge; unmasked, an error of 2 gradients."""
    args = 3 * X, FEATURES
    error = gradient_error(attend, *args, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


def test_attention_along_edges_stores_one_array():
    """And a bit, the maximum's, as with `jnp.where`."""
    compressed = jaxact.compress(GIVEN["floats"], policy=Policy(bits=8))
    table = jaxact.residuals(compressed, 3 * X, FEATURES)
    large = [r for r in table.rows if r.shape == X.shape]
    assert [8 * r.stored_bytes // X.size for r in large] == [8, 1]


@pytest.mark.thorough
def test_a_mask_that_a_compressed_function_closes_over():
    """It is a tracer of the gradient around."""
    f = lambda x, mask: jnp.tanh(others_likelihood(x, lambda e: e * mask))

    def inside(x, mask):
        inner = jaxact.compress(lambda x: f(x, mask), policy=Policy(bits=8))
        return inner(x + 10 * EYE)

    plain = lambda x, mask: f(x + 10 * EYE, mask)
    assert relative_error(*gradients(X, OTHERS, of=(inside, plain))) < 0.05


def test_gains_that_are_trained_are_stored_through_one_array():
    """Their gradient needs the exponentials, from which the products follow."""

    def f(x, gains):
        return jnp.tanh(jnp.exp(x) * gains[None] @ FEATURES)

    args, argnums = (X, jnp.exp(X[0])), (0, 1)
    policy = Policy(bits=8)
    assert gradient_error(f, *args, policy=policy, argnums=argnums) < 0.05
    compressed = jaxact.compress(f, policy=policy, activations="x")
    table = jaxact.residuals(compressed, *args, argnums=argnums)
    assert len([r for r in table.rows if r.shape == X.shape]) == 1

"""Values whose sum is taken from a number: distances of hyperbolic embeddings."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

X, Y = jax.random.normal(jax.random.key(0), (2, 256, 64))
W = jax.random.normal(jax.random.key(1), (64, 16)) / 8
REASON = "a number minus its sum"


def in_ball(x):
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.tanh(length) * x / length


def distance(u, v):
    """Nickel and Kiela, Poincare Embeddings, equation 1."""
    apart = ((u - v) ** 2).sum(-1)
    return jnp.arccosh(1 + 2 * apart / (edge(u) * edge(v)))


def edge(u):
    return 1 - (u * u).sum(-1)


def clipped(u, v):
    apart = ((u - v) ** 2).sum(-1)
    z = 1 + 2 * apart / jnp.maximum(edge(u) * edge(v), 1e-5)
    return jnp.log(z + jnp.sqrt(jnp.maximum(z * z - 1, 1e-7)))


def by_product(u, v):
    """In a ball of curvature 2."""
    u, v = u / 2**0.5, v / 2**0.5
    squares = jnp.einsum("ni,ni->n", u, u)
    return jnp.log(1 - 2 * squares) * (u * v).sum(-1)


@pytest.mark.thorough
@pytest.mark.parametrize("f", [distance, clipped])
def test_distances_in_a_ball(f):
    """Before, one draw erred by 0.8 and 0.2; at 4 bits by 13 and 3."""
    embedded = lambda w, x, y: f(in_ball(x @ w), in_ball(y @ w))
    # As in test_fidelity.py: 0.016 of a group's deviation for each rounded factor.
    error = gradient_error(embedded, W, X, Y, policy=Policy(8), argnums=0)
    assert error < 0.05


@pytest.mark.parametrize("f", [distance, clipped, by_product])
def test_what_is_summed_stays_exact(f):
    embedded = lambda x, y: f(in_ball(jnp.sin(x)), in_ball(jnp.sin(y)))
    rows = jaxact.residuals(embedded, X, Y, policy=Policy(8)).rows
    assert [row for row in rows if row.why.startswith(REASON)]


FAR = {
    "bounded": lambda x: 1 / (2 - jnp.tanh(jnp.sin(x).mean(-1))),
    "no function with a pole": lambda x: 1 - (jnp.sin(x) ** 2).sum(-1),
    "plus a sum": lambda x: 1 / (1 + (jnp.sin(x) ** 2).sum(-1)),
}


@pytest.mark.parametrize("name", FAR)
def test_sums_far_from_a_pole_are_packed(name):
    rows = jaxact.residuals(lambda x: FAR[name](x), X, policy=Policy(8)).rows
    assert not [row for row in rows if row.why.startswith(REASON)]
    assert [row for row in rows if row.action.bits]

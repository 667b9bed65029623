"""Small arrays from which far larger ones are computed: differences of all pairs."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized


def distances(z):
    """An energy distance's term."""
    return jnp.sqrt(((z[:, None] - z[None]) ** 2).sum(-1) + 1e-8)


PAIRS = {
    "distances": distances,
    "ranks": lambda z: jax.nn.sigmoid((z[:, :, None] - z[:, None]) / 0.3).sum(-1),
    "nearest": lambda z: ((z[:, None] - jnp.sin(z)[None]) ** 2).sum(-1).min(1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_differences_of_all_pairs_are_computed_again(name):
    """An array for each pair, packed, would take more than the points themselves."""
    f = lambda w, x: jnp.sin(PAIRS[name](jnp.tanh(x @ w) @ w)).sum()
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64)) / 4
    table = jaxact.residuals(jaxact.compress(f, policy=Policy(8)), w, x)
    assert table.stored_bytes < 3 * 64 * 64 * 4
    assert gradient_error(f, w, x, policy=Policy(8), argnums=(0, 1)) < 0.032


def test_a_few_copies_are_stored_themselves():
    f = lambda w, x: jnp.sin((x @ w)[:, None] + jnp.arange(4.0)[None, :, None]) ** 3
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64)) / 8
    rows = jaxact.residuals(jaxact.compress(f, policy=Policy(8)), w, x).rows
    assert not [row for row in rows if "larger arrays" in row.why]

"""The residuals of a step that takes its gradient itself, scans included."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Exact, Policy, Rule


@pytest.mark.parametrize("is_jitted", [False, True], ids=["plain", "jitted"])
def test_residuals_of_a_whole_step(is_jitted):
    """The step takes its gradient itself; its table is that of the loss."""
    layer = jaxact.compress(
        lambda w, x: jnp.tanh(x @ w), policy=Policy(bits=2), activations=1
    )

    def loss(ws, x):
        return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2).sum()

    def step(ws, x):
        return ws - 0.1 * jax.grad(loss)(ws, x)

    ws, x = jnp.ones((3, 64, 64)), jnp.ones((32, 64))
    found = jaxact.residuals(jax.jit(step) if is_jitted else step, ws, x, argnums=())
    expected = jaxact.residuals(loss, ws, x, argnums=0)
    as_text = lambda table: sorted(
        (r.key, r.action, r.stored_bytes) for r in table.rows
    )
    assert as_text(found) == as_text(expected)
    assert found.stored_bytes < found.exact_bytes / 2


def test_an_input_kept_exactly_in_a_scan_has_a_row():
    layer = jaxact.compress(
        lambda w, x: jnp.tanh(x @ w),
        policy=Policy(bits=2, rules=(Rule(Exact(), key="x"),)),
        activations=1,
    )

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()

    ws, x = jnp.ones((3, 64, 64)), jnp.ones((32, 64))
    rows = jaxact.residuals(loss, ws, x, argnums=0).rows
    assert [row.stored_bytes for row in rows if row.path == "carry"] == [3 * x.nbytes]

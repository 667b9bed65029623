"""The argument of a pole that the step before a scan's made.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxact import Policy, compress, residuals
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

STEPS, ROWS, STATES = 6, 32, 64
X = 2 * jax.random.normal(jax.random.key(3), (STEPS, ROWS, STATES))
W = jax.random.normal(jax.random.key(5), (STATES, STATES)) / 8
# A filter's belief about a hidden state, from that of the step before.
BELIEFS = {
    "its logarithm": lambda b, x: jax.nn.softmax(jnp.log(b) + x @ W * 2),
    "with a small number": lambda b, x: jax.nn.softmax(
        jnp.log(b + 1e-9) * 0.9 + x @ W * 3
    ),
    "scaled": lambda b, x: jax.nn.softmax(jnp.log(b * 0.5) * 0.9 + x @ W),
}


def scanned(step, *, reverse=False):
    def f(x):
        prior = jnp.full((ROWS, STATES), 1 / STATES)
        both = lambda b, x: (step(b, x),) * 2
        beliefs = lax.scan(both, prior, x, reverse=reverse)[1]
        return jnp.tanh(beliefs * 20 @ W)

    return f


@pytest.mark.parametrize("step", BELIEFS.values(), ids=BELIEFS)
def test_a_belief_whose_logarithm_the_next_step_takes(step):
    """Its softmax was rounded: gradients erred by 1 to 2 times their size."""
    assert gradient_error(scanned(step), X, policy=Policy(bits=8)) < 0.05


@pytest.mark.thorough
def test_in_reverse():
    f = scanned(BELIEFS["its logarithm"], reverse=True)
    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.05


@pytest.mark.thorough
def test_among_other_states():
    """One that a network computes, which no pole reads, is packed as before."""

    def f(x):
        def step(state, x):
            b, h = state
            h = jnp.tanh(h @ W + x)
            b = jax.nn.softmax(jnp.log(b) * 0.9 + h * 3)
            return (b, h), jnp.tanh(b * 20 @ W)

        start = jnp.full((ROWS, STATES), 1 / STATES), jnp.zeros((ROWS, STATES))
        return lax.scan(step, start, x)[1]

    policy = Policy(bits=8)
    assert gradient_error(f, X, policy=policy) < 0.05
    table = residuals(compress(f, policy=policy), X)
    packed = {row.key for row in table.rows if row.stored_bytes < row.exact_bytes}
    assert "carry[1]@scan" in packed and "carry@scan" not in packed

"""Integers that a program bounds take few bits, and all others stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact import Exact, Offload, Policy, Quantize, Rule, compress, residuals

# Where all integers stay as they are, nothing is compressed.
pytestmark = pytest.mark.filterwarnings("ignore:jaxact")

X = jax.random.normal(jax.random.key(0), (64, 96))


def expert(x, count=6):
    """Which of so many lines is highest at each x."""
    slopes = jnp.arange(count, dtype=jnp.float32) - count / 2
    slopes = slopes.reshape(-1, *[1] * x.ndim)
    return jnp.argmax(x[None] * slopes - slopes**2 / 4, 0)


def wrapped(x):
    """-200 to 55: the sum is 200 to 320, where it wraps around."""
    parts = [8 * expert(y).astype(jnp.uint8) for y in (x, -x, x + 1)]
    return sum(parts, jnp.uint8(200)).astype(jnp.int32) - 200


def filled(x):
    """Every other one, and 50 for those beyond the last."""
    places = 2 * jnp.arange(x.size // 2).reshape(len(x), -1) + 32
    return jnp.take(expert(x).reshape(-1), places, mode="fill", fill_value=50)


def fourth(x):
    """0, 1, 16, 81: no square of 0 to 3."""
    return jax.lax.cummax(expert(x, count=4) ** 4, axis=1)


def true(x):
    """-1 or 0: any number but 0 is true."""
    negative = jax.lax.convert_element_type(-expert(x, count=4), bool)
    return jax.lax.cummin(-negative.astype(jnp.int32), axis=1)


def float8(x):
    """Of 15 in a float8 there is 16."""
    x = jnp.clip(16 * jnp.abs(x), 0, 15).astype(jnp.float8_e5m2)
    return jax.lax.cummax(x.astype(jnp.int32), axis=1)


def many(x):
    return expert(x, count=300)


def look_up(integers):
    """Elements of y, to whose places the backward pass adds."""

    def f(x, y):
        found = jnp.take_along_axis(y, integers(x), 1, mode="clip")
        return (found * x[:, : found.shape[1]]).sum()

    return f


def rows_of(integers, policy):
    f = compress(look_up(integers), policy=policy)
    rows = residuals(f, X, X, argnums=1).rows
    return [row for row in rows if row.dtype.kind in "iu"]


@pytest.mark.parametrize(
    "integers", [expert, wrapped, filled, fourth, true, float8, many]
)
def test_gradients_are_the_same_bits(integers):
    gradient = lambda f: jax.jit(jax.grad(f, argnums=1))(X, X)
    f = look_up(integers)
    np.testing.assert_array_equal(gradient(compress(f)), gradient(f))


def test_bits_that_hold_them():
    (few,), (many_,) = (rows_of(f, Policy(bits=2)) for f in (expert, many))
    assert (few.bias, few.action.label, few.why) == (
        "exact",
        "3 bits",
        "a few bits are exact",
    )
    assert few.stored_bytes == X.size * 3 // 8
    assert (many_.action, many_.why) == (Exact(), "int32 stays exact")


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (Policy(rules=(Rule(Quantize(2)),)), "3 bits"),
        (Policy(rules=(Rule(Exact()),)), "exact"),
        (Policy(default=Quantize(4)), "3 bits"),
        (Policy(default=Offload(Quantize(4))), "3 bits, host"),
    ],
    ids=["a rule for floats", "a rule for all", "a default", "offloaded"],
)
def test_policies(policy, label):
    (row,) = rows_of(expert, policy)
    assert row.action.label == label

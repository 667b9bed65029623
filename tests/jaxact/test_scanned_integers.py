"""Integers that a scan gives, to operations that take no tangent for them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

X = jax.random.normal(jax.random.key(0), (64, 64))


def scanned(x):
    """States, and the place of the largest element in each; a counter as well."""

    def step(carry, x):
        h, count = carry
        h = jnp.tanh(h + x)
        return (h, count + 1), (h, jnp.argmax(h, -1))

    start = x[:16], jnp.int32(0)
    (_, count), (h, places) = lax.scan(step, start, x.reshape(4, 16, 64))
    return h.reshape(64, 64), places, count


def by(places):
    return places.reshape(64, 1).astype(jnp.float32)


OPERATIONS = {
    "largest": lambda places, count: by(lax.cummax(places, axis=1)),
    "product": lambda places, count: by(jnp.cumprod(places, 1)),
    "all": lambda places, count: jnp.prod(places, 1).sum().astype(jnp.float32),
    "counter": lambda places, count: by(
        lax.fori_loop(0, count, lambda i, x: x + i, places)
    ),
    "branches": lambda places, count: by(
        lax.cond(count > 2, lambda x: x, lambda x: x + 1, places)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_computed_from_them(operation):
    def f(x):
        h, places, count = scanned(x)
        return h * operation(places, count)

    assert gradient_error(f, X, policy=Policy(8)) < 0.02

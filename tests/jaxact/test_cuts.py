"""Parts of one product: stored as one where groups end with them, else apart."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Policy, Quantize, Rule

pytestmark = pytest.mark.unoptimized

T, D = 96, 64  # rows, their length
X = jax.random.normal(jax.random.key(0), (T, D))
W = jax.random.normal(jax.random.key(1), (D, 12 * D)) / 8


def rows(f, policy):
    """The table of f(w, x), `x` the activation, without small statistics."""
    small = jaxact.compress(f, policy=policy, activations=1)
    return [r for r in jaxact.residuals(small, W, X).rows if np.prod(r.shape) > T]


def stored(f, policy):
    return collections.Counter(r.shape for r in rows(f, policy))


def cut(y, mark=lambda v: v):
    q, k, v = map(mark, jnp.split(y, 3, -1))
    return jax.nn.softmax(q @ k.T) @ v


WIDE = 768  # columns in three parts of 256, a group's length
# How parts are cut from one product, and whether they are stored as one.
CUTS = {
    "split": (cut, True),
    "after a bias": (lambda y: cut(y + jnp.ones((1, WIDE))), True),
    "sliced": (
        lambda y: jax.nn.softmax(y[:, :256] @ y[:, 256:512].T) @ y[:, 512:],
        True,
    ),
    "heads": (lambda y: mixed(*jnp.unstack(y.reshape(T, 3, 4, 64), axis=1)), True),
    "heads, parts last": (
        lambda y: mixed(*jnp.unstack(y.reshape(T, 4, 64, 3), axis=3)),
        False,
    ),
    "moved": (lambda y: cut(y[:, ::-1]), False),
    "named": (lambda y: cut(y, lambda v: checkpoint_name(v, "part")), False),
    "two of them": (lambda y: jnp.sin(y[:, :256] @ y[:, 256:512].T), False),
}


def mixed(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("thd,Thd->htT", q, k))
    return jnp.einsum("htT,Thd->thd", weights, v)


@pytest.mark.parametrize("f, is_one", CUTS.values(), ids=CUTS)
def test_parts_that_end_with_groups_are_stored_as_one(f, is_one):
    shapes = stored(lambda w, x: f(x @ w), Policy(bits=2))
    assert ((T, WIDE) in shapes) == is_one


@pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning")  # 4 bits, by a rule
def test_parts_that_are_decided_about_apart_are_stored_apart():
    def f(w, x):
        mix = jax.checkpoint(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)
        return mix(*jnp.split(x @ w, 3, -1))

    # By default queries and keys, whose scores are computed again, take 8 bits.
    parts = [r.action.bits for r in rows(f, Policy(4)) if r.shape == (T, 256)]
    assert parts == [8, 8, 4]
    again = Rule(Quantize(4), recomputed_from=True)
    shapes = stored(f, Policy(4, rules=[again]))
    assert shapes == {(T, D): 1, (T, WIDE): 1}
    split = Rule(Quantize(4), primitive="split")
    shapes = stored(f, Policy(4, rules=[split, again]))
    assert shapes == {(T, D): 1, (T, 256): 3}


def test_a_rule_about_a_whole_is_one_about_its_parts():
    """So that bits which were measured for it hold."""
    f = lambda w, x: cut(x @ w)
    (key,) = [r.key for r in rows(f, Policy(4)) if r.shape == (T, WIDE)]
    policy = Policy(4, rules=[Rule(Quantize(2), key=key)])
    (row,) = [r for r in rows(f, policy) if r.shape == (T, WIDE)]
    assert row.action == Quantize(2)


def test_a_number_has_no_parts():
    """Its ReLU is one, and it is stored as a whole."""
    det = jnp.linalg.det

    def f(x):
        volume = jax.lax.cond(x[0, 0] > 0, det, det, x)
        return jnp.log(jnp.maximum(volume, 0.0) + 1e-3)

    matrix = 2 * jnp.eye(8)
    gradient = jax.grad(jaxact.compress(f, policy=Policy(8)))(matrix)
    np.testing.assert_allclose(gradient, jax.grad(f)(matrix), rtol=1e-5)

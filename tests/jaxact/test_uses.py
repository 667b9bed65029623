"""How backward programs use what they keep, told apart by small programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.extend import core as jex

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.read import is_float, variables_in
from jaxact._plan.forward import trace_forward
from jaxact._plan.uses import find_uses

X = jnp.linspace(0.1, 2.0, 12).reshape(3, 4)
W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def uses(f, *args, alike=False):
    """Whether any residual of f is used (repeatedly, nonlinearly, as a divisor).

    `alike`: those of the shape of X are computed from one rounded value, the others
    (row statistics) are exact.
    """
    run = lambda _, *values: [f(*values)]
    forward = trace_forward(run, np.uint32(0), args, [True] * len(args))
    residuals = variables_in(forward.backward.residuals)
    bits = {
        v: 2 if alike else 2 << i
        for i, v in enumerate(residuals)
        if is_float(v) and (not alike or v.aval.shape == X.shape)
    }
    found = find_uses(forward, bits)
    return tuple(
        map(bool, (found.repeated, found.nonlinear, found.divided | found.solved))
    )


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * jnp.exp(2 * jnp.log(x)) * ct,))

linear_solve_p = jex.Primitive("linear_solve")  # as Lineax has it
linear_solve_p.def_abstract_eval(lambda matrix, vector: vector)


@jax.custom_vjp
def solved(vector, matrix):
    return linear_solve_p.bind(matrix, vector)


solved.defvjp(
    lambda vector, matrix: (solved(vector, matrix), matrix),
    lambda matrix, ct: (linear_solve_p.bind(matrix, ct), jnp.zeros_like(matrix)),
)

LINEAR = (False, False, False)
ROWS = jnp.array([2, 0])
EDGES = jnp.array([[0, 0], [1, 2], [2, 0], [2, 1]])
SIZES = jnp.array([1, 2])  # of the groups in X


def over_edges(weights, x):
    """Features that a sparse matrix mixes."""
    return sparse.BCOO((weights, EDGES), shape=(3, 3)) @ x


def compressed_rows(weights, x):
    ends = jnp.array([0, 1, 2, 4])
    return sparse.CSR((weights, EDGES[:, 1], ends), shape=(3, 3)) @ x


def from_edges(weights):
    return sparse.BCOO((weights, EDGES), shape=(3, 3)).T.todense()


def by_expert(x, w):
    return lax.ragged_dot(x, w.reshape(2, 4, 2), SIZES)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: jnp.sin(x) @ w,
        lambda x, w: jnp.where(x > 1, x, 0) * x,
        lambda x, w: jnp.exp(x).sum(0),
        lambda x, w: lax.cond(True, lambda y: jnp.sin(y) @ w, lambda y: y @ w, x),
        lambda x, w: lax.scan(lambda c, y: (c + y, y * w[0]), jnp.zeros(4), x)[1],
        lambda x, w: jnp.sort(x, axis=0) * 2,
        lambda x, w: x.at[1:].multiply(jnp.sin(w)[:2]),
        lambda x, w: x.at[ROWS].multiply(jnp.sin(w)[:2], unique_indices=True),
        lambda x, w: over_edges(w[0], jnp.sin(x)) @ w,
        lambda x, w: over_edges(jnp.sin(x)[0], jnp.sin(x) @ w),
        jax.checkpoint(lambda x, w: over_edges(jnp.ones(4), x) @ w),
        jax.checkpoint(lambda x, w: compressed_rows(jnp.ones(4), x) * w[:3]),
        jax.checkpoint(lambda x, w: from_edges(x[0]) @ w[:3]),
        by_expert,
    ],
)
def test_products_with_a_cotangent_are_linear(f):
    assert uses(f, X, W) == LINEAR


def test_factors_that_may_meet_at_an_element_are_not_linear():
    """`.at[].multiply` with indices that may be equal; of one element, their square."""
    factors = lambda x: lax.stop_gradient(jnp.sin(x))
    repeated, nonlinear, divided = uses(
        lambda x: (2 * x).at[ROWS].multiply(factors(x)[:2]), X
    )
    assert nonlinear and not divided


@pytest.mark.parametrize(
    "product",
    [
        lambda x: over_edges(x[0], x),
        lambda x: by_expert(x, jnp.tile(x, (2, 1))[:4]),
        lambda x: x @ x.T @ x,
    ],
    ids=["sparse", "ragged", "dense"],
)
def test_products_of_what_one_value_makes_use_it_twice(product):
    used = uses(jax.checkpoint(lambda x, w: product(2 * x)[:, :1] * w[:3]), X, W)
    assert used == (True, False, False)


def test_a_norm_and_a_softmax_use_a_value_twice():
    softmax = lambda x: jax.nn.softmax(x)
    norm = lambda x: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True))
    )
    for f in (softmax, norm):
        repeated, nonlinear, divided = uses(f, X, alike=True)
        assert repeated and not nonlinear and not divided


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda y: 2 * y, x),
        lambda f: lambda x: lax.switch(1, [lambda y: y, f], x),
        lambda f: lambda x: lax.scan(lambda c, y: (c, f(y)), 0.0, x)[1],
        lambda f: jax.jit(f, donate_argnums=0),
    ],
    ids=["plain", "jit", "cond", "switch", "scan", "donating"],
)
@pytest.mark.parametrize(
    "f",
    [jax.checkpoint(lambda x: jnp.exp(jnp.sin(x))), cubed],
    ids=["checkpoint", "custom_vjp"],
)
def test_recomputing_is_nonlinear_wherever_it_is(f, wrap):
    _, nonlinear, divided = uses(wrap(f), X)
    assert nonlinear or divided


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: jnp.linalg.solve(w + 4 * jnp.eye(4), x.T),
        lambda x, w: lax.cond(
            True, lambda y: jnp.linalg.solve(w + 4 * jnp.eye(4), y), lambda y: y, x.T
        ),
        lambda x, w: solved(x, jnp.sin(w)),
        lambda x, w: jax.scipy.special.xlogy(x, x),
        jax.checkpoint(lambda x, w: jnp.log(x)),
    ],
)
def test_solving_and_dividing_have_no_bound(f):
    assert uses(f, X, W)[2]


def test_forward_program_is_the_forward_program():
    run = lambda _, x: [jnp.sin(x) * 2]
    forward = trace_forward(run, np.uint32(0), [X], [True])
    out, *residuals = jax.core.eval_jaxpr(forward.jaxpr, forward.consts, 0, X)
    np.testing.assert_array_equal(out, jnp.sin(X) * 2)
    vjp = jax.tree.unflatten(forward.vjp_tree, residuals)
    expected = jax.vjp(lambda x: jnp.sin(x) * 2, X)[1](X)
    np.testing.assert_array_equal(vjp([X])[0], expected[0])
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X))
    assert "cotangent" not in str(forward.jaxpr) and jaxpr.eqns


@pytest.mark.parametrize(
    "bend",
    [
        lambda g: g - g.max(-1, keepdims=True),
        lambda g: jnp.sort(g, -1),
        lambda g: lax.cummax(g, 1),
        lambda g: lax.top_k(g, 2)[0] @ W[:2],
        lambda g: g * lax.reduce_prod(g, axes=(1,))[:, None],
    ],
    ids=["maximum", "sort", "running maximum", "top k", "product"],
)
def test_a_rule_that_ranks_cotangents_is_nonlinear(bend):
    """The mean of a maximum is not the maximum of the means."""

    @jax.custom_vjp
    def ranked(x):
        return 1 * x

    ranked.defvjp(lambda x: (1 * x, None), lambda _, g: (bend(g),))
    assert uses(lambda x: jnp.sin(ranked(jnp.sin(x))), X)[1]


def test_a_rule_that_adds_cotangents_is_linear():
    @jax.custom_vjp
    def added(x):
        return 1 * x

    added.defvjp(lambda x: (1 * x, None), lambda _, g: (g - g.mean(-1)[:, None],))
    assert not any(uses(lambda x: jnp.sin(added(jnp.sin(x))), X))

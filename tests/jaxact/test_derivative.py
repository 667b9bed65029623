"""Elementwise functions: the derivative of JAX, from the fewest arrays."""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import jaxact
from jaxact import Exact, Policy, Rule
from jaxact._form.derivative import (
    Cluster,
    differentiate,
    eliminate,
    elimination_order,
)
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.read import call_body, variables_in

pytestmark = pytest.mark.unoptimized

SHAPE = (8, 64)
X, Y, Z, U, V = jax.random.normal(jax.random.key(0), (5, *SHAPE))
POSITIVE = abs(X) + 0.5
ROW = Y[:1]
SCALE = jnp.float32(1.7)
half = lambda x: x.astype(jnp.bfloat16)
single = lambda x: x.astype(jnp.float32)

EXACT = Policy(bits=4, rules=(Rule(Exact(), where=lambda residual: True),))


@dataclasses.dataclass(frozen=True)
class Function:
    """An elementwise function, its arguments, and the least that it has to store.

    `arrays`: those of several bits: one for each slope of an output in an argument that
    is no exact multiple of another one. `bits`: masks; one for each further value that
    a slope takes which is otherwise constant, none where a mask is a factor of an
    array.
    """

    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    arrays: int
    bits: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(range(len(self.args)))


def cell_state(i, f, g, o, c):
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def upcast(x):
    return half(jax.nn.gelu(single(x)))


gelu_erf = functools.partial(jax.nn.gelu, approximate=False)
FUNCTIONS = [
    Function("gelu", jax.nn.gelu, (X,), 1),
    Function("gelu by erf", gelu_erf, (X,), 1),
    Function("silu", jax.nn.silu, (X,), 1),
    Function("swiglu", lambda g, u: jax.nn.silu(g) * u, (X, Y), 2),
    Function("tanh", jnp.tanh, (X,), 1),
    Function("sigmoid", jax.nn.sigmoid, (X,), 1),
    Function("softplus", jax.nn.softplus, (X,), 1),
    Function("elu", jax.nn.elu, (X,), 1),
    Function("leaky relu", jax.nn.leaky_relu, (X,), 0, 1),
    Function("relu", jax.nn.relu, (X,), 0, 1),
    Function("relu6", jax.nn.relu6, (X,), 0, 1),
    Function("maximum", lambda x: jnp.maximum(x, 0.0), (X,), 0, 2),
    Function("relu squared", lambda x: jax.nn.relu(x) ** 2, (X,), 1),
    # Slopes 0, 1/2 at a tie, 1.
    Function("clip", lambda x: jnp.clip(x, -1.0, 1.0), (X,), 0, 2),
    Function("minimum", jnp.minimum, (X, Y), 0, 2),
    Function(
        "where",
        lambda x: jnp.where(x > 0.3, jnp.sin(x), 2.0 * x),
        (X,),
        1,
    ),
    Function("abs", jnp.abs, (X,), 0, 1),
    Function("exp", jnp.exp, (X,), 1),
    Function("log", jnp.log, (POSITIVE,), 1),
    Function("sqrt", jnp.sqrt, (POSITIVE,), 1),
    Function("x y z", lambda x, y, z: x * y * z, (X, Y, Z), 3),
    Function("x / y", lambda x, y: x / y, (X, 100.0 + Y), 2),
    Function("power", lambda x, y: x**y, (POSITIVE, Y), 2),
    Function("cube", lambda x: x**3, (X,), 1),
    # Of h in i, f, g, o, c; of c in i, f, g, c too: the first are its multiples.
    Function("lstm h", lambda *gates: cell_state(*gates)[0], (X, Y, Z, U, V), 5),
    # Of c in i, f, g, c; of h in o and c.
    Function("lstm", cell_state, (X, Y, Z, U, V), 6),
    Function("mish", lambda x: x * jnp.tanh(jax.nn.softplus(x)), (X,), 1),
    Function("hard swish", jax.nn.hard_swish, (X,), 1),
    Function("squared difference", lambda x, y: (x - y) ** 2, (X, Y), 1),
    Function("literal scalars", lambda x: jnp.tanh(3.0 * x + 1.0) * 0.5, (X,), 1),
    # In s: the sum over all elements of a second array.
    Function("traced scalar", lambda x, s: jnp.tanh(x * s) * s, (X, SCALE), 2),
    Function("bias", lambda x, b: jax.nn.gelu(x + b), (X, ROW), 1),
    Function("gain", lambda x, g: jnp.tanh(x * g), (X, ROW), 2),
    Function("bfloat16", jax.nn.gelu, (half(X),), 1),
    Function("float32 inside", upcast, (half(X),), 1),
]
each_function = pytest.mark.parametrize("case", FUNCTIONS, ids=lambda c: c.name)

# Where the library stores more, and why.
# Where more is stored than has to be: a value of the program counts less than a slope,
# since it may be stored anyway; a mask beside an array is not weighed at all; and JAX
# compares both operands of min and max with the result (twice in some versions).
MORE_ARRAYS = {"x y z": 1}
MORE_MASKS = {"elu": 1, "relu squared": 1, "clip": 2, "minimum": 2}


def gradient(f, args):
    """Of a sum with weights of both signs."""

    def loss(*args):
        weights = jnp.cos(jnp.arange(64.0))[None]
        return sum((single(y) * weights).sum() for y in jax.tree.leaves(f(*args)))

    return jax.jit(jax.grad(loss, tuple(range(len(args)))))(*args)


@each_function
def test_gradients_are_those_of_jax(case):
    """A slope is at most 16 products and sums, each rounded by half an ulp (eps / 2 of
    a term), in another order than JAX's. Terms are no larger than twice the largest
    gradient: 16 eps of that. Sums over rows or all elements add one sum's error, of
    the order of eps times the square root of the count, which is below that.
    """
    small = jaxact.compress(case.f, policy=EXACT, activations=case.places)
    pairs = zip(gradient(small, case.args), gradient(case.f, case.args), strict=True)
    for got, want in pairs:
        assert got.dtype == want.dtype
        bound = 16 * float(jnp.finfo(want.dtype).eps) * abs(single(want)).max()
        assert abs(single(got) - single(want)).max() <= bound


def stored(f, args, bits=2):
    """(arrays, masks) of the size of the activations.

    All arguments are one: else outputs that depend on different ones are separate
    functions on JAX before 0.12. Negative, since outputs above zero stay exact.
    """
    together = lambda args: jax.tree.map(jnp.negative, f(*args))
    small = jaxact.compress(together, policy=Policy(bits=bits), activations=0)
    rows = [r for r in jaxact.residuals(small, args).rows if r.shape == SHAPE]
    masks = sum(r.dtype == jnp.bool_ for r in rows)
    return len(rows) - masks, masks


@each_function
def test_few_arrays_are_stored(case):
    more = MORE_ARRAYS.get(case.name, 0)
    assert case.arrays <= stored(case.f, case.args)[0] <= case.arrays + more


@each_function
def test_few_masks_are_stored(case):
    more = MORE_MASKS.get(case.name, 0)
    assert case.bits <= stored(case.f, case.args)[1] <= case.bits + more


def test_an_output_that_is_needed_is_stored_too():
    def f(x, w):
        return jax.nn.gelu(x) @ w

    small = jaxact.compress(f, policy=Policy(bits=2), activations="x")
    assert len(jaxact.residuals(small, X, jnp.eye(64)).rows) == 2


def test_slopes_inside_an_upcast_are_rounded_once():
    """Times a cotangent of 1: half an ulp of a slope below 2 is 2**-8."""
    x = half(jnp.linspace(-4.0, 4.0, 512).reshape(SHAPE))
    small = jaxact.compress(upcast, policy=EXACT)
    got = jax.jit(jax.grad(lambda x: single(small(x)).sum()))(x)
    want = jax.grad(lambda x: jax.nn.gelu(x).sum())(single(x))
    assert abs(single(got) - want).max() <= 2.0**-8


def test_infinite_slopes_behind_a_mask_stay_hidden():
    """JAX selects: the gradient of sqrt(relu(x)) is 0 for x < 0, not nan."""
    f = lambda x: jnp.sqrt(jax.nn.relu(x))
    x = jnp.where(abs(X) < 0.1, 1.0, X)
    small = jaxact.compress(f, policy=EXACT)
    got, want = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (small, f))
    assert jnp.isfinite(want).all() and jnp.isfinite(got).all()


# Elimination: graphs of whole numbers, on which every order is exact.


@st.composite
def graphs(draw):
    """(v -> u -> slope, inputs, outputs, inner vertices in any order)."""
    num_inputs, num_inner = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    slopes = st.integers(-3, 3).map(Fraction)
    edges = {}
    for v in range(num_inputs, num_inputs + num_inner):
        below = draw(st.sets(st.integers(0, v - 1), min_size=1, max_size=3))
        edges[v] = {u: draw(slopes) for u in sorted(below)}
    outs = draw(st.sets(st.sampled_from(sorted(edges)), min_size=1))
    inner = draw(st.permutations(sorted(set(edges) - outs)))
    return edges, range(num_inputs), sorted(outs), inner


def derivatives(edges, inputs, outs):
    """Sum over all paths of the products of slopes, for each output and input."""

    def along(v, u):
        if v == u:
            return Fraction(1)
        return sum((s * along(w, u) for w, s in edges.get(v, {}).items()), Fraction(0))

    return {(v, u): along(v, u) for v in outs for u in inputs}


@given(graphs(), st.data())
def test_elimination_preserves_the_derivative(graph, data):
    edges, inputs, outs, inner = graph
    want = derivatives(edges, inputs, outs)
    last = data.draw(st.integers(0, len(inner)))
    for v in inner[:last]:
        eliminate(edges, v, lambda a, b: a * b, lambda a, b: a + b)
        assert v not in edges and not any(v in slopes for slopes in edges.values())
    assert derivatives(edges, inputs, outs) == want


# Of whole numbers up to 1, five of these make at most 2**20: exact in float32.
OPERATIONS = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "square": lambda x, _: jnp.square(x),
    "max": jnp.maximum,
    "neg": lambda x, _: -x,
}
steps = st.tuples(
    st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)
)


@pytest.mark.thorough
@given(
    st.lists(steps, min_size=1, max_size=5),
    st.sets(st.integers(0, 4), min_size=1),
    st.sets(st.integers(0, 1)),
)
@settings(max_examples=40)
def test_planned_elimination_preserves_the_derivative(program, outputs, exact):
    def f(x, y):
        values = [x, y]
        for name, i, j in program:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(OPERATIONS[name](a, b))
        made = values[2:]
        return [made[k % len(made)] for k in sorted(outputs)]

    args = jnp.array([1.0, -1.0, 0.0]), jnp.array([1.0, 1.0, -1.0])
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(f)(*args))
    jits = [e for e in jaxpr.eqns if call_body(e) is not None]
    assert not jits
    outs = list(dict.fromkeys(variables_in(jaxpr.outvars)))
    known = {jaxpr.invars[i] for i in exact}
    cluster = Cluster(tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(outs))
    order, before, after = elimination_order(cluster, lambda v: v in known)
    assert len(set(order)) == len(order) and not set(order) & set(outs)
    assert after <= before
    tangents = jnp.array([1.0, 2.0, -1.0]), jnp.array([0.0, 1.0, 3.0])
    planned = dataclasses.replace(cluster, eliminated=order)
    values, moved = differentiate(planned, args, tangents)
    want, want_moved = jax.jvp(f, args, tangents)
    place = {v: k for k, v in enumerate(outs)}
    for v, y, t in zip(jaxpr.outvars, want, want_moved, strict=True):
        assert (values[place[v]] == y).all()
        assert (moved[place[v]] == t).all()


class Gated(nn.Module):
    rate: float = 0.0
    joins: bool = False

    @nn.compact
    def __call__(self, x):
        with jax.named_scope("glu"):
            h = jax.nn.silu(nn.Dense(SHAPE[-1])(x)) * nn.Dense(SHAPE[-1])(x)
        h = nn.Dropout(self.rate, deterministic=not self.rate, name="drop")(h)
        return nn.Dense(SHAPE[-1])(x + h if self.joins else h)


@pytest.mark.parametrize("after", [{}, {"rate": 0.5}, {"joins": True}])
def test_a_derivative_is_named_after_its_function_and_not_after_what_follows(after):
    """Dropout and a residual join have no local derivative to store."""
    net = Gated(**after)
    variables = net.init(jax.random.key(0), X)
    rngs = {"dropout": jax.random.key(1)}
    small = jaxact.compress(lambda x: net.apply(variables, x, rngs=rngs))
    rows = [r for r in jaxact.residuals(small, X).rows if "derivative" in r.key]
    assert {row.path for row in rows} == {"Gated/glu/derivative"}
    # The product that makes a GLU, behind the one inside of its SiLU.
    assert {row.key.split(".")[0] for row in rows} == {"Gated/glu/derivative/mul#1"}


@pytest.mark.parametrize("is_result", [False, True], ids=["unread", "stopped"])
def test_a_derivative_is_not_named_after_a_metric(is_result):
    """No gradient passes `exp`, so no rule for its path is for a residual."""

    def f(w, x):
        h = x @ w
        y = -jnp.log1p(h**2)
        with jax.named_scope("metric"):
            metric = jax.lax.stop_gradient(jnp.exp(-(h**2)).mean())
        return (y, metric) if is_result else y

    small = jaxact.compress(f, activations=1)
    table = jaxact.residuals(small, jnp.ones((SHAPE[-1], 128)), X)
    keys = [row.key for row in table.rows if "derivative" in row.key]
    assert keys == ["derivative/log1p"]


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


def test_a_step_with_a_rule_of_its_own_has_a_derivative():
    """What follows is a cell: one array for a whole GELU."""
    f = lambda w, x: jax.nn.gelu(straight_through(x @ w))
    small = jaxact.compress(f, activations=1)
    table = jaxact.residuals(small, jnp.ones((SHAPE[-1], 128)), X)
    assert len([row for row in table.rows if "derivative" in row.key]) == 1
    assert len(table.rows) == 2


def test_slopes_of_one_function_have_keys_of_their_own():
    """A gated unit before dropout keeps two, both of products."""

    def f(x, w):
        a, gate = jnp.split(x @ w, 2, axis=-1)
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, a.shape)
        return (jnp.where(keep, a * jax.nn.gelu(gate) / 0.9, 0.0) @ w).sum()

    f = jaxact.compress(f, activations="x")
    keys = [row.key for row in jaxact.residuals(f, X, jnp.ones((64, 128))).rows]
    assert len(set(keys)) == len(keys), keys

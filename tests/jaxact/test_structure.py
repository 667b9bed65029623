"""`structure`: equal for programs that are the same, for no others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import jaxact
from jaxact import Policy
from jaxact._jaxpr.structure import open_structure, structure

X = jnp.ones((4, 8))


def straight_through(slope):
    @jax.custom_jvp
    def f(x):
        return jnp.round(x)

    f.defjvp(lambda primals, tangents: (f(*primals), slope * tangents[0]))
    return f


def clipped(limit):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -limit, limit),))
    return f


def scanned(x):
    return lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)


def compressed(bits):
    small = jaxact.compress(jnp.sin, policy=Policy(bits=bits))
    return lambda x: small(x * 2)


def in_scope(name):
    def f(x):
        with jax.named_scope(name):
            return jnp.sin(x)

    return f


scaled = Primitive("scaled")
scaled.def_abstract_eval(lambda x, by: x)


# Each made twice gives one structure; no two entries do.
MAKERS = {
    "gelu": lambda: lambda x: jax.nn.gelu(x),
    "relu": lambda: lambda x: jax.nn.relu(x),
    "relu6": lambda: lambda x: jax.nn.relu6(x),
    "twice": lambda: lambda x: jnp.sin(x) + jnp.sin(x),
    "shared": lambda: lambda x: (lambda y: y + y)(jnp.sin(x)),
    "times 2": lambda: lambda x: x * 2,
    "times -0.0": lambda: lambda x: x * -0.0,
    "times 0.0": lambda: lambda x: x * 0.0,
    "by -0.0": lambda: lambda x: scaled.bind(x, by=-0.0),
    "by 0.0": lambda: lambda x: scaled.bind(x, by=0.0),
    "by NaN": lambda: lambda x: scaled.bind(x, by=float("nan")),
    "sum 0": lambda: lambda x: x.sum(0),
    "sum 1": lambda: lambda x: x.sum(1),
    "scan": lambda: lambda x: scanned(x),
    "jit": lambda: jax.jit(lambda x: scanned(x)),
    "cond": lambda: lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "other cond": lambda: lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
    "small constant": lambda: lambda x: x * jnp.arange(8.0)[None],
    "rule": lambda: straight_through(1.0),
    "other rule": lambda: straight_through(2.0),
    "checkpoint": lambda: jax.checkpoint(lambda x: jnp.sin(x)),
    "compressed": lambda: compressed(2),
    "more bits": lambda: compressed(4),
    "scope": lambda: in_scope("a"),
    "other scope": lambda: in_scope("b"),
    "bfloat16": lambda: lambda x: x.astype(jnp.bfloat16),
}


def traced(f):
    return jax.make_jaxpr(f)(X)


@pytest.mark.parametrize("name", MAKERS)
def test_equal_programs_have_one_structure(name):
    first, second = (structure(traced(MAKERS[name]())) for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_other_programs_have_others():
    structures = {name: structure(traced(make())) for name, make in MAKERS.items()}
    for name, a in structures.items():
        assert [other for other, b in structures.items() if a == b] == [name]


def test_backward_rules_that_may_differ_are_taken_for_different():
    assert structure(traced(clipped(1.0))) != structure(traced(clipped(2.0)))


def test_constants_count_where_they_are_no_inputs():
    one, two = (
        traced(lambda x, table=table: x + table)
        for table in (jnp.ones(X.shape), jnp.zeros(X.shape))
    )
    assert structure(one) != structure(two)
    one, two = (getattr(closed, "jaxpr", closed) for closed in (one, two))
    assert open_structure(one) == open_structure(two)


def test_settings_that_count_when_a_program_is_lowered():
    draw = lambda x: jax.random.bernoulli(jax.random.key(7), 0.8, x.shape)
    first = structure(traced(draw))
    with jax.threefry_partitionable(False):
        assert structure(traced(lambda x: draw(x))) != first
    assert structure(traced(lambda x: draw(x))) == first

"""Flattening and pruning change which equations there are, never a value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core
from jax.experimental import io_callback
from jax.sharding import SingleDeviceSharding

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.rewrite import Body, flatten, inlinable_body, jit_body, prune
from support.programs import PROGRAMS, assert_same_bits, same_bits

X = jnp.linspace(-2.0, 2.0, 12).reshape(3, 4)
TABLE = np.arange(12.0, dtype=np.float32).reshape(3, 4)


def traced(f, *args):
    """(jaxpr, constants) of `f`."""
    return open_jaxpr(jax.make_jaxpr(f)(*args))


def flat(f, *args, body_of=jit_body):
    """(jaxpr, constants) of `f`, flattened."""
    jaxpr, consts = traced(f, *args)
    jaxpr, more = flatten(jaxpr, body_of)
    return jaxpr, [*consts, *more]


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def is_equal(f, *args, body_of=jit_body):
    before, consts = traced(f, *args)
    after, wider = flat(f, *args, body_of=body_of)
    want = core.eval_jaxpr(before, consts, *args)
    return same_bits(want, core.eval_jaxpr(after, wider, *args))


@jax.jit
def twice(x):
    return jnp.sin(x) * 2.0


def nested(x):
    return jax.jit(lambda x: jax.jit(lambda x: jnp.exp(x) + 1.0)(x) * x)(x)


def test_nested_jits_are_inlined():
    jaxpr, _ = flat(nested, X)
    assert names(jaxpr) == ["exp", "add", "mul"]
    assert is_equal(nested, X)


def test_a_body_that_is_called_twice_gets_variables_of_its_own():
    f = lambda x: twice(twice(x))
    jaxpr, _ = flat(f, X)
    assert names(jaxpr) == ["sin", "mul"] * 2
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    assert len(set(made)) == len(made)
    assert is_equal(f, X)


def test_constants_of_bodies_become_constants_of_the_program():
    @jax.jit
    def shifted(x):
        return x + jnp.asarray(TABLE)

    f = lambda x: shifted(shifted(x)) * jnp.asarray(TABLE[::-1].copy())
    jaxpr, consts = flat(f, X)
    assert "jit" not in names(jaxpr) and "pjit" not in names(jaxpr)
    assert len(jaxpr.constvars) == len(consts)
    assert is_equal(f, X)


def test_constants_of_a_given_body():
    """JAX traces some bodies with constants of their own, versions differ in which."""
    inner, consts = traced(lambda x: x * TABLE, X)
    held = [*inner.constvars, *inner.invars]
    body = jax.make_jaxpr(lambda x: twice(x))(X)

    def body_of(eqn):
        if jit_body(eqn) is None:
            return None
        inputs = held[len(inner.constvars) :]
        constants = list(zip(inner.constvars, consts, strict=True))
        return Body(inputs, inner.eqns, inner.outvars, constants)

    jaxpr, more = flatten(open_jaxpr(body)[0], body_of)
    assert len(more) == len(consts)
    (out,) = core.eval_jaxpr(jaxpr, more, X)
    assert_same_bits(out, X * TABLE)


def test_equal_equations_are_evaluated_once():
    f = lambda x: twice(x) + twice(x) + jnp.sin(x) * 2.0
    jaxpr, _ = flat(f, X)
    assert names(jaxpr) == ["sin", "mul", "add", "add"]
    assert is_equal(f, X)


def test_equations_that_differ_in_a_parameter_or_literal_stay_apart():
    f = lambda x: [x.sum(0), x.sum(1), x + 1.0, x + 2.0, x + 1.0, x * 0.0, x * -0.0]
    jaxpr, _ = flat(f, X)
    kinds = names(jaxpr)
    assert (kinds.count("reduce_sum"), kinds.count("add")) == (2, 2)
    assert kinds.count("mul") == 2  # 0.0 and -0.0 are equal, their bits are not
    assert is_equal(f, X)


def test_effects_happen_as_often_as_written():
    heard = []

    def f(x):
        io_callback(lambda: heard.append(0), None)
        io_callback(lambda: heard.append(0), None)
        return x + 1.0

    jaxpr, consts = flat(f, X)
    assert names(jaxpr).count("io_callback") == 2
    core.eval_jaxpr(jaxpr, consts, X)
    jax.effects_barrier()
    assert len(heard) == 2


def test_random_bits_of_equal_keys_are_equal():
    def f(key):
        return jax.random.normal(key, (4,)) + jax.random.normal(key, (4,))

    jaxpr, _ = flat(f, jax.random.key(0))
    assert names(jaxpr).count("random_bits") == 1
    assert is_equal(f, jax.random.key(0))


HERE = SingleDeviceSharding(jax.devices()[0])
OPTIONS = {
    "in_shardings": {"in_shardings": HERE},
    "out_shardings": {"out_shardings": HERE},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_jits_that_ask_for_more_are_kept(options):
    double = jax.jit(lambda x: x * 2.0, **options)
    f = lambda x: twice(double(x + 1.0))
    kept = [name for name in names(flat(f, X)[0]) if name in ("jit", "pjit")]
    assert len(kept) == 1
    assert is_equal(f, X)


def test_jits_that_donate_are_inlined():
    double = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    f = lambda x: twice(double(x + 1.0))
    assert not {"jit", "pjit"} & set(names(flat(f, X)[0]))
    assert is_equal(f, X)


def test_custom_rules_are_calls_only_to_call_body():
    f = lambda x: jax.nn.relu(jax.nn.silu(x))
    assert "custom_jvp_call" in names(flat(f, X)[0])
    assert "custom_jvp_call" not in names(flat(f, X, body_of=inlinable_body)[0])
    assert is_equal(f, X, body_of=inlinable_body)


def test_outputs_that_are_inputs_literals_and_repeated():
    f = lambda x: [x, 3.0 * jnp.ones(()), *jax.jit(lambda y: (y, y, y + 1.0))(x)]
    assert is_equal(f, X)


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name != "conv_relu"], ids=lambda p: p.name
)
def test_programs_keep_their_values(program):
    args = program.arguments()
    leaves, tree = jax.tree.flatten(args)
    f = lambda *leaves: jax.tree.leaves(program.f(*jax.tree.unflatten(tree, leaves)))
    assert is_equal(f, *leaves)


def test_scopes_of_public_jits_are_in_name_stacks():
    @jax.jit
    def block(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    @jax.jit
    def _helper(x):
        return jnp.cos(x)

    @jax.named_scope("outer")
    def f(x):
        return _helper(block(x))

    jaxpr, _ = flat(f, X)
    stacks = {e.primitive.name: str(e.source_info.name_stack) for e in jaxpr.eqns}
    assert stacks == {"sin": "outer/block/inner", "cos": "outer"}


def test_prune_keeps_what_an_output_needs():
    f = lambda x: (jnp.sin(x) + 1.0, jnp.cos(x) * jnp.exp(x))
    jaxpr, consts = traced(f, X)
    first = prune(jaxpr, jaxpr.outvars[:1])
    assert names(first) == ["sin", "add"]
    (out,) = core.eval_jaxpr(first, consts, X)
    assert_same_bits(out, core.eval_jaxpr(jaxpr, consts, X)[0])
    assert prune(jaxpr, []).eqns == []
    assert names(prune(jaxpr, jaxpr.outvars)) == names(jaxpr)


def test_prune_reads_any_variable_and_literals():
    jaxpr, consts = traced(lambda x: jnp.cos(jnp.sin(x)), X)
    inner = jaxpr.eqns[0].outvars
    assert_same_bits(core.eval_jaxpr(prune(jaxpr, inner), consts, X), [jnp.sin(X)])
    literal, _ = traced(lambda x: (1.0, x), X)
    assert prune(literal, literal.outvars).eqns == []


def test_prune_keeps_or_drops_effects():
    def f(x):
        y = jnp.sin(x)
        io_callback(lambda y: None, None, y)
        return jnp.cos(x), y + 1.0

    jaxpr, _ = traced(f, X)
    wanted = jaxpr.outvars[:1]
    assert names(prune(jaxpr, wanted)) == ["sin", "io_callback", "cos"]
    assert names(prune(jaxpr, wanted, effects=False)) == ["cos"]

"""Where a backward pass waits, and in which form its arrays do, by its jaxpr."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact._engine.lone import lone_barrier
from jaxact._jaxpr.compat import open_jaxpr

X = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)
BARRIER = "optimization_barrier"


def equations(jaxpr):
    """All equations, those of bodies after the one that has them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(body):
                yield from equations(open_jaxpr(body)[0])


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def dense(w, x):
    return jnp.tanh(x @ w["matrix"].astype(x.dtype)) * w["gain"].astype(x.dtype)


def waiting(f, w, x):
    """The types of a weight's gradient: as it waits, and as it is returned."""
    layer = jaxact.compress(f, activations="x")
    step = jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum())
    closed = jax.make_jaxpr(step)(w, x)
    eqns = equations(open_jaxpr(closed)[0])
    barriers = [eqn for eqn in eqns if eqn.primitive.name == BARRIER]
    (held,) = [v.aval.dtype for v in barriers[-1].outvars if v.aval.shape == w.shape]
    (result,) = closed.out_avals
    return held, result.dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_gradient_waits_as_narrow_as_it_was_computed(dtype):
    f = lambda w, x: jnp.tanh(x @ w.astype(x.dtype))
    assert waiting(f, W, X.update(dtype=dtype)) == (dtype, jnp.float32)


@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: jnp.tanh(x.astype(w.dtype) @ w),
        lambda w, x: jnp.tanh(x @ w.astype(x.dtype)).astype(w.dtype) @ w,
        lambda w, x: jnp.tanh(x @ w.astype(x.dtype)) * w[0].astype(x.dtype)[None],
    ],
    ids=["computed", "summed", "padded"],
)
def test_a_gradient_that_was_computed_in_float32_waits_in_it(f):
    held, result = waiting(f, W, X)
    assert held == result == jnp.float32


def test_a_residual_is_packed_until_the_cotangent_of_its_product_is_there():
    """XLA would decode a call's input at once, and keep it to the end of the call."""
    widths = {"first": (256, 128), "second": (128, 32)}
    w = {name: jax.ShapeDtypeStruct(shape, X.dtype) for name, shape in widths.items()}
    f = lambda w, x: jnp.tanh(jnp.tanh(x @ w["first"]) @ w["second"])
    layer = jaxact.compress(f, policy=jaxact.Policy(2), activations="x")
    step = jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum())
    found = [
        [(v.aval.dtype.name, v.aval.shape) for v in eqn.invars]
        for eqn in equations(open_jaxpr(jax.make_jaxpr(step)(w, X))[0])
        if eqn.primitive.name == "jaxact_lone_barrier" and len(eqn.invars) == 2
    ]
    # A group has 16 elements in a word, and a row of 256 or of 128 is a group.
    assert found == [
        [("uint32", (64, 1, 8)), ("bfloat16", (64, 32))],
        [("uint32", (64, 1, 16)), ("bfloat16", (64, 128))],
    ]


def test_a_checkpointed_call_ends_one_weight_before_it_starts_the_next():
    """The later weight's gradient waits with the packed input of the earlier one."""
    shapes = {"first": (256, 128), "second": (128, 32)}
    w = {name: jax.ShapeDtypeStruct(shape, X.dtype) for name, shape in shapes.items()}
    f = lambda w, x: jnp.tanh(jnp.tanh(x @ w["first"]) @ w["second"])

    def parts(recompute):
        """Types in each barrier with one of the gradients, which may be transposed."""
        policy = jaxact.Policy(2, recompute=recompute)
        layer = jaxact.compress(f, policy=policy, activations="x")
        step = jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum())
        for eqn in equations(open_jaxpr(jax.make_jaxpr(step)(w, X))[0]):
            if eqn.primitive.name == BARRIER:
                held = {tuple(sorted(v.aval.shape)) for v in eqn.outvars}
                if (32, 128) in held and (128, 256) not in held:
                    yield {v.aval.dtype.name for v in eqn.outvars}

    assert list(parts(jaxact.Checkpoint())) == [{"bfloat16", "uint32"}]
    assert not list(parts(None))


def test_a_checkpointed_call_casts_its_weights_when_its_input_is_there():
    """Else XLA casts those of all layers before the first one runs."""

    def together(recompute):
        policy = jaxact.Policy(2, recompute=recompute)
        f = lambda w, x: jnp.tanh(x @ w.astype(x.dtype))
        layer = jaxact.compress(f, policy=policy, activations="x")
        step = jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum())
        for eqn in equations(open_jaxpr(jax.make_jaxpr(step)(W, X))[0]):
            if eqn.primitive.name == BARRIER:
                yield {(v.aval.shape, v.aval.dtype) for v in eqn.outvars}

    both = {(W.shape, W.dtype), (X.shape, X.dtype)}
    assert both in together(jaxact.Checkpoint())
    assert both not in together(None)


def residual_block(w, x):
    """Two branches, each added to its input."""
    x = x + jnp.tanh(x @ w["a"]) @ w["b"]
    return x + jnp.tanh(x @ w["c"]) @ w["d"]


def narrowing(w, x):
    """As deep as `residual_block`, through a narrow middle."""
    x = jnp.tanh(x @ w["a"])[:, :32]
    return jnp.tanh(jnp.tanh(x @ w["b"][:32]) @ w["c"]) @ w["d"]


WS = {name: jax.ShapeDtypeStruct((256, 256), X.dtype) for name in "abcd"}


def lone_barriers(f):
    """The types that wait together in a step of a call."""
    layer = jaxact.compress(f, activations="x")
    step = jax.jit(jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum()))
    found = open_jaxpr(jax.make_jaxpr(step)(WS, X))[0]
    waiting = [e for e in equations(found) if e.primitive.name == "jaxact_lone_barrier"]
    return [[v.aval for v in eqn.outvars] for eqn in waiting]


@pytest.mark.parametrize(
    "f, counts",
    [(lambda w, x: residual_block(w, x) - x, [2]), (narrowing, [1, 1])],
    ids=["two branches", "a chain"],
)
def test_parts_of_a_call(f, counts):
    """A later part's gradients are there before an earlier one is decoded."""
    held = lone_barriers(f)
    gradients = [[a for a in each if a.shape == WS["c"].shape] for each in held]
    assert [len(each) for each in gradients if each] == counts
    assert all(any(a.dtype == jnp.uint32 for a in each) for each in held)


@pytest.mark.parametrize("f", [residual_block, narrowing], ids=lambda f: f.__name__)
def test_a_gradient_waits_as_it_is_transposed(f):
    """XLA computes a transposed product so; across a barrier a CPU copies it."""
    layer = jaxact.compress(f, activations="x")
    step = jax.grad(lambda w, x: layer(w, x).astype(jnp.float32).sum())
    eqns = list(equations(open_jaxpr(jax.make_jaxpr(step)(WS, X))[0]))
    barriers = [eqn for eqn in eqns if "barrier" in eqn.primitive.name]
    waiting = {id(v) for eqn in barriers for v in eqn.invars}
    transposed = [eqn for eqn in eqns if eqn.primitive.name == "transpose"]
    assert transposed and barriers
    assert not [eqn for eqn in transposed if id(eqn.invars[0]) in waiting]


@pytest.mark.parametrize("devices", [1, 2])
def test_parts_wait_on_one_device_alone(devices):
    """On several the gradients of both parts are summed in one collective."""
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((devices,), ("data",), types)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    f = jax.vmap(jax.grad(lambda x: (lone_barrier([x, x])[1] ** 2).sum()))
    traced = jax.jit(f, in_shardings=rows).trace(X)
    lowered = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert lowered.count(BARRIER) == (devices == 1)


@pytest.mark.thorough
def test_a_gradients_norm_by_the_weight_of_its_loss():
    """As in GradNorm. It is of first order in the call, and failed on JAX 0.10."""
    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (16, 64))
    layer = lambda w, x: x + jnp.tanh(jnp.tanh(x @ w) @ w)

    def norm(f, weight):
        return (jax.grad(lambda w: weight * (f(w, x) ** 2).sum())(w) ** 2).sum()

    small = jaxact.compress(layer, activations="x", policy=jaxact.Policy(bits=8))
    got, wanted = (jax.grad(norm, 1)(f, 2.0) for f in (small, layer))
    # One draw's error of the gradient is below 0.01, and its square's twice that.
    assert abs(got / wanted - 1) < 0.02

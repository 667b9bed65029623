"""Around a call's barriers: what is computed before, behind, and from what."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import evaluate
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._plan.tail import parted
from support.programs import assert_same_bits, relative_error

D = 256
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (4, 64, D))
P = {
    "up": jax.random.normal(KEYS[1], (D, 2 * D)) / 16,
    "down": jax.random.normal(KEYS[2], (2 * D, D)) / 16,
    "bias": jax.random.normal(KEYS[3], (D,)),
}


def mlp(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def mean_of_two(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 1), (1, 2, 1), "VALID") / 2


# A call, and the names of the operations behind its barrier.
TAILS = {
    "a join": (lambda p, x: x + mlp(p, x), ["add"]),
    "a bias and a join": (
        lambda p, x: x + (mlp(p, x) + p["bias"][None, None]),
        ["add", "add", "broadcast_in_dim"],
    ),
    "a reshape": (lambda p, x: mlp(p, x).reshape(4, -1) * 2, ["mul", "reshape"]),
    "a pool": (lambda p, x: mean_of_two(mlp(p, x)), ["div"]),
    "nothing": (mlp, []),
    "not a norm's sum": (lambda p, x: x / jnp.linalg.norm(mlp(p, x)), []),
    "not what is read twice": (
        lambda p, x: ((y := mlp(p, x)) + jnp.sin(y.sum()), y),
        [],
    ),
    "not two products": (lambda p, x: mlp(p, x) * (x @ (p["up"] @ p["down"])), []),
    "not elementwise functions of inputs": (lambda p, x: jnp.sin(x), []),
}


@pytest.mark.parametrize("f, names", TAILS.values(), ids=TAILS)
def test_what_is_behind_the_barrier(f, names):
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(lambda *args: f(*args))(P, X))
    inputs = [*jax.tree.leaves(P), X]
    found = parted(jaxpr, len(jaxpr.outvars))
    assert sorted(eqn.primitive.name for eqn in found.tail.eqns) == names
    held = evaluate(found.head, consts, inputs)
    got = evaluate(found.tail, consts, [*inputs, *held])
    assert_same_bits(got, evaluate(jaxpr, consts, inputs))


def test_nothing_large_is_held_that_was_not_before():
    """A call holds the product, its input and saved values."""
    f = lambda p, x: x + (mlp(p, x) + p["bias"][None, None])
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda *args: f(*args))(P, X))
    (product,) = parted(jaxpr, 1).held
    (maker,) = [eqn for eqn in jaxpr.eqns if product in eqn.outvars]
    assert maker.primitive.name == "dot_general"


def equations(f, policy):
    """A compressed gradient's equations, and for each variable the one it is from."""
    layer = jaxact.compress(f, policy=policy, activations="x")
    closed = jax.make_jaxpr(jax.grad(lambda p, x: layer(p, x).sum()))(P, X)
    flat, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
    return flat.eqns, {v: eqn for eqn in flat.eqns for v in eqn.outvars}


def attention(p, x):
    """Scores are computed again in the backward pass."""
    q, k = x @ p["up"], x @ p["down"].T

    @jax.checkpoint
    def mix(q, k):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / D) @ k

    return mix(q, k)


def behind(v, makers):
    """The barriers that `v` is computed behind, the nearest ones, by identity."""
    todo, found = [v], {}
    while todo:
        maker = makers.get(todo.pop())
        if maker is None:
            continue
        if maker.primitive.name == "optimization_barrier":
            found[id(maker)] = maker
        else:
            todo += variables_in(maker.invars)
    return list(found.values())


def test_what_a_checkpoint_reads_is_decoded_behind_its_barrier():
    eqns, makers = equations(attention, Policy(bits=4))
    (again,) = [eqn for eqn in eqns if eqn.params.get("differentiated")]
    assert again.params["prevent_cse"] is False
    barriers = [behind(v, makers) for v in variables_in(again.invars)]
    (held,) = {id(each): each for found in barriers for each in found}.values()
    words = [v.aval for v in held.outvars if v.aval.dtype == jnp.uint32]
    assert len(words) == 4  # and metadata, of q and of k
    floats = [v.aval.shape for v in held.outvars if v.aval.dtype == X.dtype]
    assert floats == [(4, 64, 2 * D)]  # the cotangent


def test_what_is_not_decoded_keeps_the_checkpoints_own_barrier():
    eqns, _ = equations(attention, Policy(default=Exact()))
    (again,) = [eqn for eqn in eqns if eqn.params.get("differentiated")]
    assert again.params["prevent_cse"] is True


@pytest.mark.parametrize("action", [Exact(), Quantize(8)], ids=str)
@pytest.mark.parametrize("lift", [lambda f: f, jax.vmap], ids=["", "vmap"])
def test_gradients_through_a_checkpoint_in_a_call(lift, action):
    layer = jaxact.compress(attention, policy=Policy(default=action), activations="x")
    gradient = lambda f: jax.jit(lift(jax.grad(lambda p, x: f(p, x).sum())))
    args = (P, X)
    if lift is jax.vmap:
        args = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), args)
    got, want = (gradient(f)(*args) for f in (layer, attention))
    # 8 bits of a range of about 6 deviations, in three factors: 1 % each.
    bound = 1e-5 if action == Exact() else 0.05
    for name in ("up", "down"):
        assert relative_error(got[name], want[name]) < bound

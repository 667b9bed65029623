"""A branch, a shard_map's body and a jit with shardings are planned as calls are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

import jaxact
from jaxact import Exact, Policy, Rule
from support.programs import gradient_error as eager_gradient_error

pytestmark = [
    pytest.mark.unoptimized,
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

gradient_error = functools.partial(eager_gradient_error, jit=True)

ROWS, WIDTH = 64, 128
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / WIDTH**0.5
SCALES = jnp.exp(1.5 * jax.random.normal(jax.random.key(2), (WIDTH,)))
STEP, RANGE = 1 / 255, 8.0  # at 8 bits, in a group of normal values


def in_shard_map(f):
    mesh, rows = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    return jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)


PLACES = {
    "branch": lambda f: lambda x: lax.cond(x[0, 0] > -9, f, f, x),
    "shard_map": in_shard_map,
    "jit with shardings": lambda f: jax.jit(
        f, in_shardings=SingleDeviceSharding(jax.devices()[0])
    ),
}


@pytest.fixture(params=PLACES)
def place(request):
    return PLACES[request.param]


def normalized(x, axis):
    x = x - x.mean(axis, keepdims=True)
    return x * lax.rsqrt((x * x).mean(axis, keepdims=True) + 1e-5)


def test_a_batch_norm_over_channels_of_unlike_scales(place):
    """They share a group: the noise was 0.3 to 12 gradients."""

    def f(x):
        for w in W, W * SCALES[None]:
            x = jax.nn.relu(normalized(x @ w, 0))
        return x @ W

    # Each of three products has noise of half a step, in values of deviation 1.
    assert gradient_error(place(f), X, policy=Policy(bits=8)) < 3 * RANGE * STEP / 2


def block(x):
    """Attention and a hidden layer, each after a norm."""
    for _ in range(2):
        x = x + jax.nn.softmax(normalized(x, -1) @ W @ x.T / WIDTH) @ x
        x = x + jax.nn.gelu(normalized(x, -1) @ W) @ W
    return x


def test_as_much_is_stored_as_outside(place):
    """What several residuals are made from is stored once, as in any call."""
    outside, inside = (
        sum(
            row.stored_bytes
            for row in jaxact.residuals(jaxact.compress(f), X).rows
            # Before JAX 0.12 a conditional returns weights and arguments, too.
            if row.why != "made of parameters or constants alone"
        )
        for f in (block, place(block))
    )
    assert inside <= outside + 4  # a branch's number


def near_a_pole(x):
    return jnp.cos(x) * lax.rsqrt(jax.nn.relu(x) + 1e-4)


MAGNIFIED = {
    "rows": lambda x: lax.map(near_a_pole, jnp.sin(x)),
    "state": lambda x: lax.scan(lambda h, row: (near_a_pole(h) + row, h), x[0], x)[1],
    "slopes before": lambda x: lax.map(
        lambda row: row[0] / (row[1] + 1e-3),
        (jnp.tanh(x @ W[:64]), jax.nn.softplus(4 * x @ W[64:])),
    ),
    "in a branch": lambda x: lax.cond(
        x[0, 0] > -9, lambda x: lax.map(near_a_pole, x), near_a_pole, jnp.sin(x)
    ),
}


@pytest.mark.parametrize("name", MAGNIFIED)
def test_an_argument_that_is_exact_inside_is_not_rounded_around(name):
    """A loop's own plan told a pole, the plan around it rounded: errors of 0.6 to 1."""
    x = jax.random.normal(jax.random.key(3), (16, 64))
    assert gradient_error(MAGNIFIED[name], x, policy=Policy(bits=8)) < RANGE * STEP


def test_integers_leave_a_shard_map_beside_activations():
    """Before JAX 0.12 the tangents of those that differ by device have no type."""
    rows = PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    inside = jax.shard_map(
        lambda x: (jnp.sin(x), jnp.argmax(x, -1)),
        mesh=mesh,
        in_specs=rows,
        out_specs=(rows, rows),
    )
    f = lambda x: jnp.take_along_axis(inside(x)[0], inside(x)[1][:, None], -1)
    assert gradient_error(f, X, policy=Policy(default=Exact())) == 0
    assert gradient_error(f, X, policy=Policy(bits=8)) < RANGE * STEP


def test_a_rule_names_what_one_branch_stores():
    f = lambda x: lax.cond(x[0, 0] > -9, lambda x: jnp.sin(x @ W), block, x)
    key = "sin.derivative@cond@branch#1"
    named = jaxact.compress(f, policy=Policy(rules=(Rule(Exact(), key=key),)))
    rows = {row.key: row for row in jaxact.residuals(named, X).rows}
    assert rows[key].action == Exact()

"""Rules that match whatever a block keeps: statistics and masks among it."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.flatten_util import ravel_pytree

import jaxact
from jaxact import (
    Bitmask,
    Cast,
    Exact,
    Offload,
    Policy,
    Quantize,
    Recompute,
    Rule,
    compress,
)

pytestmark = pytest.mark.unoptimized

X = jax.random.normal(jax.random.key(0), (4, 64, 64))
W = jax.random.normal(jax.random.key(1), (64, 64)) / 8
KEY = jax.random.key(2)


def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def batch_norm(x):
    deviation = jnp.sqrt(x.var((0, 1), keepdims=True) + 1e-5)
    return (x - x.mean((0, 1), keepdims=True)) / deviation


# By the values that backward computes others from: deviations, sums, maxima, masks.
NETWORKS = {
    "layer norm": lambda w, x: jnp.sin(layer_norm(x @ w) @ w),
    "batch norm": lambda w, x: jnp.sin(batch_norm(x @ w) @ w),
    "l2 norm": lambda w, x: jnp.sin(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w),
    "softmax": lambda w, x: jax.nn.softmax(x @ w) @ w,
    "logsumexp": lambda w, x: jax.nn.logsumexp(x @ w, axis=-1),
    "max": lambda w, x: (x @ w).max(-1),
    "relu": lambda w, x: jax.nn.relu(x @ w) @ w,
}
CONDITIONS = {
    "path": {"path": "*"},
    "min_bytes": {"min_bytes": 100},
    "where": {"where": lambda residual: residual.size > 100},
    "nothing": {},
}


def gradient(network, policy):
    step = compress(network, policy=policy, activations=1)
    loss = lambda w: step(w, X, rounding_key=KEY).sum()
    return jax.jit(jax.grad(loss))(W)


def rows(network, policy):
    step = compress(network, policy=policy, activations=1)
    return jaxact.residuals(step, W, X).rows


CASES = [(name, "nothing") for name in NETWORKS]
CASES += [
    ("layer norm", condition) for condition in CONDITIONS if condition != "nothing"
]


@pytest.mark.parametrize(("name", "condition"), CASES)
def test_a_rule_for_all_gives_the_bits_of_a_policy(name, condition):
    rule = Rule(Quantize(8), **CONDITIONS[condition])
    expected = gradient(NETWORKS[name], Policy(default=Quantize(8)))
    found = gradient(NETWORKS[name], Policy(rules=(rule,)))
    error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
    # The softmax's output has 4 more bits without a rule, and slopes of a maximum none.
    assert error < 0.03


@pytest.mark.parametrize("name", NETWORKS)
def test_what_others_are_computed_from_stays_exact(name):
    found = rows(NETWORKS[name], Policy(rules=(Rule(Quantize(8)),)))
    small = [row for row in found if 1 < len(row.shape) and row.shape[-1] in (1, 64)]
    kept = [row for row in small if "others are computed from it" in row.why]
    assert all(row.action == Exact() for row in kept)
    assert bool(kept) == (name not in ("softmax", "max", "relu"))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_rule_computes_all_of_a_block_again(name):
    found = gradient(NETWORKS[name], Policy(rules=(Rule(Recompute()),)))
    expected = jax.jit(jax.grad(lambda w: NETWORKS[name](w, X).sum()))(W)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("action", "stored"),
    [
        (Quantize(8), Bitmask()),
        (Cast(jnp.bfloat16), Bitmask()),
        (Offload(Quantize(8)), Offload(Bitmask())),
        (Recompute(), Bitmask()),
        (Exact(), Exact()),
    ],
)
def test_masks_take_one_bit_under_a_rule_for_floats(action, stored):
    found = rows(NETWORKS["relu"], Policy(rules=(Rule(action),)))
    (mask,) = [row for row in found if row.dtype == bool]
    assert mask.action == stored


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("norm", "action"),
    [
        (nn.LayerNorm, Offload(Quantize(8))),
        (nn.RMSNorm, Offload()),
        (nn.GroupNorm, Quantize(8)),
        (nn.BatchNorm, Quantize(8)),
    ],
)
def test_a_rule_for_a_block_with_a_norm(norm, action):
    options = {"use_running_average": False} if norm is nn.BatchNorm else {}
    options |= {"num_groups": 8} if norm is nn.GroupNorm else {}

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm(**options)(nn.Dense(32)(x)))
            return nn.Dense(8)(x)

    x = jax.random.normal(KEY, (2, 128, 16))
    variables = Block().init(KEY, x)

    def gradient(policy):
        def loss(params):
            values = {**variables, "params": params}
            out, _ = compress(Block, policy=policy)().apply(
                values, x, rngs={"jaxact": KEY}, mutable=True
            )
            return jnp.square(out).sum()

        return ravel_pytree(jax.jit(jax.grad(loss))(variables["params"]))[0]

    found = gradient(Policy(rules=(Rule(action, path="Block"),)))
    expected = gradient(Policy(default=Exact()))
    assert jnp.linalg.norm(found - expected) < 0.03 * jnp.linalg.norm(expected)


@pytest.mark.filterwarnings("ignore:jaxact. nothing was compressed")
def test_a_default_that_computes_all_again_keeps_a_scans_keys():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(64)(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes, split = {"params": 0}, {"params": True, "jaxact": True}
            layers = nn.scan(Layer, variable_axes=axes, split_rngs=split, length=2)
            return layers()(x, None)[0]

    net = compress(Net, policy=Policy(default=Recompute()))()
    params = net.init(KEY, X)
    loss = lambda f, **rngs: lambda params: f.apply(params, X, **rngs).sum()
    found = jax.jit(jax.grad(loss(net, rngs={"jaxact": KEY})))(params)
    expected = jax.jit(jax.grad(loss(Net())))(params)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)

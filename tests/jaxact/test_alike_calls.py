"""Calls that are stored alike share the programs that compression adds.

The oracle is the lowered program: one function packs the residuals of all calls that
are stored alike, one is their backward pass. Paths, decisions and noise stay their own.
"""

import dataclasses
import gc
import re
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxact
from jaxact import Bias, Exact, Policy, Quantize, Rule
from jaxact._residual import Residual

LAYERS, WIDTH = 5, 64
W = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 8
X = jax.random.normal(jax.random.key(1), (32, WIDTH))
POLICY = Policy(bits=2)


def layer(w, x):
    return x + jax.nn.gelu(x @ w)


def stack(block):
    def loss(w, x):
        for number in range(LAYERS):
            with jax.named_scope(f"block{number}"):
                x = block(w[number], x)
        return (x * x).sum()

    return loss


def functions(policy):
    small = jaxact.compress(layer, policy=policy, activations="x")
    return stack(small), (W, X)


def linen(policy):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.gelu(nn.Dense(WIDTH)(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(LAYERS):
                x = jaxact.compress(Block, policy=policy)(name=f"block{number}")(x)
            return x

    net = Net()
    variables = net.init(jax.random.key(0), X)
    return lambda v, x: (net.apply(v, x) ** 2).sum(), (variables, X)


def nnx_modules(policy):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + nnx.gelu(self.up(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            make = jaxact.compress(Block, policy=policy)
            for number in range(LAYERS):
                setattr(self, f"block{number}", make(rngs))

        def __call__(self, x):
            for number in range(LAYERS):
                x = getattr(self, f"block{number}")(x)
            return x

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return lambda s, x: (nnx.merge(graph, s)(x) ** 2).sum(), (state, X)


def shared(loss, args):
    """How often the lowered gradient defines the function of a pass."""
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args).as_text()
    names = re.findall(r"func\.func private @_(pack|backward)(?:_\d+)?\(", text)
    return names.count("pack"), names.count("backward")


def paths(loss, args):
    rows = jaxact.residuals(loss, *args).rows
    return {part for row in rows for part in re.findall(r"block\d", row.path)}


@pytest.mark.parametrize("make", [functions, linen, nnx_modules])
def test_equal_layers_share_their_passes(make):
    loss, args = make(POLICY)
    assert shared(loss, args) == (1, 1)
    assert paths(loss, args) == {f"block{number}" for number in range(LAYERS)}


@dataclasses.dataclass(frozen=True, eq=False)
class Counted(jaxact.Codec):
    """bfloat16; counts how often its encoding is traced."""

    traces: list = dataclasses.field(default_factory=list)
    bits = 16
    bias = Bias.BIASED

    def encode(self, x, seed):
        self.traces.append(x.shape)
        return x.astype(jnp.bfloat16)

    def decode(self, packed, shape, dtype):
        return packed.astype(dtype)


def test_another_jit_uses_the_plans_of_a_trace_that_is_gone():
    codec = Counted()
    loss, args = functions(Policy(default=codec))
    traced = lambda: jax.jit(jax.grad(lambda *args: loss(*args))).trace(*args).jaxpr
    first, once = str(traced()), len(codec.traces)
    gc.collect()
    assert str(traced()) == first
    assert len(codec.traces) == once > 0
    jax.clear_caches()
    gc.collect()
    traced()
    assert len(codec.traces) == 2 * once


def test_plans_go_with_the_caches_of_jax():
    codec = Counted()
    alive = weakref.ref(codec)
    loss, args = functions(Policy(default=codec))
    jax.jit(jax.grad(loss)).trace(*args)
    del codec, loss
    gc.collect()
    assert alive() is not None
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_decisions_by_path_are_shared_where_they_are_equal():
    policy = Policy(bits=2, rules=(Rule(Quantize(8), path="block3"),))
    loss, args = functions(policy)
    assert shared(loss, args) == (2, 2)
    found = {
        (row.path.split("/")[0], row.action.bits)
        for row in jaxact.residuals(loss, *args).rows
        if isinstance(row.action, Quantize)
    }
    bits = {f"block{number}": 8 if number == 3 else 2 for number in range(LAYERS)}
    assert found == set(bits.items())


def test_layers_that_share_a_pass_are_rounded_apart():
    """Equal weights and inputs: their errors would be equal with equal noise."""
    small = jaxact.compress(
        lambda w, x: x * w[None], policy=Policy(default=Quantize(2)), activations="x"
    )

    @jax.jit
    def gradients(w, x):
        def loss(w):
            total = 0.0
            for number in range(LAYERS):
                with jax.named_scope(f"block{number}"):
                    total += small(w[number], x).sum()
            return total

        return jax.grad(loss)(w)

    rounded = gradients(jnp.ones((LAYERS, WIDTH)), X)
    errors = np.asarray(rounded - X.sum(0)[None])
    correlation = np.corrcoef(errors.reshape(LAYERS, -1))
    others = correlation[~np.eye(LAYERS, dtype=bool)]
    # 20 of 64 independent errors each: |r| > 6 / 8 has probability below 1e-9.
    assert np.abs(others).max() < 6 / 8


def test_seeds_are_the_same_however_a_call_is_evaluated():
    small = jaxact.compress(
        lambda w, x: x * w[None], policy=Policy(default=Quantize(2)), activations="x"
    )
    gradient = jax.grad(lambda w: small(w, X).sum())
    w = jnp.ones(WIDTH)
    np.testing.assert_array_equal(gradient(w), jax.jit(gradient)(w))


@pytest.mark.parametrize("policy", [POLICY, Policy(default=Exact())], ids=str)
def test_an_eager_checkpoint_computes_as_without_compression(policy):
    small = jaxact.compress(layer, policy=policy, activations="x")
    run = lambda block: jax.value_and_grad(
        lambda w: (jax.checkpoint(block)(w, X) ** 2).mean()
    )(W[0])
    value, gradient = run(small)
    plain, wanted = run(layer)
    assert value == plain
    if policy != POLICY:
        np.testing.assert_array_equal(gradient, wanted)


def test_a_residual_at_a_path():
    inside = Residual((4,), np.dtype("float32"), path="up", label="mul#2")
    placed = inside.at("Net/#2.call/block1")
    assert placed.key == "Net/block1/up/mul#2@call#2"
    constant = Residual((4,), np.dtype("float32"), origin="constant")
    assert constant.at("Net") == constant

"""Outputs that nobody uses: the same gradients, and no memory for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jaxact
from jaxact import Policy
from support.gpu_target import needs_target
from support.programs import assert_same_bits
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

LAYERS, WIDTH, ROWS = 4, 64, 128


def mlp(p, x):
    hidden = jnp.tanh(x @ p["up"])
    return x + hidden @ p["down"]


def with_hidden(p, x):
    hidden = jnp.tanh(x @ p["up"])
    return x + hidden @ p["down"], jnp.sin(3 * hidden)


def with_weights(p, x):
    scores = x @ p["up"] @ p["up"].T @ x.T
    weights = jax.nn.softmax(scores / WIDTH)
    return x + jnp.tanh(weights @ x), jnp.log(1 + weights) @ x


def with_jit(p, x):
    hidden = jax.jit(lambda p, x: jax.nn.gelu(x @ p))(p["up"], x)
    both = jnp.concatenate([hidden, jnp.cos(hidden)], -1)
    return x + both[:, : 4 * WIDTH] @ p["down"], jnp.sin(both)


def with_max(p, x):
    hidden = jnp.maximum(x @ p["up"], 0.1)
    normed = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True)
    return x + hidden @ p["down"], normed, jnp.arange(3)


def with_scan(p, x):
    x, states = lax.scan(lambda x, _: (mlp(p, x), jnp.sin(x)), x, None, length=2)
    return x, states


def with_pad(p, x):
    # The padding value is a residual that is a number in the program.
    hidden = jnp.pad(jnp.tanh(x @ p["up"]), ((1, 0), (0, 0)))
    return x + hidden[:-1] @ p["down"], jnp.sin(3 * hidden)


BLOCKS = [with_hidden, with_weights, with_jit, with_max, with_scan, with_pad]
POLICIES = [
    Policy(2),
    Policy(4, recompute=jax.checkpoint_policies.dots_saveable),
    Policy(default=jaxact.Cast(jnp.bfloat16)),
]


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
    return {"up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH)}, draw(
        ROWS, WIDTH
    )


@pytest.mark.parametrize("policy", POLICIES, ids=["forms", "checkpoint", "cast"])
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_zero_cotangents(block, policy):
    small = jaxact.compress(block, policy=policy, activations="x")
    p, x = arguments()

    def unused(p, x):
        y, pullback = jax.vjp(lambda p, x: small(p, x)[0], p, x)
        return pullback(y)

    def zeros(p, x, nothing):
        out, pullback = jax.vjp(small, p, x)
        cotangent = lambda y: (
            nothing * y
            if jnp.issubdtype(y.dtype, jnp.inexact)
            else np.zeros(y.shape, jax.dtypes.float0)
        )
        return pullback((out[0], *map(cotangent, out[1:])))

    # Not jitted: in another program the compiler may order a sum in another way.
    assert_same_bits(unused(p, x), zeros(p, x, jnp.float32(0)))


def test_an_argument_of_unused_outputs_alone_has_a_zero_gradient():
    @functools.partial(jaxact.compress, activations="x")
    def block(p, x):
        return jnp.tanh(x @ p["up"]), jnp.tanh(jnp.sin(x) @ p["down"].T)

    p, x = arguments()
    gradient = jax.grad(lambda p: block(p, x)[0].sum())(p)
    assert not gradient["down"].any() and gradient["up"].any()


def test_under_a_checked_shard_map():
    small = jaxact.compress(with_hidden, activations="x")
    p, x = arguments()
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda p, x: small(p, x)[0], mesh=mesh, in_specs=(None, spec), out_specs=spec
    )
    gradient = jax.jit(jax.grad(lambda p, x: mapped(p, x).sum()))(p, x)
    want = jax.jit(jax.grad(lambda p, x: small(p, x)[0].sum()))(p, x)
    jax.tree.map(np.testing.assert_array_equal, gradient, want)


def test_an_unused_argument_is_not_summed_over_devices():
    """Its zeros were arrays: an all-reduce in a shard_map that checks no types."""
    p, x = arguments()
    p = {**p, "other": jnp.ones(7)}
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    specs = {"in_specs": (None, PartitionSpec("data")), "out_specs": PartitionSpec()}

    def sums(f):
        loss = lambda p, x: lax.psum(f(p, x).sum(), "data")
        mapped = jax.shard_map(loss, mesh=mesh, check_vma=False, **specs)
        gradient = jax.jit(jax.grad(mapped))
        assert not gradient(p, x)["other"].any()
        return gradient.lower(p, x).as_text().count("all_reduce")

    small = jaxact.compress(mlp, activations="x")
    assert sums(small) == sums(mlp)
    each = jax.vmap(lambda p, x: jaxact.compress(mlp)(p, x[None])[0], (None, 0))
    gradient = jax.grad(lambda p: jax.checkpoint(each)(p, x).sum())(p)
    assert not gradient["other"].any() and gradient["up"].any()


def network(block):
    block = jaxact.compress(block, activations="x")

    def step(x, p):
        out = block(p, x)
        return (out if isinstance(out, jax.Array) else out[0]), None

    return jax.value_and_grad(lambda p, x: (lax.scan(step, x, p)[0] ** 2).mean())


def shapes():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    up, down = struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)
    return {"up": up, "down": down}, struct(4096, WIDTH)


def temp_bytes(f):
    analysis = jax.jit(f).lower(*shapes()).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_an_unused_output_costs_no_memory():
    # Before it was 1.4 times as much: the hidden layer's cosine, packed. In JAX 0.10
    # XLA computes the sum before it packs: two arrays of 1 MiB more in the forward
    # pass, 15.27 MiB at its fullest; the backward pass takes 14.81, as that of `mlp`.
    most = 1.02 if jax.__version_info__ >= (0, 12) else 1.04
    assert temp_bytes(network(with_hidden)) <= most * temp_bytes(network(mlp))


@thorough
@needs_target
def test_an_unused_output_costs_no_memory_on_a_gpu():
    bytes_of = lambda block: (
        jaxact.memory(network(block), *shapes(), target="h100").temp_bytes
    )
    assert bytes_of(with_hidden) <= 1.02 * bytes_of(mlp)

"""Compressed calls under `jax.vmap`: one call for the batch, where that is right."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import export, lax

import jaxact
from jaxact import Policy
from jaxact._flat import Flat
from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING
from support.programs import relative_error

KEYS = jax.random.split(jax.random.key(0), 4)
W = {
    "up": jax.random.normal(KEYS[0], (64, 128)) / 8,
    "down": jax.random.normal(KEYS[1], (128, 64)) / 8,
}
X = jax.random.normal(KEYS[2], (8, 16, 64))
CLOSE = 0.03  # relative error of 8-bit gradients: three residuals, 0.4 % each


def block(w, x):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


small = jaxact.compress(block, activations="x", policy=Policy(bits=8))


def square(y):
    return (y**2).sum()


def over_batch(f):
    return jax.grad(lambda w, x: square(jax.vmap(f, (None, 0))(w, x)), argnums=(0, 1))


def bytes_at_peak(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


GRADIENTS = {
    "of a batch": over_batch,
    "along another axis": lambda f: jax.grad(
        lambda w, x: square(jax.vmap(f, (None, 1), 1)(w, x)), argnums=(0, 1)
    ),
    "of each example": lambda f: jax.vmap(
        jax.grad(lambda w, x: square(f(w, x)), argnums=(0, 1)), (None, 0)
    ),
    "of each example, by x alone": lambda f: (
        lambda w, x: jax.vmap(jax.grad(lambda x: square(f(w, x))))(x)
    ),
    "of a batch of gradients by another value": lambda f: jax.grad(
        lambda w, x: square(
            jax.vmap(lambda x: jax.grad(lambda z: (f(w, x) * z).sum())(2.0))(x)
        )
    ),
    "of two batches": lambda f: jax.grad(
        lambda w, x: square(jax.vmap(jax.vmap(f, (None, 0)), (None, 0))(w, x)),
        argnums=(0, 1),
    ),
    "of an inner batch that it does not see": lambda f: jax.grad(
        lambda w, x: square(
            jax.vmap(lambda x: jax.vmap(lambda s: s * f(w, x))(jnp.arange(3.0)))(x)
        )
    ),
    "of a jitted function": lambda f: over_batch(jax.jit(f)),
    "in jit, where x is closed over": lambda f: jax.grad(
        lambda w, x: square(jax.vmap(lambda x: jax.jit(lambda w: f(w, x))(w))(x))
    ),
    "of a checkpoint": lambda f: over_batch(jax.checkpoint(f)),
    "of a scan": lambda f: over_batch(
        lambda w, x: lax.scan(lambda x, _: (f(w, x), None), x, length=3)[0]
    ),
    "by jacrev": lambda f: jax.jacrev(
        lambda w, x: jax.vmap(f, (None, 0))(w, x[:2, :2]).sum(-1)
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    gradient = GRADIENTS[name]
    ours, true = (jax.jit(gradient(f))(W, X) for f in (small, block))
    assert relative_error(ours, true) < CLOSE


def test_weights_of_each_example():
    weights = jax.tree.map(lambda w: jnp.stack([w] * 8), W)
    gradient = lambda f: jax.grad(lambda w: square(jax.vmap(f)(w, X)))(weights)
    assert relative_error(gradient(small), gradient(block)) < CLOSE


def test_outputs_without_the_axis_and_a_sum_over_it():
    def f(w, x):
        h = x @ w["up"]
        return jnp.tanh(h - lax.pmean(h, "batch")), square(w["up"])

    def gradient(f):
        mapped = jax.vmap(f, (None, 0), (0, None), axis_name="batch")
        return jax.jit(jax.grad(lambda w, x: sum(map(square, mapped(w, x)))))(W, X)

    compressed = jaxact.compress(f, activations="x", policy=Policy(bits=8))
    assert relative_error(gradient(compressed), gradient(f)) < CLOSE


def test_values_are_those_of_the_function():
    ours, true = (jax.jit(jax.vmap(f, (None, 0)))(W, X) for f in (small, block))
    np.testing.assert_array_equal(ours, true)


def test_a_key_for_each_example():
    draws = jax.random.split(KEYS[3], 8)

    def loss(f):
        return lambda w: square(jax.vmap(lambda x, key: f(w, x, key))(X, draws))

    ours = jax.grad(loss(lambda w, x, key: small(w, x, rounding_key=key)))(W)
    assert relative_error(ours, jax.grad(loss(lambda w, x, _: block(w, x)))(W)) < CLOSE


def test_export_for_batches_of_any_size():
    shape = export.symbolic_shape("batch, 16, 64")
    x = jax.ShapeDtypeStruct(shape, X.dtype)
    ours, true = (jax.jit(over_batch(f)) for f in (small, block))
    exported = export.export(ours)(W, x)
    assert relative_error(exported.call(W, X), true(W, X)) < CLOSE


BETWEEN = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: (
        lambda w, x: lax.scan(
            lambda x, w: (f(w, x), None), x, jax.tree.map(lambda a: a[None], w)
        )[0]
    ),
}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX has no rule for maps of a call there"
)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_behind_another_transformation_weights_have_one_gradient(between):
    w = jax.tree.map(lambda a: jnp.tile(a, (4, 4)), W)
    x = jnp.tile(X, (4, 1, 4))
    each = 4 * len(x) * w["up"].size  # bytes of one weight's gradient for each example
    step = lambda f: jax.grad(lambda w: square(jax.vmap(f, (None, 0))(w, x)))
    found = bytes_at_peak(step(between(small)), w)
    assert found < bytes_at_peak(step(small), w) + each / 4


def test_calls_outside_of_jit_leave_no_programs():
    def count():
        gc.collect()
        return sum(isinstance(x, Flat) for x in gc.get_objects())

    gradient = over_batch(small)
    gradient(W, X)
    before = count()
    for _ in range(4):
        gradient(W, X)
    assert count() <= before


def test_the_weights_gradient_is_there_once():
    """64 of them, 16 MiB, were at once in memory: 34 MiB instead of 5."""
    x = jax.random.normal(KEYS[2], (64, 16, 256))
    w = {"up": jnp.ones((256, 256)), "down": jnp.ones((256, 256))}
    batched = jaxact.compress(
        lambda w, x: jax.vmap(block, (None, 0))(w, x), activations="x"
    )
    step = lambda f: jax.grad(lambda w, x: square(f(w, x)))
    outside = jax.vmap(jaxact.compress(block, activations="x"), (None, 0))
    plain = bytes_at_peak(step(jax.vmap(block, (None, 0))), w, x)
    found = bytes_at_peak(step(outside), w, x)
    assert found < plain
    assert found == bytes_at_peak(step(batched), w, x)


def test_residuals_have_the_keys_of_one_example():
    one = jaxact.residuals(small, W, X[0])
    batch = jaxact.residuals(jax.vmap(small, (None, 0)), W, X)
    assert [row.key for row in batch.rows] == [row.key for row in one.rows]
    assert batch.rows[0].shape == (8, *one.rows[0].shape)
    loss = lambda w, x: square(jax.vmap(small, (None, 0))(w, x))
    measured = jaxact.telemetry(loss)
    noise, _ = jax.grad(measured, argnums=(0, 1))(measured.probe(W, X), W, X)
    found = jaxact.sensitivity(loss, W, X)
    assert set(noise.values) == {row.key for row in found.rows}
    assert set(noise.values) == {row.key for row in one.rows}


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.gelu(nn.Dense(256)(x))


class Linear(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(256, 256, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.gelu(self.dense(x))


def linen_step(is_mapped):
    small = jaxact.compress(Dense)
    axes = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
    net = nn.vmap(small, **axes)() if is_mapped else small()
    variables = net.init(KEYS[0], jnp.ones((64, 16, 256)))
    return jax.grad(lambda v, x: square(net.apply(v, x))), variables


def nnx_step(is_mapped):
    graph, state = nnx.split(jaxact.compress(Linear)())
    call = lambda m, x: m(x)
    call = nnx.vmap(call, in_axes=(None, 0)) if is_mapped else call
    return jax.grad(lambda s, x: square(call(nnx.merge(graph, s), x))), state


@pytest.mark.parametrize("step", [linen_step, nnx_step])
def test_modules_under_the_maps_of_flax(step):
    x = jnp.ones((64, 16, 256))
    (mapped, parameters), (direct, _) = step(True), step(False)
    found = bytes_at_peak(mapped, parameters, x)
    assert found < 1.05 * bytes_at_peak(direct, parameters, x)


@pytest.mark.skipif(not HAS_GENERIC_BATCHING, reason="JAX 0.10 transposes the call")
def test_a_transpose_is_refused_in_words():
    """JAX asked for a method of a class in jaxact."""
    double = jaxact.compress(lambda x: 2 * x)
    with pytest.raises(TypeError, match="use jax.vjp, or the uncompressed function"):
        jax.linear_transpose(double, X)(X)

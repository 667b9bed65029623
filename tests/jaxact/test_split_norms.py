"""Norms whose batch is split over a mapped axis or devices, and pooled norms."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxact

pytestmark = pytest.mark.unoptimized

# Channels of unlike size share a group of 256.
SCALES = jnp.exp(1.5 * jax.random.normal(jax.random.key(4), (1, 64)))
WEIGHTS = [jax.random.normal(jax.random.key(i), (64, 64)) / 8 for i in (1, 2)]
X = jax.random.normal(jax.random.key(0), (8, 64, 64))


def sent_together(x):
    mean, square = lax.pmean(
        jnp.stack([x.mean(0, keepdims=True), (x * x).mean(0, keepdims=True)]), "batch"
    )
    return mean, jnp.maximum(square - mean**2, 0)


def sent_as_a_pair(x):
    mean, square = lax.pmean(
        (x.mean(0, keepdims=True), (x * x).mean(0, keepdims=True)), "batch"
    )
    return mean, square - mean**2


def in_two_steps(x):
    mean = lax.pmean(x.mean(0, keepdims=True), "batch")
    return mean, lax.pmean(((x - mean) ** 2).mean(0, keepdims=True), "batch")


def layer(moments, ws, x):
    first, second = ws
    h = x @ (first * SCALES)
    mean, variance = moments(h)
    return x + jax.nn.gelu((h - mean) * lax.rsqrt(variance + 1e-5)) @ second


def over_vmap(f, ws, x):
    return (jax.vmap(f, (None, 0), axis_name="batch")(ws, x) ** 2).mean()


def over_devices(f, ws, x):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("batch",))
    specs = PartitionSpec(), PartitionSpec("batch")
    run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[1])
    return (run(ws, x.reshape(-1, 64)) ** 2).mean()


@pytest.mark.thorough
@pytest.mark.parametrize("over", [over_vmap, over_devices])
@pytest.mark.parametrize("moments", [sent_together, sent_as_a_pair, in_two_steps])
def test_statistics_over_an_axis_are_exact(moments, over):
    # Rounded as slopes of single elements they erred by 0.3 gradients at 8 bits.
    plain = functools.partial(layer, moments)
    small = jaxact.compress(plain, activations="x", policy=jaxact.Policy(bits=8))
    step = functools.partial(over, small)
    exact = jax.jit(jax.grad(functools.partial(over, plain)))(WEIGHTS, X)
    for g, e in zip(jax.jit(jax.grad(step))(WEIGHTS, X), exact, strict=True):
        assert jnp.linalg.norm(g - e) < 0.02 * jnp.linalg.norm(e)
    table = jaxact.residuals(step, WEIGHTS, X)
    stored = sum(row.stored_bytes for row in table.rows if not row.is_outside)
    assert stored < 4.2 * X.size + 4096  # three arrays or four


def test_a_normalized_sum_by_segments_is_packed_where_it_is_pooled():
    # A scatter's program is no call.
    senders, receivers = jax.random.randint(jax.random.key(5), (2, 2048), 0, 512)

    def convolution(w, h):
        h = jax.ops.segment_sum(jax.nn.relu(h @ w)[senders], receivers, 512)
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
        return jax.ops.segment_sum(h, jnp.arange(512) // 128, 4) @ w

    small = jaxact.compress(convolution, activations="h")
    table = jaxact.residuals(
        lambda w, h: small(w, jnp.sin(h)).sum(), WEIGHTS[0], X.reshape(512, 64)
    )
    inside = [row for row in table.rows if not row.is_outside]
    assert all(row.stored_bytes < 512 * 64 * 4 for row in inside)

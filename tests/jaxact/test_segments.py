"""Quotients by statistics of segments, as in attention over the edges of a graph."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxact
from support.programs import gradient_error
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

EDGES, WIDTH = 2048, 16
FEATURES = jax.random.normal(jax.random.key(0), (EDGES, WIDTH))
W = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 4


def sums(x, segments, nodes):
    return jax.ops.segment_sum(x, segments, nodes)


def softmax(divide):
    """Without a maximum; the segments' sums span some ten orders of magnitude."""

    def f(w, x, segments, nodes):
        bias = 6 * jax.random.normal(jax.random.key(2), (nodes,))
        e = jnp.exp(x @ w[:, 0] + bias[segments])
        return divide(e, sums(e, segments, nodes), segments)

    return f


def unit(factor):
    """Of segments whose scales span a factor of 1000."""

    def f(w, x, segments, nodes):
        scales = jnp.exp(jax.random.normal(jax.random.key(2), (nodes,)))
        y = jnp.exp(x @ w[:, 0]) * scales[segments]
        size = sums(y * y, segments, nodes) + 1e-12
        return jnp.tanh(factor(y, size, segments))

    return f


def graph_norm(w, x, segments, nodes):
    scales = jnp.exp(2 * jax.random.normal(jax.random.key(2), (nodes, 1)))
    h = x @ w * scales[segments] + scales[segments]
    count = sums(jnp.ones((EDGES, 1)), segments, nodes)
    h = h - (sums(h, segments, nodes) / count)[segments]
    variance = sums(h * h, segments, nodes) / count
    return jax.nn.gelu(h * lax.rsqrt(variance + 1e-5)[segments])


def cosine(w, x, segments, nodes):
    scales = jnp.exp(3 * jax.random.normal(jax.random.key(2), (nodes, 1)))
    h = (x @ w)[:nodes] * scales
    size = jnp.sqrt((h * h).sum(-1) + 1e-12)
    other = segments[::-1]
    dots = (h[segments] * h[other]).sum(-1)
    return jnp.tanh(dots / (size[segments] * size[other]))


# Errors were 1e3 to 1e14 gradients, and 1 for inverses of 700 sums or more.
QUOTIENTS = {
    "indexed": softmax(lambda e, s, i: jnp.tanh(e / s[i])),
    "taken": softmax(lambda e, s, i: jnp.tanh(e / jnp.take(s, i, mode="clip"))),
    "epsilon": softmax(lambda e, s, i: jnp.tanh(e / (s[i] + 1e-16))),
    "inverse": softmax(lambda e, s, i: jnp.tanh(e * (1 / s)[i])),
    "inverse of gathered": softmax(lambda e, s, i: jnp.square(e * (1 / s[i]))),
    "a product reads it": softmax(
        lambda e, s, i: jnp.tanh((e * (1 / s)[i]) @ FEATURES)
    ),
    "cosine": cosine,
}
# 2 with 700 segments; the roots 0.5, 0.5 and 400.
NORMS = {
    "graph norm": graph_norm,
    "root": unit(lambda y, size, i: y / jnp.sqrt(size)[i]),
    "inverse root": unit(lambda y, size, i: y * lax.rsqrt(size)[i]),
    "inverse root of gathered": unit(lambda y, size, i: y * lax.rsqrt(size[i])),
}


def with_segments(f, nodes):
    segments = jax.random.randint(jax.random.key(3), (EDGES,), 0, nodes)
    return lambda w, x: f(w, x, segments, nodes)


def draw_error(f, x):
    """Of one draw's gradient at 8 bits, relative to the gradient."""
    return gradient_error(f, W, x, policy=jaxact.Policy(8))


# Also with as many segments as elements, where sums are no smaller than their terms.
@pytest.mark.parametrize("nodes", [32, 700, EDGES])
@pytest.mark.parametrize("f", QUOTIENTS.values(), ids=QUOTIENTS)
def test_segments_of_any_size_share_a_group(f, nodes):
    # Two factors, each rounded to 8 bits of a range of 6 to 8 deviations: 1.6 %.
    assert draw_error(with_segments(f, nodes), FEATURES) < 0.032


@thorough
@pytest.mark.parametrize("nodes, most", [(32, 0.032), (700, 0.4)])
@pytest.mark.parametrize("f", NORMS.values(), ids=NORMS)
def test_norms_by_segment(f, nodes, most):
    """Of segments with 3 elements little remains beside their own direction."""
    assert draw_error(with_segments(f, nodes), FEATURES) < most


@thorough
@pytest.mark.parametrize("f", [QUOTIENTS["indexed"], graph_norm])
def test_several_graphs(f):
    f = with_segments(f, 32)
    batched = lambda w, x: jax.vmap(f, (None, 0))(w, x)
    x = jnp.stack([FEATURES, FEATURES / 2])
    assert draw_error(batched, x) < 0.032
    assert draw_error(jax.jit(batched), x) < 0.032


def test_sums_alone_are_kept():
    """They are gathered again, by indices that are arguments."""
    f = with_segments(QUOTIENTS["indexed"], 32)
    rows = jaxact.residuals(jaxact.compress(f, activations=1), W, FEATURES).rows
    exact = [row for row in rows if isinstance(row.action, jaxact.Exact)]
    assert [row.shape for row in exact] == [(32,)]


@thorough
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_mean_that_a_product_contracts_with_is_a_feature(is_joined):
    """Neighbours' means, also beside each node's own features (GraphSAGE)."""

    def f(w, x, segments, nodes):
        sums = lambda y: jax.ops.segment_sum(y, segments, nodes)
        mean = sums(jax.nn.relu(x @ w)) / jnp.maximum(sums(jnp.ones_like(x)), 1)
        parts = [mean, x[:nodes] @ w] if is_joined else [mean]
        both = jnp.concatenate(parts, axis=-1)
        return jnp.tanh(both @ jnp.ones((both.shape[-1], w.shape[-1]))).sum()

    f = with_segments(f, 128)
    rows = jaxact.residuals(jaxact.compress(f, activations=1), W, FEATURES).rows
    assert all(row.action != jaxact.Exact() for row in rows if len(row.shape) > 1)
    assert draw_error(f, FEATURES) < 0.032


def deviation_by_squares(x, nodes):
    mean = by_neighbours(x, nodes)
    return by_neighbours(x * x, nodes) - mean * mean


def deviation_by_differences(x, nodes):
    difference = x - by_neighbours(x, nodes)[NEIGHBOURS]
    return by_neighbours(difference * difference, nodes)


NEIGHBOURS = jax.random.randint(jax.random.key(3), (EDGES,), 0, EDGES // 4)


def by_neighbours(x, nodes):
    count = sums(jnp.ones((len(x), 1)), NEIGHBOURS, nodes)
    return sums(x, NEIGHBOURS, nodes) / jnp.maximum(count, 1)


@thorough
@pytest.mark.parametrize("variance", [deviation_by_squares, deviation_by_differences])
def test_deviations_over_few_neighbours(variance):
    """Some nodes have one, whose deviation is zero: 0.2 and 0.03 gradients."""

    def f(w, x):
        own = variance(jax.nn.relu(x @ w), EDGES // 4)
        return jnp.sqrt(jnp.maximum(own, 0) + 1e-5)

    assert gradient_error(f, W, FEATURES, policy=jaxact.Policy(bits=8)) < 0.02

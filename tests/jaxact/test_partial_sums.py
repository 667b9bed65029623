"""Sums near a pole that leave elements out, or have weights: none bounds an element.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxact
from support.programs import relative_error

pytestmark = pytest.mark.unoptimized

# Stochastic rounding errs by half of a 255th of a range of at most 8 deviations, in
# each of two rounded factors.
MOST = 8 / 255

CAUSAL = jnp.tril(jnp.ones((64, 64), bool))
KEYS = jax.random.split(jax.random.key(8), 4)
GIVEN = [
    jax.random.normal(key, (4, 4, 64, size))
    for key, size in zip(KEYS[:3], (64, 16, 16), strict=True)
]
SCALES = jax.random.normal(KEYS[3], (1, 1, 1, 64))


def causal(positive, is_late=False, by_product=False, epsilon=1e-6):
    """Attention with weights over their sums; their first row has one element."""

    def f(scales, given):
        scores, queries, values = given
        if by_product:
            scores = (queries * scales[..., :16]) @ values.mT / 4
        else:
            scores = scores * scales
        a = jnp.where(CAUSAL, positive(scores), 0)
        sums = a.sum(-1, keepdims=True) + epsilon
        return (a @ values) / sums if is_late else (a / sums) @ values

    return f


def squared_relu(s):
    return jax.nn.relu(s) ** 2


# Stored over sums that leave out most of a row, or among rows with larger ones, the
# errors were these.
PARTIAL = {
    "relu": causal(jax.nn.relu),  # 2e7
    "relu of a product": causal(jax.nn.relu, by_product=True),  # 7e3
    "relu, divided late": causal(jax.nn.relu, is_late=True),  # 3e3
    "relu squared": causal(squared_relu),  # 24
    "relu squared, of a product": causal(squared_relu, by_product=True),  # 6
    "relu squared, a larger epsilon": causal(squared_relu, epsilon=1e-3),  # 0.5
    "fourth power": causal(lambda s: s**4, by_product=True),  # 12
    "fourth power, divided late": causal(lambda s: s**4, is_late=True),  # 6e3
    "sigmoid": causal(lambda s: jax.nn.sigmoid(2 * s - 4)),  # 0.12
}


def draw_error_of(f, params, x):
    """That of one draw's gradient in both, with `x` alone rounded."""

    def gradient(f):
        loss = lambda *args: (f(*args) * ct).sum()
        return jax.grad(loss, argnums=(0, 1))(params, x)

    ct = jax.random.normal(jax.random.key(2), jax.eval_shape(f, params, x).shape)
    small = jaxact.compress(f, policy=jaxact.Policy(8), activations=1)
    return relative_error(gradient(small), gradient(f))


@pytest.mark.parametrize("f", PARTIAL.values(), ids=PARTIAL)
def test_rows_that_a_mask_leaves_few_of(f):
    assert draw_error_of(f, SCALES, GIVEN) < MOST


def quotient(x, y):
    return x / y


def gated(mix, is_shifted=False, divide=quotient):
    """An attention-free transformer's layer: as many sums as there are elements."""

    def f(params, x):
        matrix, bias = params
        q, k, v = jnp.split(x @ matrix, 3, -1)
        if is_shifted:
            k = k - k.max(1, keepdims=True)
        e = jnp.exp(k)
        return jax.nn.sigmoid(q) * divide(mix(bias, e * v), mix(bias, e))

    return f


def by_positions(bias, e):
    return jnp.einsum("ts,bsd->btd", jnp.where(CAUSAL, jnp.exp(bias), 0), e)


def by_convolution(bias, e):
    return lax.conv_general_dilated(
        e,
        jnp.exp(bias[:7, None]),
        (1,),
        [(6, 0)],
        dimension_numbers=("NHC", "HIO", "NHC"),
        feature_group_count=64,
    )


# Errors were 1.5 to 2.7, 2.1 with maxima subtracted, and 0.6.
GATED = {
    "by positions": gated(by_positions),
    "by positions, less maxima": gated(by_positions, is_shifted=True),
    "by a convolution": gated(by_convolution),
    "by the inverse": gated(by_positions, divide=lambda x, y: x * (1 / (y + 1e-6))),
    "by at least so much": gated(
        by_positions, divide=lambda x, y: x / jnp.maximum(y, 1e-6)
    ),
}


@pytest.mark.parametrize("f", GATED.values(), ids=GATED)
def test_weighted_sums_as_many_as_elements(f):
    keys = jax.random.split(jax.random.key(9), 3)
    params = (
        jax.random.normal(keys[0], (64, 192)) * 1.5 / 8,
        jax.random.normal(keys[1], (64, 64)),
    )
    x = jax.random.normal(keys[2], (4, 64, 64))
    assert draw_error_of(f, params, x) < MOST


def masked_softmax(given):
    _, queries, values = given
    scores = queries @ values.mT
    e = jnp.where(CAUSAL, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    return (e / (e.sum(-1, keepdims=True) + 1e-6)) @ values


def linear_attention(given):
    _, queries, values = given
    q, k = jax.nn.elu(queries) + 1, jax.nn.relu(values)
    mixed = q @ (k.mT @ values)
    return mixed / (q @ k.sum(-2)[..., None] + 1e-6)


@pytest.mark.parametrize("f", [masked_softmax, linear_attention])
def test_where_no_mask_leaves_small_sums_all_is_packed(f):
    rows = jaxact.residuals(jaxact.compress(f, activations=0), GIVEN).rows
    large = [row for row in rows if row.exact_bytes > 4 * 4 * 64 * 4 + 1]
    assert large
    assert not [row for row in large if isinstance(row.action, jaxact.Exact)]

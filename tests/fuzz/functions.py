"""Functions that operations name: custom rules and forms too long for an expression.

Each stands alone, so that a failing program can be printed with the ones it uses.
"""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def softcap(x, cap):
    return cap * jnp.tanh(x / cap)


@softcap.defjvp
def _softcap_jvp(primals, tangents):
    x, cap = primals
    y = softcap(x, cap)
    return y, tangents[0] * (1 - (y / cap) ** 2)


@jax.custom_jvp
def tanh_of(x):
    return jnp.tanh(x)


@tanh_of.defjvp
def _tanh_of_jvp(primals, tangents):
    y = jnp.tanh(primals[0])
    return y, tangents[0] * (1 - y * y)


@jax.custom_jvp
def safe_log(x):
    return jnp.log(jnp.abs(x) + 0.1)


@safe_log.defjvp
def _safe_log_jvp(primals, tangents):
    (x,) = primals
    return safe_log(x), tangents[0] * jnp.sign(x) / (jnp.abs(x) + 0.1)


@jax.custom_jvp
def ratio(x, y):
    return x / y


@ratio.defjvp
def _ratio_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    zero = jnp.zeros(x.shape, x.dtype)
    return x / y, dx / y - jnp.where(x == zero, zero, dy * x / y / y)


@jax.custom_jvp
def centered_tangent(x):
    return x * 1


@centered_tangent.defjvp
def _centered_tangent_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return x * 1, t - 0.5 * t.mean(-1, keepdims=True)


@jax.custom_vjp
def ranked_gradient(x):
    return x * 1


ranked_gradient.defvjp(
    lambda x: (x * 1, None), lambda _, g: (g - 0.1 * g.max(-1, keepdims=True),)
)


@jax.custom_vjp
def clipped_gradient(x):
    return x * 1


clipped_gradient.defvjp(lambda x: (x * 1, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))


@jax.custom_vjp
def swish_from_output(x):
    return x * jax.nn.sigmoid(x)


swish_from_output.defvjp(
    lambda x: (x * jax.nn.sigmoid(x), x),
    lambda x, g: (g * jax.nn.sigmoid(x) * (1 + x * (1 - jax.nn.sigmoid(x))),),
)


@jax.custom_vjp
def scaled_gradient(x, y):
    return x * y


scaled_gradient.defvjp(
    lambda x, y: (x * y, (x, y)), lambda kept, g: (g * kept[1], 0.5 * g * kept[0])
)


@jax.custom_vjp
def straight_through_round(x):
    return jnp.round(x * 4) / 4


straight_through_round.defvjp(
    lambda x: (jnp.round(x * 4) / 4, jnp.abs(x) < 2), lambda near, g: (g * near,)
)


@jax.custom_vjp
def dense(x, w):
    return x @ w * 0.2


def _dense_forward(x, w):
    return x @ w * 0.2, (x, w)


def _dense_backward(kept, g):
    x, w = kept
    axes = tuple(range(x.ndim - 1))
    dw = jnp.tensordot(x, g, (axes, axes)) * 0.2
    return (g @ w.T * 0.2).astype(x.dtype), dw.astype(w.dtype)


dense.defvjp(_dense_forward, _dense_backward)


def frozen_dense(x, w):
    return x @ lax.stop_gradient(w) * 0.2


def affine_pair(left, right):
    return left[0] * right[0], left[1] * right[0] + right[1]


def fake_quantized(x):
    scale = lax.stop_gradient(jnp.abs(x).max() / 127 + 1e-6)
    return x + lax.stop_gradient(jnp.round(x / scale) * scale - x)


def contrastive(x):
    z = x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-3)
    return jax.nn.log_softmax(5 * z @ z.T, -1)


def causal_attention(x, y):
    scores = x @ y.swapaxes(-1, -2) / x.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), -1) @ y


def conv(x, w, window_strides=(1, 1), padding="SAME", **more):
    w = w.astype(x.dtype)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, window_strides, padding, dimension_numbers=numbers, **more
    )


def pool(x, combine, start, size, stride):
    start = jnp.asarray(start, x.dtype)
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    if combine is lax.max or combine is lax.min:
        start = -jnp.inf if combine is lax.max else jnp.inf
    else:
        start = 0.0
    return lax.reduce_window(x, start, combine, window, strides, "SAME")


def space_to_depth(x):
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, h // 2, w // 2, 4 * c)


def positive(x):
    """Symmetric, eigenvalues between 2 and about 10."""
    x = jnp.tanh(x.astype(jnp.float32))
    return x @ x.swapaxes(-1, -2) / x.shape[-1] + 2 * jnp.eye(x.shape[-2])


def near_identity(x):
    """A square matrix whose distance from 2 I is at most 1 in norm."""
    m = x.shape[-2]
    x = jnp.tanh(jnp.resize(x.astype(jnp.float32), (*x.shape[:-1], m)))
    return 2 * jnp.eye(m) + x / m


def spread(x):
    """Symmetric, eigenvalues 1, 2, 3 ... moved by less than 0.4."""
    m = x.shape[-2]
    x = near_identity(x) - 2 * jnp.eye(m)
    return jnp.diag(jnp.arange(1.0, m + 1)) + 0.2 * (x + x.swapaxes(-1, -2))


def small_square(x):
    return (near_identity(x) - 2 * jnp.eye(x.shape[-2])) * 2

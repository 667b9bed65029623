"""Network blocks under test, as users write them: a new one is one entry in BLOCKS.

Every block is f(params, x) with `x` the activation, and returns one float array. Row
statistics (of a norm, a softmax, a router) are at least 16 times smaller than the
largest array that has to be stored.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

B, T, D, F = 2, 64, 128, 512  # sequences, their length, width, hidden width
H, R = 4, 2  # query heads; how many of them share a key and a value
HEAD_WIDTH = D // H
CAUSAL = np.tril(np.ones((T, T), bool))[None, None]

S, C, U = 8, 64, 96  # side of an image, channels in, channels out (and of nodes)
K, GROUPS = 32, 8  # channels in a bottleneck; groups of a group norm
M = 4  # sequences that a recurrent cell reads

N = 128  # nodes. Each has an edge from itself, and three that come from anywhere.
RECEIVERS = np.tile(np.arange(N), 4)
SENDERS = np.r_[:N, np.random.default_rng(0).integers(N, size=3 * N)]

E, CHOICES = 4, 2  # experts; how many a token goes to
SLOTS = B * T * CHOICES * 5 // (4 * E)  # of an expert: a quarter more than the mean

V = 256  # classes
LABELS = np.arange(B * T).reshape(B, T) * 7 % V


@dataclasses.dataclass(frozen=True)
class Block:
    """A function, the shapes of its parameters, and the least that it has to store.

    `most_stored`: the most elements that may be stored at several bits for gradients
    that are unbiased. Operands of matrix products and convolutions count once; what a
    norm returns is affine in its input, given exact row statistics (its gradient uses
    one stored value twice, a bias of one part in the length of a row); a chain of
    elementwise functions counts once for its derivative. Masks take one bit and row
    statistics are small: neither counts. `x` counts once: where the caller keeps `x`,
    the limit is `most_stored - x_size`.
    """

    f: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    most_stored: int
    x_shape: tuple[int, ...] = (B, T, D)

    @property
    def name(self) -> str:
        return self.f.__name__

    @property
    def x_size(self) -> int:
        return math.prod(self.x_shape)

    def arguments(self, seed: int = 0, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)  # which, unlike JAX's, compiles nothing
        x = jnp.asarray(rng.standard_normal(self.x_shape), dtype)
        params = {
            name: jnp.asarray(initial(rng, name, shape), dtype)
            for name, shape in self.shapes.items()
        }
        return params, x


def initial(rng, name, shape):
    """Gains near 1, other vectors near 0, matrices and kernels scaled by fan-in."""
    noise = rng.standard_normal(shape)
    if len(shape) == 1:
        return noise / 10 + float("gain" in name)
    return noise / math.prod(shape[:-1]) ** 0.5


def rows(vector, x):
    """`vector` with the rank of `x`, to broadcast along its last axis."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def dense(x, w, bias):
    y = x @ w
    return y + rows(bias, y)


def normalize(x, axes=-1):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def affine(p, i, x):
    return x * rows(p[f"gain{i}"], x) + rows(p[f"bias{i}"], x)


def rms_norm(x, gain):
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * lax.rsqrt(square + 1e-6) * rows(gain, x)


def dropout(x, seed):
    keep = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0.0)


def split_heads(x):
    return x.reshape(*x.shape[:2], -1, HEAD_WIDTH)


def attend(q, k, v, hidden, softmax=jax.nn.softmax):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / HEAD_WIDTH**0.5
    weights = softmax(jnp.where(CAUSAL, scores, hidden))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*q.shape[:2], -1)


def transformer(p, x):
    y = affine(p, 1, normalize(x))
    q, k, v = map(split_heads, jnp.split(dense(y, p["qkv"], p["qkv_bias"]), 3, -1))
    y = dense(attend(q, k, v, -1e9), p["out"], p["out_bias"])
    x = x + dropout(y, 1)
    y = affine(p, 2, normalize(x))
    y = jax.nn.gelu(dense(y, p["up"], p["up_bias"]))
    return x + dropout(dense(y, p["down"], p["down_bias"]), 2)


def rotate(x):
    """Rotary position embedding (Su et al. 2021), halves of a head as pairs."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.outer(jnp.arange(float(x.shape[1])), rates)[None, :, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def llama(p, x):
    y = rms_norm(x, p["gain1"])
    q, k, v = (split_heads(y @ p[name]) for name in ("q", "k", "v"))
    k, v = (jnp.repeat(a, R, axis=2) for a in (rotate(k), v))
    x = x + attend(rotate(q), k, v, -jnp.inf) @ p["out"]
    y = rms_norm(x, p["gain2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def fused_attention(p, x):
    """In bfloat16, its gradient is an error of JAX under strict promotion."""
    q, k, v = (split_heads(x @ p[name]) for name in ("q", "k", "v"))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return x + y.reshape(x.shape) @ p["out"]


def norms_in_float32(p, x):
    """Computes in bfloat16 with float32 parameters, as Flax does."""
    low = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    high = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    layer_norm = lambda i, x: low(affine(high(p), i, normalize(high(x))))
    softmax = lambda scores: low(jax.nn.softmax(high(scores)))
    x, w = low(x), low(p)
    q, k, v = map(split_heads, jnp.split(layer_norm(1, x) @ w["qkv"], 3, -1))
    x = x + attend(q, k, v, jnp.finfo(x.dtype).min, softmax) @ w["out"]
    return high(x + jax.nn.gelu(layer_norm(2, x) @ w["up"]) @ w["down"])


def conv(x, w, groups=1):
    layout = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def group_norm(p, i, x):
    grouped = x.reshape(*x.shape[:3], GROUPS, -1)
    return affine(p, i, normalize(grouped, (1, 2, 4)).reshape(x.shape))


def bottleneck(p, x):
    batch_norm = lambda i, y: affine(p, i, normalize(y, (0, 1, 2)))
    y = jax.nn.relu(batch_norm(1, conv(x, p["conv1"])))
    y = jax.nn.relu(batch_norm(2, conv(y, p["conv2"])))
    return jax.nn.relu(x + batch_norm(3, conv(y, p["conv3"])))


def convnext(p, x):
    y = conv(x, p["depthwise"], groups=C)
    y = affine(p, 1, normalize(y + rows(p["depthwise_bias"], y)))
    y = jax.nn.gelu(dense(y, p["up"], p["up_bias"]))
    y = dense(y, p["down"], p["down_bias"])
    return x + y * rows(p["layer_gain"], y)


def unet(p, x):
    time = jax.nn.silu(p["time"]) @ p["project_time"]
    y = jax.nn.silu(group_norm(p, 1, x))
    y = conv(y, p["conv1"]) + time[:, None, None]
    y = jax.nn.silu(group_norm(p, 2, y))
    return conv(x, p["project"]) + conv(y, p["conv2"])


def max_pool(p, x):
    y = jax.nn.relu(conv(x, p["conv1"]))
    window = (1, 2, 2, 1)
    y = lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID")
    return conv(y, p["conv2"])


def lstm(p, xs):
    def cell(state, x):
        h, c = state
        gates = dense(jnp.concatenate([x, h], -1), p["w"], p["bias"])
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((M, C), xs.dtype)
    return lax.scan(cell, (start, start), xs)[1]


def gru(p, xs):
    def cell(h, x):
        r_x, z_x, n_x = jnp.split(dense(x, p["x"], p["bias"]), 3, -1)
        r_h, z_h, n_h = jnp.split(dense(h, p["h"], p["h_bias"]), 3, -1)
        r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
        h = (1 - z) * jnp.tanh(n_x + r * n_h) + z * h
        return h, h

    return lax.scan(cell, jnp.zeros((M, C), xs.dtype), xs)[1]


def state_space(p, x):
    """Gated linear recurrence h[t] = a[t] h[t - 1] + (1 - a[t]) u[t]."""
    y = rms_norm(x, p["gain"])
    a = jax.nn.sigmoid(dense(y, p["decay"], p["decay_bias"]))
    b = (1 - a) * (y @ p["in"])
    after = lambda s, t: (s[0] * t[0], t[0] * s[1] + t[1])
    _, h = lax.associative_scan(after, (a, b), axis=1)
    return x + (h * jax.nn.silu(y @ p["gate"])) @ p["out"]


def receive(messages):
    return jax.ops.segment_sum(messages, RECEIVERS, N)


def graph(p, x):
    degree = lambda ends: jax.ops.segment_sum(jnp.ones(ends.shape), ends, N)
    from_sender = lax.rsqrt(degree(SENDERS)).astype(x.dtype)[:, None]
    to_receiver = lax.rsqrt(degree(RECEIVERS)).astype(x.dtype)[:, None]
    layer = lambda x, w: receive((x @ w * from_sender)[SENDERS]) * to_receiver
    return layer(dropout(jax.nn.relu(layer(x, p["w1"])), 1), p["w2"])


def graph_attention(p, x):
    h = (x @ p["w"]).reshape(N, H, -1)
    sender, receiver = ((h * p[name][None]).sum(-1) for name in ("sender", "receiver"))
    edges = jax.nn.leaky_relu(sender[SENDERS] + receiver[RECEIVERS], 0.2)
    largest = jax.ops.segment_max(lax.stop_gradient(edges), RECEIVERS, N)
    weights = jnp.exp(edges - largest[RECEIVERS])
    weights = weights / receive(weights)[RECEIVERS]
    y = receive(weights[..., None] * h[SENDERS]).reshape(N, -1)
    return jax.nn.elu(x + y @ p["out"])


def experts(p, x):
    """Each token goes to CHOICES experts, in the order of tokens, while slots last."""
    tokens = x.reshape(-1, D)
    weights, chosen = lax.top_k(jax.nn.softmax(tokens @ p["router"]), CHOICES)
    weights = weights / weights.sum(-1, keepdims=True)
    is_chosen = jax.nn.one_hot(chosen.ravel(), E, dtype=jnp.int32)
    place = (is_chosen * (jnp.cumsum(is_chosen, 0) - 1)).sum(-1)
    slot = jax.nn.one_hot(place.reshape(chosen.shape), SLOTS, dtype=x.dtype)
    expert = jax.nn.one_hot(chosen, E, dtype=x.dtype)
    dispatch = jnp.einsum("nke,nks->nes", expert, slot)
    combine = jnp.einsum("nk,nke,nks->nes", weights, expert, slot)
    y = jnp.einsum("nes,nd->esd", dispatch, tokens)
    y = jax.nn.gelu(jnp.einsum("esd,edf->esf", y, p["up"]))
    y = jnp.einsum("esf,efd->esd", y, p["down"])
    return x + jnp.einsum("nes,esd->nd", combine, y).reshape(x.shape)


def classifier(p, x):
    logs = jax.nn.log_softmax(dense(x, p["w"], p["bias"]))
    return -jnp.take_along_axis(logs, LABELS[..., None], -1).mean()


def label_smoothing(p, x):
    logits = dense(x, p["w"], p["bias"])
    true = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    wanted = 0.9 * true + 0.1 * logits.mean(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - wanted).mean()


shaped = lambda names, *shape: dict.fromkeys(names.split(), shape)
TOKENS, PIXELS, IMAGE = B * T, B * S * S, (B, S, S, C)
NORMS = shaped("gain1 bias1 gain2 bias2", D)
MLP = {"up": (D, F), "down": (F, D)}

# Above each block: what `most_stored` counts, in the order of its terms.
BLOCKS = [
    # x, q, k, v, mixed values, x of the second half; weights; gelu', gelu.
    Block(
        transformer,
        {"qkv": (D, 3 * D), "qkv_bias": (3 * D,), "out": (D, D), "up_bias": (F,)}
        | {**NORMS, **MLP, **shaped("out_bias down_bias", D)},
        TOKENS * (6 * D + H * T + 2 * F),
    ),
    # x, q, mixed values, x of the second half; k and v before they are repeated;
    # weights (or exp(scores)); silu(g), u silu'(g), u silu(g).
    Block(
        llama,
        {**shaped("q out", D, D), **shaped("k v", D, D // R), "gate": (D, F)}
        | {**MLP, **shaped("gain1 gain2", D)},
        TOKENS * (4 * D + 2 * D // R + H * T + 3 * F),
    ),
    # x, q, k, v, mixed values; weights.
    Block(fused_attention, shaped("q k v out", D, D), TOKENS * (5 * D + H * T)),
    # As in `transformer`.
    Block(
        norms_in_float32,
        {"qkv": (D, 3 * D), "out": (D, D), **MLP, **NORMS},
        TOKENS * (6 * D + H * T + 2 * F),
    ),
    # x; the output of each convolution, from which a mask makes the next operand.
    Block(
        bottleneck,
        {"conv1": (1, 1, 4 * K, K), "conv2": (3, 3, K, K), "conv3": (1, 1, K, 4 * K)}
        | shaped("gain1 bias1 gain2 bias2", K)
        | shaped("gain3 bias3", 4 * K),
        PIXELS * (4 * K + K + K + 4 * K),
        (B, S, S, 4 * K),
    ),
    # x, input of the norm; gelu', gelu; what `layer_gain` scales (C less if that
    # gradient is taken from the one of `down`, before it is scaled).
    Block(
        convnext,
        {"depthwise": (7, 7, 1, C), "up": (C, 4 * C), "down": (4 * C, C)}
        | shaped("depthwise_bias gain1 bias1 layer_gain down_bias", C)
        | shaped("up_bias", 4 * C),
        PIXELS * (2 * C + 2 * 4 * C + C),
        IMAGE,
    ),
    # Input of a norm (x the first time), silu', silu; the same of the second half.
    Block(
        unet,
        {"conv1": (3, 3, C, U), "conv2": (3, 3, U, U), "project": (1, 1, C, U)}
        | {"time": (B, C), "project_time": (C, U)}
        | {**shaped("gain1 bias1", C), **shaped("gain2 bias2", U)},
        PIXELS * (3 * C + 3 * U),
        IMAGE,
    ),
    # x; the maxima. Which pixel of a window is largest is a mask.
    Block(
        max_pool, shaped("conv1 conv2", 3, 3, C, C), PIXELS * C + PIXELS // 4 * C, IMAGE
    ),
    # x, h, sigmoid(f); derivatives of c in i, f, g and of h in o, c.
    Block(lstm, {"w": (2 * C, 4 * C), "bias": (4 * C,)}, T * M * 8 * C, (T, M, C)),
    # x, h, r, z; derivatives of h in z, n and of n in r.
    Block(
        gru,
        shaped("x h", C, 3 * C) | shaped("bias h_bias", 3 * C),
        T * M * 7 * C,
        (T, M, C),
    ),
    # x, u, a, a'; silu(g), h silu'(g), h silu(g); in the tree of the scan, products of
    # decays (one array in all) and partial states (two).
    Block(
        state_space,
        shaped("decay in gate out", D, D) | shaped("gain decay_bias", D),
        TOKENS * 10 * D,
    ),
    # x; operand of the second layer.
    Block(graph, {"w1": (C, U), "w2": (U, C)}, N * (C + U), (N, C)),
    # x, elu'; h, what is received; weights of edges.
    Block(
        graph_attention,
        {"w": (C, U), "out": (U, C), **shaped("sender receiver", H, U // H)},
        N * (2 * C + 2 * U) + RECEIVERS.size * H,
        (N, C),
    ),
    # x; dispatch and combine; gelu', gelu; what experts get and return.
    Block(
        experts,
        {"router": (D, E), "up": (E, D, F), "down": (E, F, D)},
        TOKENS * (D + 2 * E * SLOTS) + E * SLOTS * (2 * F + 2 * D),
    ),
    # x; probabilities.
    Block(classifier, {"w": (D, V), "bias": (V,)}, TOKENS * (D + V)),
    Block(label_smoothing, {"w": (D, V), "bias": (V,)}, TOKENS * (D + V)),
]

each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)

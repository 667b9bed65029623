"""A pre-LN transformer in plain jax.numpy: the reference for memory and cost.

Six values of each layer carry a `checkpoint_name`. Keeping those and recomputing the
rest is the usual good choice for this network, so a policy stores them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

NAMES = ("q", "k", "v", "o", "mid", "ffn_pre")

Layer = dict[str, Any]
Block = Callable[[Layer, jax.Array], jax.Array]


@dataclass(frozen=True)
class Size:
    """The shape of the network and of its input [batch, length, width]."""

    layers: int = 12
    batch: int = 8
    length: int = 512
    width: int = 512
    hidden: int = 2048

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.length, self.width), jnp.float32)

    @property
    def layer(self) -> Layer:
        """The parameters of one layer, as shapes."""
        square = {name: (self.width, self.width) for name in ("wq", "wk", "wv", "wo")}
        feed = {"up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        gains = {"attention_gain": (self.width,), "feed_gain": (self.width,)}
        shapes = square | feed | gains
        return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    @property
    def unrolled(self) -> list[Layer]:
        return [self.layer] * self.layers

    @property
    def scanned(self) -> Layer:
        """All layers' parameters with a leading axis of layers."""
        add_axis = lambda s: jax.ShapeDtypeStruct((self.layers, *s.shape), s.dtype)
        return jax.tree.map(add_axis, self.layer)


def init(key: jax.Array, shapes: Any) -> Any:
    """Parameters of these shapes: gains one, matrices scaled by their input."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(shapes))))

    def one(path, shape):
        key = next(keys)
        if path[-1].key.endswith("gain"):
            return jnp.ones(shape.shape, shape.dtype)
        return (
            jax.random.normal(key, shape.shape, shape.dtype) * shape.shape[-2] ** -0.5
        )

    return jax.tree.map_with_path(one, shapes)


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain[None, None]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention with eight heads over [batch, length, width]."""
    batch, length, width = q.shape
    heads = lambda t: t.reshape(batch, length, 8, width // 8).transpose(0, 2, 1, 3)
    scores = jnp.einsum("bhqd,bhkd->bhqk", heads(q), heads(k)) * (width // 8) ** -0.5
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), heads(v))
    return mixed.transpose(0, 2, 1, 3).reshape(q.shape)


def block(p: Layer, x: jax.Array) -> jax.Array:
    """One layer: attention, then two dense maps, each added to its input."""
    h = norm(x, p["attention_gain"])
    q, k, v = (checkpoint_name(h @ p["w" + name], name) for name in "qkv")
    o = checkpoint_name(attention(q, k, v), "o")
    mid = checkpoint_name(x + o @ p["wo"], "mid")
    pre = checkpoint_name(norm(mid, p["feed_gain"]) @ p["up"], "ffn_pre")
    return mid + jax.nn.gelu(pre) @ p["down"]


def unrolled_loss(block: Block, layers: Sequence[Layer], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = block(layer, x)
    return (x * x).sum()


def scanned_loss(block: Block, layers: Layer, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (block(layer, x), None), x, layers)
    return (x * x).sum()

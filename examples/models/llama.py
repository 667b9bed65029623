"""A decoder like Llama in plain jax.numpy, after Touvron et al. 2023.

https://arxiv.org/abs/2302.13971: RMSNorm before each half of a layer (Zhang and
Sennrich 2019, arXiv:1910.07467, eq. 4), rotary positions (Su et al. 2021,
arXiv:2104.09864, eq. 34, with the halves of a head as pairs, as Hugging Face has them),
SwiGLU (Shazeer 2020, arXiv:2002.05202, eq. 6) and, with fewer `kv_heads` than `heads`,
grouped queries (Ainslie et al. 2023, arXiv:2305.13245). Mistral and Qwen2 are the same
network.

A layer may hold adapters beside its matrices (Hu et al. 2021, arXiv:2106.09685, eq. 3):
where it has `q_a` [width, rank] and `q_b` [rank, outputs], its `q` is q + q_a @ q_b.

A wrapped block goes in where the plain one stood:

  block = jaxact.compress(net.block, activations="x")
  loss = functools.partial(net.loss, block=block)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from models.gpt import logits

Layer = dict[str, Any]
Block = Callable[[Layer, jax.Array], jax.Array]


@dataclass(frozen=True)
class Llama:
    """The shape of the network, and how it is computed.

    Attributes:
      layers, width, heads, kv_heads, head_width, hidden, vocabulary: of the network.
      length: of the longest sequence it is for.
      rope_base: rotary pair i of n turns by rope_base ** (-i / n) a position.
      epsilon: added to the mean square in a norm.
      tied: the token embedding is the head too.
      biased: maps that add a bias, of q, k, v, o, gate, up and down.
      recompute_attention: keep q, k and v, but nothing of size length x length.
      dtype: of the blocks and of the matrix product that gives the logits.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    length: int
    rope_base: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = False
    biased: tuple[str, ...] = ()
    recompute_attention: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def maps(self) -> dict[str, tuple[int, int]]:
        """The matrices of one layer: inputs, outputs."""
        d, queries = self.width, self.heads * self.head_width
        keys = self.kv_heads * self.head_width
        attention = {"q": (d, queries), "k": (d, keys), "v": (d, keys)}
        feed = {"gate": (d, self.hidden), "up": (d, self.hidden)}
        return attention | {"o": (queries, d)} | feed | {"down": (self.hidden, d)}

    @property
    def shapes(self) -> dict[str, Any]:
        """All parameters, as shapes; a layer's have a leading axis of layers."""
        array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        biases = {name + "_bias": self.maps[name][1:] for name in self.biased}
        gains = dict.fromkeys(("attention_gain", "feed_gain"), (self.width,))
        layer = self.maps | biases | gains
        found = {
            "tokens": array(self.vocabulary, self.width),
            "layers": {k: array(self.layers, *shape) for k, shape in layer.items()},
            "gain": array(self.width),
        }
        return found if self.tied else found | {"head": found["tokens"]}

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Parameters: gains one, biases zero, matrices normal with deviation 0.02."""
        keys = iter(jax.random.split(key, len(jax.tree.leaves(self.shapes))))

        def one(path: Any, shape: Any) -> jax.Array:
            key, name = next(keys), path[-1].key
            if name.endswith("gain"):
                return jnp.ones(shape.shape, shape.dtype)
            if name.endswith("bias"):
                return jnp.zeros(shape.shape, shape.dtype)
            return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)

        return jax.tree.map_with_path(one, self.shapes)

    def block(self, p: Layer, x: jax.Array) -> jax.Array:
        """One layer [batch, length, width]: attention, then the gated feed-forward."""
        attend = jax.checkpoint(attention) if self.recompute_attention else attention
        turn = lambda t: rotated(t, self.rope_base)
        heads = lambda t: t.reshape(*t.shape[:2], -1, self.head_width)
        h = self.norm(x, p["attention_gain"])
        q, k, v = (heads(dense(p, name, h)) for name in "qkv")
        mixed = attend(turn(q), turn(k), v)
        x = x + dense(p, "o", mixed.reshape(*x.shape[:2], -1))
        h = self.norm(x, p["feed_gain"])
        h = jax.nn.silu(dense(p, "gate", h)) * dense(p, "up", h)
        return x + dense(p, "down", h)

    def norm(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        """x over its root mean square along the last axis, in float32, times gain."""
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + self.epsilon)
        return (y * gain.astype(y.dtype)[None, None]).astype(x.dtype)

    def features(
        self, params: dict[str, Any], tokens: jax.Array, block: Block | None = None
    ) -> jax.Array:
        """The head's input [batch, length, width], from tokens [batch, length]."""
        if tokens.shape[1] > self.length:
            raise ValueError(
                f"{tokens.shape[1]} tokens: this network is for at most {self.length}."
            )
        block = block or self.block
        x = params["tokens"][tokens].astype(self.dtype)
        x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        return self.norm(x, params["gain"])

    def logits(self, params: dict[str, Any], x: jax.Array) -> jax.Array:
        """float32 [..., vocabulary] of features [..., width]."""
        head = params["tokens" if self.tied else "head"].astype(x.dtype)
        return logits(x, head)

    def loss(
        self, params: dict[str, Any], tokens: jax.Array, block: Block | None = None
    ) -> jax.Array:
        """Mean cross-entropy, in nats, of tokens [batch, length + 1] but the first.

        The logits of one sequence at a time exist; backward computes them again.
        """
        features = self.features(params, tokens[:, :-1], block)

        @jax.checkpoint
        def one(total: jax.Array, sequence: Any) -> tuple[jax.Array, None]:
            x, targets = sequence
            scores = self.logits(params, x)
            chosen = jnp.take_along_axis(scores, targets[:, None], -1)[:, 0]
            return total + (jax.nn.logsumexp(scores, -1) - chosen).sum(), None

        total, _ = lax.scan(one, jnp.float32(0), (features, tokens[:, 1:]))
        return total / tokens[:, 1:].size


def dense(p: Layer, name: str, x: jax.Array) -> jax.Array:
    """The layer's map `name`, with its bias and its adapter where it has them."""
    weight = lambda name: p[name].astype(x.dtype)
    y = x @ weight(name)
    if name + "_bias" in p:
        y = y + weight(name + "_bias")[None, None]
    if name + "_a" in p:
        y = y + (x @ weight(name + "_a")) @ weight(name + "_b")
    return y


def rotated(x: jax.Array, base: float) -> jax.Array:
    """Heads [batch, length, heads, width], each pair turned by its position.

    Element i of the first half of a head and element i of the second are a pair.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    speeds = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * speeds[None]
    cos, sin = (f(angles).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal softmax attention over [batch, length, heads, width of a head].

    k and v have a head for each group of q's heads.
    """
    (_, length, heads, width), kv_heads = q.shape, k.shape[2]
    groups = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", groups, k) * width**-0.5
    # Added, not selected: a sum keeps nothing for the backward pass.
    hidden = jnp.triu(jnp.full((length, length), -jnp.inf, scores.dtype), 1)
    weights = jax.nn.softmax(scores + hidden[None, None, None])
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(q.shape)

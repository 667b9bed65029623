"""A language model like GPT-2 in plain jax.numpy, after Radford et al. 2019.

Pre-LN blocks, learned positions, and a head tied to the token embedding. Parameters
are float32; the blocks compute in `dtype`. A wrapped block goes in where the plain one
stood:

  block = jaxact.compress(net.block, activations="x")
  loss = functools.partial(net.loss, block=block)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Layer = dict[str, Any]
Block = Callable[[Layer, jax.Array], jax.Array]


@dataclass(frozen=True)
class GPT:
    """The shape of the network, and how it is computed.

    Attributes:
      layers, width, heads, length, vocabulary: of the network.
      scanned: one `lax.scan` over the layers, whose parameters are then stacked; else
        a list of layers.
      recompute_attention: keep q, k and v, but nothing of size length x length.
      fused_attention: the same by JAX's Pallas kernels, for GPUs alone; nothing of that
        size is in memory at all.
      dtype: of the blocks and of the matrix product that gives the logits.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50257
    scanned: bool = True
    recompute_attention: bool = False
    fused_attention: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def layer(self) -> Layer:
        """The parameters of one layer, as shapes."""
        d = self.width
        maps = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        biases = {name + "_bias": shape[1:] for name, shape in maps.items()}
        norms = ("attention_gain", "attention_bias", "feed_gain", "feed_bias")
        shapes = maps | biases | dict.fromkeys(norms, (d,))
        return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    @property
    def shapes(self) -> dict[str, Any]:
        """All parameters, as shapes; scanned layers have a leading axis of layers."""
        add_axis = lambda s: jax.ShapeDtypeStruct((self.layers, *s.shape), s.dtype)
        array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        return {
            "tokens": array(self.vocabulary, self.width),
            "positions": array(self.length, self.width),
            "layers": jax.tree.map(add_axis, self.layer)
            if self.scanned
            else [self.layer] * self.layers,
            "gain": array(self.width),
            "bias": array(self.width),
        }

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Parameters: gains one, biases zero, matrices normal with deviation 0.02.

        Matrices that write to the residual stream are smaller by sqrt(2 layers).
        """
        keys = iter(jax.random.split(key, len(jax.tree.leaves(self.shapes))))

        def one(path: Any, shape: Any) -> jax.Array:
            key, name = next(keys), path[-1].key
            if name.endswith("gain"):
                return jnp.ones(shape.shape, shape.dtype)
            if name.endswith("bias"):
                return jnp.zeros(shape.shape, shape.dtype)
            writes = name in ("out", "down")
            deviation = 0.02 * ((2 * self.layers) ** -0.5 if writes else 1.0)
            return deviation * jax.random.normal(key, shape.shape, shape.dtype)

        return jax.tree.map_with_path(one, self.shapes)

    def block(self, p: Layer, x: jax.Array) -> jax.Array:
        """One layer [batch, length, width]: attention, then two dense maps."""
        attend = fused_attention if self.fused_attention else attention
        if self.recompute_attention:
            attend = jax.checkpoint(attend)
        h = norm(x, p["attention_gain"], p["attention_bias"])
        heads = lambda t: t.reshape(*t.shape[:2], self.heads, -1)
        q, k, v = map(heads, jnp.split(dense(h, p["qkv"], p["qkv_bias"]), 3, -1))
        mixed = attend(q, k, v).reshape(x.shape)
        x = x + dense(mixed, p["out"], p["out_bias"])
        h = norm(x, p["feed_gain"], p["feed_bias"])
        h = jax.nn.gelu(dense(h, p["up"], p["up_bias"]))
        return x + dense(h, p["down"], p["down_bias"])

    def features(
        self, params: dict[str, Any], tokens: jax.Array, block: Block | None = None
    ) -> jax.Array:
        """The head's input [batch, length, width], from tokens [batch, length]."""
        block = block or self.block
        x = params["tokens"][tokens] + params["positions"][None, : tokens.shape[1]]
        x = x.astype(self.dtype)
        if self.scanned:
            x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = block(layer, x)
        return norm(x, params["gain"], params["bias"])

    def loss(
        self, params: dict[str, Any], tokens: jax.Array, block: Block | None = None
    ) -> jax.Array:
        """Mean cross-entropy, in nats, of tokens [batch, length + 1] but the first.

        The logits of one sequence at a time exist; backward computes them again.
        """
        features = self.features(params, tokens[:, :-1], block)
        head = params["tokens"].astype(self.dtype)

        @jax.checkpoint
        def one(total: jax.Array, sequence: Any) -> tuple[jax.Array, None]:
            x, targets = sequence
            scores = logits(x, head)
            chosen = jnp.take_along_axis(scores, targets[:, None], -1)[:, 0]
            return total + (jax.nn.logsumexp(scores, -1) - chosen).sum(), None

        total, _ = lax.scan(one, jnp.float32(0), (features, tokens[:, 1:]))
        return total / tokens[:, 1:].size


SMALL = GPT()
MEDIUM = GPT(layers=24, width=1024, heads=16)


@jax.custom_vjp
def logits(x: jax.Array, head: jax.Array) -> jax.Array:
    """float32 [..., vocabulary], of x [..., width] and a head [vocabulary, width].

    Its gradient is computed in the features' dtype. In JAX's own both products would
    take the float32 cotangent as it is, at half the rate of bfloat16 on a GPU.
    """
    return jnp.dot(x, head.T, preferred_element_type=jnp.float32)


def logits_gradient(
    inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, head = inputs
    cotangent = cotangent.astype(x.dtype)
    flat = lambda t: t.reshape(-1, t.shape[-1])
    return cotangent @ head, flat(cotangent).T @ flat(x)


logits.defvjp(lambda *inputs: (logits(*inputs), inputs), logits_gradient)


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ weight.astype(x.dtype) + bias.astype(x.dtype)[None, None]


def norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * gain[None, None] + bias[None, None]).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal softmax attention over [batch, length, heads, width of a head]."""
    length, width = q.shape[1], q.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
    # Added, not selected: a sum keeps nothing for the backward pass.
    hidden = jnp.triu(jnp.full((length, length), -jnp.inf, scores.dtype), 1)
    weights = jax.nn.softmax(scores + hidden[None, None])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def fused_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same attention by kernels that compute scores tile by tile, twice."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(q, k, v, None, sm_scale=q.shape[-1] ** -0.5, causal=True)

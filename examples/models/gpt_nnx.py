"""A language model like GPT-2 in Flax NNX, after Radford et al. 2019.

Pre-LN blocks, learned positions, and a head tied to the token embedding. Parameters
are float32; the blocks compute in `dtype`. The layers are one block, scanned over the
leading axis of its parameters. The class of the block is an argument, so a wrapped
class goes in where the plain one stood:

  GPT(shape, jaxact.compress(Block), rngs=nnx.Rngs(0))
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax


@dataclass(frozen=True)
class Shape:
    """Of the network, and how it is computed.

    Attributes:
      layers, width, heads, length, vocabulary: of the network.
      chunks: a sequence's logits are computed in so many pieces.
      dtype: of the blocks and of the matrix product that gives the logits.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50257
    chunks: int = 8
    dtype: Any = jnp.bfloat16


class Block(nnx.Module):
    """Attention and two dense maps [batch, length, width], each added to its input."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        width, dtype = shape.width, shape.dtype

        def dense(inputs: int, outputs: int, deviation: float = 0.02) -> nnx.Linear:
            init = nnx.initializers.normal(deviation)
            return nnx.Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)

        # Terms of the residual stream start smaller: it adds up 2 x layers of them.
        small = 0.02 * (2 * shape.layers) ** -0.5
        self.shape = shape
        self.attention_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.qkv = dense(width, 3 * width)
        self.out = dense(width, width, small)
        self.feed_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.up = dense(width, 4 * width)
        self.down = dense(4 * width, width, small)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.out(self.mixed(self.qkv(self.attention_norm(x))))
        with jax.named_scope("feed"):
            return x + self.down(nnx.gelu(self.up(self.feed_norm(x))))

    def mixed(self, qkv: jax.Array) -> jax.Array:
        """Causal attention; of [batch, length, 3 x width], [batch, length, width]."""
        heads = lambda t: t.reshape(*t.shape[:2], self.shape.heads, -1)
        q, k, v = map(heads, jnp.split(qkv, 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(*qkv.shape[:2], -1)


class GPT(nnx.Module):
    """Blocks between an embedding and a head that share one matrix."""

    def __init__(self, shape: Shape, block: type[Block] = Block, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=shape.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> nnx.Module:
            return block(shape, rngs=rngs)

        def embedding(number: int) -> nnx.Embed:
            init = nnx.initializers.normal(0.02)
            return nnx.Embed(number, shape.width, embedding_init=init, rngs=rngs)

        self.shape = shape
        self.tokens = embedding(shape.vocabulary)
        self.positions = embedding(shape.length)
        self.layers = stacked(rngs)
        self.norm = nnx.LayerNorm(
            shape.width, epsilon=1e-5, dtype=shape.dtype, rngs=rngs
        )

    def features(self, tokens: jax.Array) -> jax.Array:
        """The head's input [batch, length, width], from tokens [batch, length]."""
        places = jnp.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places)[None]
        through = nnx.scan(
            lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return self.norm(through(self.layers, x.astype(self.shape.dtype)))

    def logits(self, features: jax.Array) -> jax.Array:
        """Of the next token [..., vocabulary], in float32."""
        head = self.tokens.embedding[...].astype(features.dtype)
        return jnp.dot(features, head.T, preferred_element_type=jnp.float32)

    def loss(self, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats, of tokens [batch, length + 1] but the first.

        The logits of one piece exist at a time; backward computes them again.
        """

        @jax.checkpoint
        def one(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits, targets = self.logits(piece[0]), piece[1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return losses.mean()

        pieces = lambda t: jnp.stack(jnp.split(t, self.shape.chunks, axis=1))
        features = self.features(tokens[:, :-1])
        return lax.map(one, (pieces(features), pieces(tokens[:, 1:]))).mean()

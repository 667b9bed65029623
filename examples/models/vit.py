"""Vision transformers in Flax Linen, after Dosovitskiy et al. 2021.

https://arxiv.org/abs/2010.11929, eq. 1 to 4. The class of the blocks is an attribute,
so a wrapped class goes in where the plain one stood:
`ViT(num_classes=10, block=jaxact.compress(Block))`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from models.scanned import scanned


class Block(nn.Module):
    """Attention and two dense maps [batch, tokens, width], each added to its input."""

    heads: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h))
        return x + nn.Dense(width, dtype=self.dtype)(h)


class ViT(nn.Module):
    """Blocks over the patches of an image, after a class token whose end is read.

    Of images [batch, height, width, channels], height and width multiples of `patch`,
    returns logits [batch, num_classes]. They and the parameters are float32; everything
    between is computed in `dtype`. With `scanned`, the blocks are scanned over. The
    defaults suit images of 32x32.
    """

    num_classes: int
    patch: int = 4
    width: int = 192
    layers: int = 6
    heads: int = 3
    block: type[nn.Module] = Block
    dtype: Any = jnp.bfloat16
    scanned: bool = False

    def embedded(self, images: jax.Array) -> jax.Array:
        """[batch, tokens, width]: the patches."""
        patch = self.patch, self.patch
        x = nn.Conv(self.width, patch, strides=patch, dtype=self.dtype)(images)
        return x.reshape(len(x), -1, self.width)

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embedded(images)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(first, (len(x), 1, self.width)).astype(x.dtype)
        x = jnp.concatenate([first, x], axis=1)
        shape = 1, *x.shape[1:]
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = x + positions.astype(x.dtype)
        if self.scanned:
            x = scanned(self.block(self.heads, self.dtype), self.layers, x)
        else:
            for _ in range(self.layers):
                x = self.block(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)[:, 0]
        head = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)
        return head(x.astype(jnp.float32))


class ViTB16(ViT):
    """ViT-B/16, for images of 224x224."""

    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12


class ViTL16(ViT):
    """ViT-L/16, for images of 224x224."""

    patch: int = 16
    width: int = 1024
    layers: int = 24
    heads: int = 16


class TextEncoder(ViT):
    """The same network over tokens [batch, length], of the shape of BERT-large.

    Devlin et al. 2019, https://arxiv.org/abs/1810.04805; there a norm follows each half
    of a block, here it precedes it.
    """

    vocabulary: int = 30_522
    width: int = 1024
    layers: int = 24
    heads: int = 16

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """[batch, length, width]."""
        return nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)

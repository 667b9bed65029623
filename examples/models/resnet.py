"""Residual networks in Flax Linen, after He et al. 2016.

https://arxiv.org/abs/1512.03385. The classes of the blocks and of the stem are
attributes, so a wrapped class goes in where the plain one stood:
`ResNet(block=jaxact.compress(Block))`. To wrap a whole network:
`jaxact.compress(ResNet)(...)`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from models.scanned import scanned


def layers(dtype: Any, train: bool) -> tuple[Any, Any]:
    """The convolution and the norm that blocks are made of."""
    conv = functools.partial(nn.Conv, use_bias=False, dtype=dtype)
    norm = functools.partial(
        nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=dtype
    )
    return conv, norm


def joined(x: jax.Array, y: jax.Array, stride: int, conv: Any, norm: Any) -> jax.Array:
    """relu(x + y), with x projected to the shape of y where it has another."""
    if x.shape != y.shape:
        x = conv(y.shape[-1], (1, 1), strides=stride)(x)
        x = norm()(x)
    return nn.relu(x + y)


class Block(nn.Module):
    """Two 3x3 convolutions, added to their input [batch, height, width, channels]."""

    channels: int
    stride: int = 1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv, norm = layers(self.dtype, train)
        y = conv(self.channels, (3, 3), strides=self.stride)(x)
        y = nn.relu(norm()(y))
        y = conv(self.channels, (3, 3))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)  # each block starts as identity
        return joined(x, y, self.stride, conv, norm)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, added to their input.

    The last convolution has four times `channels`; the 3x3 one carries the stride. The
    other two have `widening` times `channels` (Zagoruyko and Komodakis 2016,
    arXiv:1605.07146).
    """

    channels: int
    stride: int = 1
    dtype: Any = jnp.bfloat16
    widening: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv, norm = layers(self.dtype, train)
        inner = round(self.widening * self.channels)
        y = nn.relu(norm()(conv(inner, (1, 1))(x)))
        y = conv(inner, (3, 3), strides=self.stride)(y)
        y = nn.relu(norm()(y))
        y = conv(4 * self.channels, (1, 1))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)  # each block starts as identity
        return joined(x, y, self.stride, conv, norm)


class Stem(nn.Module):
    """A 7x7 convolution and a max pool; each halves height and width."""

    channels: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = nn.Conv(self.channels, (7, 7), 2, use_bias=False, dtype=self.dtype)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(conv(x))
        return nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")


class ResNet(nn.Module):
    """Stages of blocks; each stage after the first halves height and width.

    Parameters and the returned logits [batch, num_classes] are float32; everything
    between is computed in `dtype`. `blocks_per_stage` is one number for all stages or
    one for each. Without a `stem`, one 3x3 convolution reads the image. With `scanned`,
    the blocks of a stage after its first one are scanned over.
    """

    num_classes: int
    channels: Sequence[int] = (16, 32, 64)
    blocks_per_stage: int | Sequence[int] = 2
    block: type[nn.Module] = Block
    dtype: Any = jnp.bfloat16
    stem: type[nn.Module] | None = None
    scanned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if self.stem is None:
            x = nn.Conv(self.channels[0], (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
            x = nn.relu(x)
        else:
            x = self.stem(self.channels[0], self.dtype)(x, train)
        blocks = self.blocks_per_stage
        counts = [blocks] * len(self.channels) if isinstance(blocks, int) else blocks
        for stage, (channels, count) in enumerate(
            zip(self.channels, counts, strict=True)
        ):
            for index in range(min(count, 1) if self.scanned else count):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(channels, stride, self.dtype)(x, train)
            if self.scanned and count > 1:
                equal = self.block(channels, 1, self.dtype)
                x = scanned(equal, count - 1, x, train)
        # Not x.mean((1, 2)): fused with the block's bf16 sum and relu, a reduction
        # gives NaN on the CPU in JAX 0.12.0, with or without jaxact.
        x = nn.avg_pool(x, x.shape[1:3])[:, 0, 0]
        return nn.Dense(self.num_classes)(x.astype(jnp.float32))


class ResNet50(ResNet):
    """For images of 224x224: `ResNet50(1000)`."""

    channels: Sequence[int] = (64, 128, 256, 512)
    blocks_per_stage: int | Sequence[int] = (3, 4, 6, 3)
    block: type[nn.Module] = Bottleneck
    stem: type[nn.Module] | None = Stem


class ResNet152(ResNet50):
    """For images of 224x224."""

    blocks_per_stage: int | Sequence[int] = (3, 8, 36, 3)

"""A residual network for small images, in Flax Linen, after He et al. 2016.

https://arxiv.org/abs/1512.03385. The class of its blocks is an attribute, so a wrapped
class goes in where the plain one stood: `ResNet(block=jaxact.compress(Block))`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """Two 3x3 convolutions, added to their input [batch, height, width, channels]."""

    channels: int
    stride: int = 1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        y = conv(self.channels, (3, 3), strides=self.stride)(x)
        y = nn.relu(norm()(y))
        y = conv(self.channels, (3, 3))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)  # each block starts as identity
        if x.shape != y.shape:
            x = conv(self.channels, (1, 1), strides=self.stride)(x)
            x = norm()(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of blocks; each stage after the first halves height and width.

    Parameters and the returned logits [batch, num_classes] are float32; everything
    between is computed in `dtype`.
    """

    num_classes: int
    channels: Sequence[int] = (16, 32, 64)
    blocks_per_stage: int = 2
    block: type[nn.Module] = Block
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.channels[0], (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x)
        for stage, channels in enumerate(self.channels):
            for index in range(self.blocks_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(channels, stride, self.dtype)(x, train)
        # Not x.mean((1, 2)): fused with the block's bf16 sum and relu, a reduction
        # gives NaN on the CPU in JAX 0.12.0, with or without jaxact.
        x = nn.avg_pool(x, x.shape[1:3])[:, 0, 0]
        return nn.Dense(self.num_classes)(x.astype(jnp.float32))

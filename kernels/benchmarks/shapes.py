"""Shapes of activations that training stores, for benchmarks and tests.

Each is one that occurs in the forward pass, largest first in its network. `SMALL` takes
a CPU seconds.
"""

import dataclasses
import math

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """An array of a network, without the array."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Bytes before packing."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


# Batch 64 of 224 x 224 images, channels last; inputs of convolutions and norms.
RESNET50 = (
    Activation("resnet50 stem", (64, 112, 112, 64)),
    Activation("resnet50 stage 1 wide", (64, 56, 56, 256)),
    Activation("resnet50 stage 2 wide", (64, 28, 28, 512)),
    Activation("resnet50 stage 1 narrow", (64, 56, 56, 64)),
    Activation("resnet50 stage 3 wide", (64, 14, 14, 1024)),
    Activation("resnet50 stage 2 narrow", (64, 28, 28, 128)),
    Activation("resnet50 stage 4 wide", (64, 7, 7, 2048)),
    Activation("resnet50 stage 3 narrow", (64, 14, 14, 256)),
    Activation("resnet50 stage 4 narrow", (64, 7, 7, 512)),
)

# Batch 8 of 1024 tokens, width 1024, 16 heads. Rows of the logits need padding.
GPT2_MEDIUM = (
    Activation("gpt2-medium logits", (8, 1024, 50257)),
    Activation("gpt2-medium attention", (8, 16, 1024, 1024)),
    Activation("gpt2-medium hidden", (8, 1024, 4096)),
    Activation("gpt2-medium qkv", (8, 1024, 3072)),
    Activation("gpt2-medium stream", (8, 1024, 1024)),
)

SMALL = (
    Activation("small images", (8, 28, 28, 256)),
    Activation("small stream", (4, 1024, 1024)),
    Activation("small padded", (512, 1000), "float32"),
)

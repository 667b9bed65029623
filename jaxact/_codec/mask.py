"""One bit per element, for residuals that are true or false (ReLU, dropout, where)."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxact._codec.base import Action
from jaxact_kernels import mask


@dataclasses.dataclass(frozen=True)
class Bitmask(Action):
    """Store a boolean array at one bit per element; lossless."""

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        return None if dtype == np.bool_ else f"Bitmask stores bool, not {dtype}"

    def encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool = False
    ) -> jax.Array:
        return mask.encode(x, is_fused=is_fused)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return mask.decode(stored, shape=shape, is_fused=True)

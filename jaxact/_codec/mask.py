"""One bit per element, for residuals that are true or false (ReLU, dropout, where)."""

import dataclasses
import math

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxact._codec.base import Bias, Codec
from jaxact._codec.rows import no_smaller
from jaxact._written_as import written_as
from jaxact_kernels import mask
from jaxact_kernels.index.reference import index_layout


@written_as("Bitmask()")
@dataclasses.dataclass(frozen=True)
class Bitmask(Codec[jax.Array]):
    """Store a boolean array at one bit per element; lossless."""

    bias = Bias.EXACT
    bits = None
    is_differentiable = True  # bools have no derivative to lose

    @property
    def label(self) -> str:
        return "1 bit"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        if dtype != np.bool_:
            return f"Bitmask stores bool, not {dtype}"
        if mask.stored_bytes(shape) < math.prod(shape):
            return None
        return no_smaller(index_layout(shape))

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return mask.encode(x)

    def encode_above(self, x: jax.Array, above: float) -> jax.Array:
        """`encode(x > above)`, for which no booleans are written."""
        return mask.encode(x, above=above)

    def decode(
        self, stored: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return mask.decode(stored, shape=shape, is_fused=True)

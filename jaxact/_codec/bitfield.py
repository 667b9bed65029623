"""A few bits per element, for integers that are known to be small (max-pooling)."""

import dataclasses
import math

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxact._codec.base import Bias, Codec
from jaxact._codec.checks import bits_text
from jaxact._codec.rows import no_smaller
from jaxact_kernels import index
from jaxact_kernels.checks import INTEGERS
from jaxact_kernels.index.reference import index_layout


@dataclasses.dataclass(frozen=True)
class Bitfield(Codec[jax.Array]):
    """Store integers from 0 to 2**width - 1 at `width` bits per element; lossless.

    Others would come back changed. So no rule can ask for it: a plan does, for integers
    that the program itself bounds.

    Attributes:
      width: 1 to 8.
    """

    width: int

    bias = Bias.EXACT
    bits = None
    is_differentiable = True  # integers have no derivative to lose

    @property
    def label(self) -> str:
        return bits_text(self.width)

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        if np.dtype(dtype).name not in INTEGERS:
            return f"Bitfield stores integers with up to 32 bits, not {dtype}"
        exact = math.prod(shape) * np.dtype(dtype).itemsize
        if index.stored_bytes(shape, bits=self.width) < exact:
            return None
        return no_smaller(index_layout(shape))

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return index.encode(x, bits=self.width)

    def decode(
        self, stored: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return index.decode(
            stored, shape=shape, dtype=dtype, bits=self.width, is_fused=True
        )

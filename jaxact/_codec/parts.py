"""Complex numbers through a codec for real ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact._codec.around import AroundCodec
from jaxact._codec.base import Codec, Stored


@dataclasses.dataclass(frozen=True)
class Parts(AroundCodec[Stored]):
    """Store real and imaginary parts by `codec`, on a new axis before the last.

    A spectrum (Hyena, FNO), the states of a recurrence (LRU, S5). Products are linear
    in both parts, so the gradient is unbiased where that of a real residual is.

    Attributes:
      codec: for real arrays.
    """

    codec: Codec[Stored]

    @property
    def label(self) -> str:
        return self.codec.label

    def encode(self, x: jax.Array, seed: jax.Array) -> Stored:
        return self.codec.encode(_parts(x), seed)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Stored:
        return self.codec.encode_fused(_parts(x), seed)

    def decode(
        self, stored: Stored, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        parts = self.codec.decode(stored, _shape(shape), _part_dtype(dtype))
        real, imaginary = (lax.index_in_dim(parts, i, -2, False) for i in range(2))
        return lax.complex(real, imaginary).reshape(shape)

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return f"{type(self).__name__} stores complex numbers, not {dtype}"
        return self.codec.declines(_shape(shape), _part_dtype(dtype))

    def keep(self, stored: Stored) -> Stored:
        return self.codec.keep(stored)

    def fetch(self, kept: Stored) -> Stored:
        return self.codec.fetch(kept)


def for_complex(codec: Codec[Any]) -> Codec[Any]:
    """A codec for complex arrays by one for real arrays, inside those around it."""
    if isinstance(codec, AroundCodec):
        around: Any = codec
        return dataclasses.replace(around, codec=for_complex(codec.codec))
    return Parts(codec)


def _parts(x: jax.Array) -> jax.Array:
    x = jnp.atleast_1d(x)
    return jnp.stack([x.real, x.imag], -2)


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array's parts."""
    *lead, last = shape or (1,)
    return (*lead, 2, last)


def _part_dtype(dtype: DTypeLike) -> np.dtype:
    return np.finfo(dtype).dtype

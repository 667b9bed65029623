"""Group-wise integers with stochastic rounding (ActNN, Chen et al. 2021)."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxact._codec import wide
from jaxact._codec.base import Bias, Codec
from jaxact._codec.checks import bits_text, checked_bits, checked_group_size
from jaxact._codec.rows import short_rows
from jaxact._codec.wide import Wide
from jaxact._written_as import written_as
from jaxact_kernels import affine
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization


@written_as("Quantize(4)")
@dataclasses.dataclass(frozen=True)
class Quantize(Codec[affine.Stored | Wide[affine.Stored]]):
    """Store groups along the last axis as value ~ zero point + scale * code.

    Codes are integers with `bits` bits. With stochastic rounding the decoded value's
    mean is the encoded value, and its variance is scale^2 f (1 - f), f being the
    fractional code (ActNN, Chen et al. 2021, arXiv:2104.14129, eq. 6). Constant groups,
    and zeros at a group's minimum, come back exactly. A group of float64 elements also
    keeps its minimum and a power of two, 16 bytes: its width alone sets the noise,
    whatever its magnitude.

    Attributes:
      bits: per element, 1 to 8.
      group_size: elements that share a scale and a zero point (32 bits together); a
        multiple of 32.
      stochastic: round at random (unbiased), not to nearest.

    Raises:
      ValueError: bits or group_size out of range, or not an integer.
      TypeError: stochastic is not a bool.
    """

    bits: int = 4
    group_size: int = 256
    stochastic: bool = True

    is_free_of_axes = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "bits", checked_bits(name, self.bits))
        group_size = checked_group_size(name, self.group_size)
        object.__setattr__(self, "group_size", group_size)
        if not isinstance(self.stochastic, bool | np.bool_):
            raise TypeError(
                f"{name}(stochastic={self.stochastic!r}): True (unbiased) or False (to "
                "nearest) is required."
            )
        object.__setattr__(self, "stochastic", bool(self.stochastic))

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return super().declines(shape, dtype) or short_rows(self, shape, dtype)

    @property
    def bias(self) -> Bias:
        return Bias.UNBIASED if self.stochastic else Bias.BIASED

    @property
    def label(self) -> str:
        bits = bits_text(self.bits)
        return bits if self.stochastic else f"{bits}, nearest"

    def encode(
        self, x: jax.Array, seed: jax.Array
    ) -> affine.Stored | Wide[affine.Stored]:
        return self._encode(x, seed, is_fused=False)

    def encode_fused(
        self, x: jax.Array, seed: jax.Array
    ) -> affine.Stored | Wide[affine.Stored]:
        return self._encode(x, seed, is_fused=True)

    def encode_normalized(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization,
        coefficients: Sequence[jax.Array],
    ) -> affine.Stored | Wide[affine.Stored]:
        if wide.is_needed(x.dtype):
            return super().encode_normalized(x, seed, normalization, coefficients)
        operation = self._operation(x, normalization=normalization)
        return run(operation, x, seed, *coefficients)

    def _encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool
    ) -> affine.Stored | Wide[affine.Stored]:
        def pack(x: jax.Array) -> affine.Stored:
            return run(self._operation(x, is_fused=is_fused), x, seed)

        if wide.is_needed(x.dtype):
            return wide.encode(x, self.group_size, pack)
        return pack(x)

    def _operation(
        self,
        x: jax.Array,
        *,
        is_fused: bool = False,
        normalization: Normalization | None = None,
    ) -> affine.Encode:
        options = (self.bits, self.group_size, self.stochastic)
        how = {"is_fused": is_fused, "normalization": normalization}
        return affine.Encode(x.shape, x.dtype, *options, **how)

    def decode(
        self,
        stored: affine.Stored | Wide[affine.Stored],
        shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> jax.Array:
        def unpack(stored: affine.Stored, dtype: np.dtype) -> jax.Array:
            options = (self.bits, self.group_size)
            return run(affine.Decode(shape, dtype, *options, is_fused=True), stored)

        if isinstance(stored, Wide):
            return wide.decode(stored, shape, dtype, self.group_size, unpack)
        return unpack(stored, np.dtype(dtype))

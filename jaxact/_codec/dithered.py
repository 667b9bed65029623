"""Group-wise integers whose rounding noise the decoder takes off again."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

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


class Stored(NamedTuple):
    """An array as `Dithered` stores it.

    Attributes:
      codes: as `Quantize` stores them.
      seed: `uint32[]`, from which the decoder draws the noise again.
    """

    codes: affine.Stored
    seed: jax.Array


@written_as("Dithered(4)")
@dataclasses.dataclass(frozen=True)
class Dithered(Codec[Stored | Wide[Stored]]):
    """Store like `Quantize`, and subtract the noise in decoding (subtractive dither).

    The words are those of `Quantize(bits, group_size)`, and the seed of their noise is
    stored beside them, 4 bytes an array. The decoder draws the noise again and takes it
    off (Roberts 1962; Gray and Stockham 1993, "Dithered quantizers", IEEE Trans.
    Information Theory 39). The error is then uniform within half a scale, whatever the
    value: the mean is the encoded value and the variance scale^2 / 12, half as much as
    `Quantize` has on average over the places of values between two codes. Values that
    sit on codes, such as zeros at a group's minimum or data with two values, have no
    noise in `Quantize` and that much here. Constant groups come back exactly, and NaN
    and infinities do as in `Quantize`.

    Attributes:
      bits: per element, 1 to 8.
      group_size: elements that share a scale and a zero point (32 bits together); a
        multiple of 32.

    Raises:
      ValueError: bits or group_size out of range, or not an integer.
    """

    bits: int = 4
    group_size: int = 256

    bias = Bias.UNBIASED
    is_free_of_axes = True
    decodes_to_memory = True  # a kernel, as fewer readers draw the noise again

    def __post_init__(self) -> None:
        bits = checked_bits("Dithered", self.bits)
        object.__setattr__(self, "bits", bits)
        group_size = checked_group_size("Dithered", self.group_size)
        object.__setattr__(self, "group_size", group_size)

    @property
    def label(self) -> str:
        return f"{bits_text(self.bits)}, dithered"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return super().declines(shape, dtype) or short_rows(self, shape, dtype)

    def encode(self, x: jax.Array, seed: jax.Array) -> Stored | Wide[Stored]:
        return self._encode(x, seed, is_fused=False)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Stored | Wide[Stored]:
        return self._encode(x, seed, is_fused=True)

    def encode_normalized(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization,
        coefficients: Sequence[jax.Array],
    ) -> Stored | Wide[Stored]:
        if wide.is_needed(x.dtype):
            return super().encode_normalized(x, seed, normalization, coefficients)
        operation = self._operation(x, normalization=normalization)
        return Stored(run(operation, x, seed, *coefficients), seed)

    def _encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool
    ) -> Stored | Wide[Stored]:
        def pack(x: jax.Array) -> Stored:
            return Stored(run(self._operation(x, is_fused=is_fused), x, seed), seed)

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
        options = (self.bits, self.group_size)
        how = {"is_fused": is_fused, "normalization": normalization}
        return affine.Encode(x.shape, x.dtype, *options, is_dithered=True, **how)

    def decode(
        self, stored: Stored | Wide[Stored], shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        def unpack(stored: Stored, dtype: np.dtype) -> jax.Array:
            options = (self.bits, self.group_size)
            operation = affine.Decode(shape, dtype, *options, is_dithered=True)
            return run(operation, stored.codes, stored.seed)

        if isinstance(stored, Wide):
            return wide.decode(stored, shape, dtype, self.group_size, unpack)
        return unpack(stored, np.dtype(dtype))

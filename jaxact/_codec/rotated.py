"""Group-wise integers after a random rotation (DRIVE and EDEN, Vargaftik et al.)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxact._codec import wide
from jaxact._codec.base import Bias, Codec
from jaxact._codec.checks import bits_text, checked_group_size, checked_int
from jaxact._codec.rows import short_rows
from jaxact._codec.wide import Wide
from jaxact._written_as import written_as
from jaxact_kernels import rotated
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization

Stored = rotated.Stored


@written_as("Rotated(2)")
@dataclasses.dataclass(frozen=True)
class Rotated(Codec[Stored | Wide[Stored]]):
    """Rotate groups at random, then round to the levels that are best for a normal.

    A group's mean is taken off; two rounds of random signs and a Hadamard transform
    spread every element over all of the group; each rotated element is rounded to the
    nearest level (Lloyd-Max at 1 to 4 bits, even steps above); and a scale makes the
    result unbiased (DRIVE, Vargaftik et al. 2021, arXiv:2105.08339; EDEN, 2022,
    arXiv:2108.08842). The squared error over seeds is 0.57, 0.13, 0.036 and 0.0096 of
    the squared distance from the mean at 1 to 4 bits, whatever the values are: 12, 4.5,
    3.1 and 2.5 times less than `Quantize` has on normal values, and more where a few
    values are large. An element takes as many bits as with `Quantize`, and an array 4
    bytes more for the seed.

    At half a bit eight rotated elements have a code of four bits: which is largest, and
    its sign. The squared error is 1.52 of the squared distance. That is for residuals
    to which the gradient is not sensitive: bits saved there lower others' noise
    (`allocate`). A group of 32 has a bit an element even so.

    It errs more than `Quantize` or `Dithered` on data with two values, on derivatives
    that lie between two bounds, and from 7 bits: `Adaptive` chooses for each group.

    Unbiased over rotations: the mean over seeds is the encoded value up to a squared
    bias below 5e-4 of the squared error on the groups that the tests draw, and 2e-3 on
    one with a single value that is not zero; none was seen on residuals of trained
    networks (`quantizers.py` in the benchmarks), where 1e-3 would be. Zeros are not
    exact. Constant groups are, and NaN and infinities do as in `Quantize`.

    Attributes:
      bits: per element, 1 to 8, or 0.5.
      group_size: elements that are rotated together and share a mean and a scale (32
        bits together); a multiple of 32, at most 4096. Powers of two are fastest.

    Raises:
      ValueError: bits or group_size out of range, or not an integer.
    """

    bits: float = 2
    group_size: int = 256

    bias = Bias.OVER_ROTATIONS
    is_free_of_axes = True
    decodes_to_memory = True
    _is_adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        is_float = isinstance(self.bits, float | np.floating)
        is_half = is_float and self.bits == rotated.HALF_BIT
        bits = rotated.HALF_BIT if is_half else self._checked_bits()
        object.__setattr__(self, "bits", bits)
        group_size = checked_group_size(name, self.group_size)
        if group_size > rotated.MOST_PER_GROUP:
            raise ValueError(
                f"{name}(group_size={self.group_size!r}): at most "
                f"{rotated.MOST_PER_GROUP} elements are rotated together. Use 256."
            )
        object.__setattr__(self, "group_size", group_size)

    def _checked_bits(self) -> int:
        return checked_int(
            self.bits,
            range(1, 9),
            f"{type(self).__name__}(bits={self.bits!r}): 0.5, or an integer from 1 to "
            "8, is required.",
        )

    @property
    def label(self) -> str:
        return f"{bits_text(self.bits)}, {type(self).__name__.lower()}"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return super().declines(shape, dtype) or short_rows(self, shape, dtype)

    @property
    def _options(self) -> tuple[float, int, bool]:
        is_adaptive = self._is_adaptive and self.bits >= 1
        return self.bits, self.group_size, is_adaptive

    def encode(self, x: jax.Array, seed: jax.Array) -> Stored | Wide[Stored]:
        if wide.is_needed(x.dtype):
            pack = functools.partial(self._encode, seed=seed)
            return wide.encode(x, self.group_size, pack)
        return self._encode(x, seed)

    def encode_normalized(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization,
        coefficients: Sequence[jax.Array],
    ) -> Stored | Wide[Stored]:
        if wide.is_needed(x.dtype):
            return super().encode_normalized(x, seed, normalization, coefficients)
        return self._encode(x, seed, normalization, coefficients)

    def _encode(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization | None = None,
        coefficients: Sequence[jax.Array] = (),
    ) -> Stored:
        options = (x.shape, x.dtype, *self._options)
        operation = rotated.Encode(*options, normalization=normalization)
        words, metadata = run(operation, x, seed, *coefficients)
        return Stored(words, metadata, seed)

    def decode(
        self, stored: Stored | Wide[Stored], shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        def unpack(stored: Stored, dtype: np.dtype) -> jax.Array:
            return run(rotated.Decode(shape, dtype, *self._options), stored)

        if isinstance(stored, Wide):
            return wide.decode(stored, shape, dtype, self.group_size, unpack)
        return unpack(stored, np.dtype(dtype))


@written_as("Adaptive(2)")
@dataclasses.dataclass(frozen=True)
class Adaptive(Rotated):
    """Store each group in the way that is expected to err least at these bits.

    The ways are those of `Rotated`, `Dithered` and `Quantize`. Which one a group has is
    decided from its values, before any noise is drawn: rotation for most data, dither
    for values that fill the range between two bounds, stochastic rounding where values
    sit on codes, as zeros after a ReLU and data with two values do. These zeros then
    come back exactly. Two of the 32 bits that a group has beside its codes say which
    way it is: nothing is stored more than by `Rotated`. At half a bit there is a single
    way, rotation.

    The bias is that of `Rotated` at most.

    Attributes:
      bits: per element, 1 to 8, or 0.5.
      group_size: elements that are stored in one way and share 32 bits; a multiple of
        32, at most 4096. Powers of two are fastest.

    Raises:
      ValueError: bits or group_size out of range, or not an integer.
    """

    _is_adaptive: ClassVar[bool] = True

"""Means over blocks at high precision, the remainder at few bits (DIVISION, 2023)."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact._codec.affine import Quantize
from jaxact._codec.base import Bias, Codec
from jaxact._codec.blocks import Blocks
from jaxact._codec.checks import checked_bits, checked_group_size, checked_int
from jaxact._codec.wide import Wide
from jaxact._written_as import written_as
from jaxact_kernels import affine
from jaxact_kernels.affine.reference import extremes, split
from jaxact_kernels.layout import Layout, layout_of

# Larger means are not stored: x - mean could overflow where x is near the largest
# float32. Below, it rounds to x there.
LARGEST_MEAN = np.float32(2.0**60)


class Stored(NamedTuple):
    """An array as `DualPrecision` stores it.

    Attributes:
      mean: `bfloat16`, one for each block and index along the other axes; None if there
        is no axis to average over.
      remainder: the array less its mean, as `Quantize` stores it.
    """

    mean: jax.Array | None
    remainder: affine.Stored | Wide


@written_as("DualPrecision(2)")
@dataclasses.dataclass(frozen=True)
class DualPrecision(Codec[Stored]):
    """Store means over blocks in bfloat16, and the remainder like `Quantize(bits)`.

    The two precisions in DIVISION (Wang et al. 2023, "Division of Memory: Training deep
    neural networks with low- and high-frequency activations", ICML): a block's mean is
    its low frequency. With k axes cut into whole blocks an element takes ::

        bits + 16 / block**k + 32 / group bits,

    a group being `group_size` consecutive elements along the last axis, or all of it.

    A mean is stored only where it pays, elsewhere 0 is: the elements there come back as
    from `Quantize(bits)`, and zeros at a group's minimum, as after a ReLU, exactly.
    Means pay if they lower the sum, over groups, of the squared range times the number
    of elements that get noise, which such zeros do not. This is decided for a block's
    means in one group together; where groups and blocks cross, for the least segment of
    a row that holds both whole.

    The decoded value's mean is the encoded value, up to float32 rounding, because the
    remainder is taken from the stored mean. Where a block's mean is not finite none is
    stored; apart from that NaN and infinities do as in `Quantize`.

    Differences from the paper: true means for partial blocks at the border; groups
    along the last axis, not whole maps; zeros; metadata that is rounded before
    encoding.

    Attributes:
      bits: per element of the remainder, 1 to 8.
      block: positions along each axis that share a mean, at least 2.
      axes: to average over; None: all but the first (samples) and the last (channels).
        For channels first pass (2, 3). Axes that an array does not have are left out.
        Without any, or where blocks have fewer than `block` elements and means would
        cost more than 16 / block bits, this is `Quantize(bits)`.
      group_size: elements that share a scale and a zero point (32 bits together).

    Raises:
      ValueError: a number out of range, or `axes` that is no tuple of integers.
    """

    bits: int = 2
    block: int = 8
    axes: tuple[int, ...] | None = None
    group_size: int = 256

    bias = Bias.UNBIASED
    is_float32 = True

    def __post_init__(self) -> None:
        bits = checked_bits("DualPrecision", self.bits)
        object.__setattr__(self, "bits", bits)
        group_size = checked_group_size("DualPrecision", self.group_size)
        object.__setattr__(self, "group_size", group_size)
        block = checked_int(
            self.block,
            range(2, 1 << 31),
            f"DualPrecision(block={self.block!r}): an integer of at least 2 is "
            "required, as the mean of one element saves nothing. Use 8, or "
            "Quantize(bits) to store no means.",
        )
        object.__setattr__(self, "block", block)
        if self.axes is None:
            return
        message = (
            f"DualPrecision(axes={self.axes!r}): a tuple of axes is required, such "
            "as (2, 3) for images with channels first; or None for all axes but "
            "the first and the last."
        )
        if not isinstance(self.axes, tuple | list):
            raise ValueError(message)
        numbers = range(-(1 << 31), 1 << 31)
        axes = tuple(checked_int(axis, numbers, message) for axis in self.axes)
        object.__setattr__(self, "axes", axes)

    @property
    def label(self) -> str:
        return f"{self._quantize.label} and means"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return super().declines(shape, dtype) or self._quantize.declines(shape, dtype)

    def encode(self, x: jax.Array, seed: jax.Array) -> Stored:
        return self._encode(x, seed, is_fused=False)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Stored:
        return self._encode(x, seed, is_fused=True)

    def _encode(self, x: jax.Array, seed: jax.Array, is_fused: bool) -> Stored:
        blocks = self._blocks(x.shape)
        if blocks is None:
            quantize = self._quantize
            encode = quantize.encode_fused if is_fused else quantize.encode
            return Stored(None, encode(x, seed))
        layout = layout_of(x.shape, self.group_size)
        # First: means and groups are then cut over the same devices.
        x = layout.with_whole_groups(x).astype(np.float32)
        mean = _rounded_mean(x, blocks)
        pays = _pays(x, x - blocks.spread(mean), blocks, layout)
        mean = jnp.where(pays, mean, np.float32(0))
        # Elementwise operations compute the remainder, so XLA fuses them with its
        # encoding.
        remainder = self._quantize.encode_fused(x - blocks.spread(mean), seed)
        return Stored(mean.astype(jnp.bfloat16), remainder)

    def decode(
        self, stored: Stored, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        blocks = self._blocks(shape)
        if blocks is None or stored.mean is None:
            return self._quantize.decode(stored.remainder, shape, dtype)
        remainder = self._quantize.decode(stored.remainder, shape, np.float32)
        x = remainder + blocks.spread(stored.mean.astype(np.float32))
        # A step beyond the largest element may be beyond the largest number.
        limit = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
        return lax.clamp(np.float32(-limit), x, np.float32(limit)).astype(dtype)

    @property
    def _quantize(self) -> Quantize:
        return Quantize(self.bits, self.group_size)

    def _blocks(self, shape: tuple[int, ...]) -> Blocks | None:
        """The blocks that an array is averaged over; None if it is not."""
        rank = len(shape)
        wanted = range(1, rank - 1) if self.axes is None else self.axes
        axes = sorted({axis % rank for axis in wanted if -rank <= axis < rank})
        if not axes or 0 in shape:
            return None
        blocks = Blocks(tuple(shape), tuple(axes), self.block)
        return blocks if blocks.most_elements >= self.block else None


def _rounded_mean(x: jax.Array, blocks: Blocks) -> jax.Array:
    mean = blocks.mean(x)
    mean = jnp.where(abs(mean) < LARGEST_MEAN, mean, np.float32(0))  # NaN too
    # Not a cast there and back, which XLA may leave out.
    return lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=7)


def _pays(
    x: jax.Array, remainder: jax.Array, blocks: Blocks, layout: Layout
) -> jax.Array:
    """For each mean, whether storing it lowers the noise.

    The variance of a rounded element is on average range**2 / (6 (2**bits - 1)**2).
    A square that overflows, or is NaN, compares as if it did not.
    """
    real = np.full(layout.num_groups, layout.group, np.float32)
    real[-1:] -= layout.padding
    real = np.broadcast_to(real, (*(1 for _ in layout.lead), layout.num_groups))
    nonzero = layout.split((x != 0).astype(np.float32), 0).sum(-1)
    low, high = extremes(split(x, layout), x.dtype)
    without = jnp.square(high - low) * jnp.where(low == 0, nonzero, real)
    low, high = extremes(split(remainder, layout), x.dtype)
    with_mean = jnp.square(high - low) * real
    lead = [axis for axis in blocks.axes if axis < len(layout.lead)]
    outer = Blocks(without.shape, tuple(lead), blocks.width)
    groups, means = _segment(blocks, layout)
    last = len(layout.lead)
    row = Blocks((*outer.counts[:-1], layout.num_groups), (last,), groups)
    pays = row.sum(outer.sum(with_mean)) < row.sum(outer.sum(without))
    row_of_means = math.prod(blocks.counts[last:])
    spread = Blocks((*outer.counts[:-1], row_of_means), (last,), means).spread(pays)
    return spread.reshape(blocks.counts)


def _segment(blocks: Blocks, layout: Layout) -> tuple[int, int]:
    """Groups and means in the least part of a row with whole groups and whole blocks.

    The last part of a row may be shorter.
    """
    shape, first = blocks.shape, len(layout.lead)
    inside = [axis for axis in blocks.axes if axis >= first]
    elements = means = 1
    if inside:
        axis = inside[0]
        width, size = min(blocks.width, shape[axis]), shape[axis]
        # Where blocks do not fill an axis, the next row of it starts anew.
        is_regular = axis == first or size % width == 0
        elements = math.prod(shape[axis + 1 :]) * (width if is_regular else size)
        means = math.prod(blocks.counts[axis + 1 :])
        means *= 1 if is_regular else blocks.counts[axis]
    segment = math.lcm(elements, layout.group)
    return segment // layout.group, segment // elements * means

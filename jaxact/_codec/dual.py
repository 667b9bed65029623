"""Averages over blocks at high precision, the rest at few bits (DIVISION, 2023)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact._codec.affine import Quantize
from jaxact._codec.base import Action
from jaxact._codec.blocks import Blocks
from jaxact_kernels import affine
from jaxact_kernels.affine.reference import extremes, split
from jaxact_kernels.layout import Layout, layout_of

# Larger means are not stored: x - mean could overflow where x is near the largest
# float32. Below, it rounds to x there.
LARGEST_MEAN = np.float32(2.0**60)


class Stored(NamedTuple):
    """What is stored of an array.

    Attributes:
      mean: `bfloat16`, one for each block and index of the other axes; None if there is
        no axis to average over.
      rest: the array less its mean, in the affine format.
    """

    mean: jax.Array | None
    rest: affine.Stored


@dataclasses.dataclass(frozen=True)
class DualPrecision(Action):
    """Store means over blocks in bfloat16, and what is left like `Quantize(bits)`.

    The two precisions of DIVISION (Wang et al. 2023, "Division of Memory: Training deep
    neural networks with low- and high-frequency activations", ICML): a block's mean is
    its low frequency. With k axes of whole blocks an element takes ::

        bits + 16 / block**k + 32 / group bits,

    the group being `group_size` consecutive elements of the last axis, or all of it.

    A mean is stored only where it pays, elsewhere 0 is: the elements there come back as
    from `Quantize(bits)`, and zeros at a group's minimum, as of a ReLU, exactly. Means
    pay if they lower the sum, over groups, of the squared range times the number of
    elements that get noise, which such zeros do not. This is decided for a block's
    means of one group together; where groups and blocks cross, for the least segment of
    a row that holds both whole.

    The decoded value's mean is the encoded value, but for float32 rounding, because the
    rest is what the stored mean leaves. Where the mean of a block is not finite none is
    stored; apart from that NaN and infinities do as in `Quantize`.

    Differences from the paper: true means of partial blocks at the border; groups of
    the last axis, not of whole maps; zeros; metadata that is rounded before encoding.

    Attributes:
      bits: per element of the rest, 1 to 8.
      block: positions along each axis that share a mean, at least 2.
      axes: to average over; None: all but the first (samples) and the last (channels).
        For channels first pass (2, 3). Axes that an array does not have are left out.
        Without any, or where blocks have fewer than `block` elements and means would
        cost more than 16 / block bits, this is `Quantize(bits)`.
      group_size: elements that share a scale and a zero point (32 bits together).
    """

    bits: int = 2
    block: int = 8
    axes: tuple[int, ...] | None = None
    group_size: int = 256

    def __post_init__(self) -> None:
        Quantize(self.bits, self.group_size)  # validates
        if not _is_int(self.block) or self.block < 2:
            raise ValueError(
                f"DualPrecision(block={self.block!r}): an integer of at least 2 is "
                "required, as the mean of one element saves nothing. Use 8, or "
                "Quantize(bits) to store no means."
            )
        if self.axes is None:
            return
        if not isinstance(self.axes, tuple | list) or not all(map(_is_int, self.axes)):
            raise ValueError(
                f"DualPrecision(axes={self.axes!r}): a tuple of axes is required, such "
                "as (2, 3) for images with channels first; or None for all axes but "
                "the first and the last."
            )
        object.__setattr__(self, "axes", tuple(self.axes))

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        real = jnp.issubdtype(dtype, jnp.floating)
        return None if real else f"DualPrecision stores real floats, not {dtype}"

    def encode(self, x: jax.Array, seed: jax.Array, is_fused: bool = False) -> Stored:
        blocks = self._blocks(x.shape)
        if blocks is None:
            return Stored(None, self._quantize.encode(x, seed, is_fused))
        layout = layout_of(x.shape, self.group_size)
        x = x.astype(np.float32)
        mean = _rounded_mean(x, blocks)
        pays = _pays(x, x - blocks.spread(mean), blocks, layout)
        mean = jnp.where(pays, mean, np.float32(0))
        # Elementwise operations compute the rest, so XLA fuses them with its encoding.
        rest = self._quantize.encode(x - blocks.spread(mean), seed, is_fused=True)
        return Stored(mean.astype(jnp.bfloat16), rest)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        blocks = self._blocks(shape)
        if blocks is None:
            return self._quantize.decode(stored.rest, shape, dtype)
        rest = self._quantize.decode(stored.rest, shape, np.float32)
        x = rest + blocks.spread(stored.mean.astype(np.float32))
        # A step beyond the largest element may be beyond the largest number.
        limit = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
        return lax.clamp(np.float32(-limit), x, np.float32(limit)).astype(dtype)

    @property
    def _quantize(self) -> Quantize:
        return Quantize(self.bits, self.group_size)

    def _blocks(self, shape: tuple[int, ...]) -> Blocks | None:
        """How an array is averaged, if it is."""
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


def _pays(x: jax.Array, rest: jax.Array, blocks: Blocks, layout: Layout) -> jax.Array:
    """Whether storing a mean lowers the noise, for each mean.

    The variance of a rounded element is on average range**2 / (6 (2**bits - 1)**2).
    Squares that overflow, or of a NaN, compare as if it did not.
    """
    real = np.full(layout.num_groups, layout.group, np.float32)
    real[-1:] -= layout.padding
    real = np.broadcast_to(real, (*(1 for _ in layout.lead), layout.num_groups))
    nonzero = layout.split((x != 0).astype(np.float32), 0).sum(-1)
    low, high = extremes(split(x, layout), x.dtype)
    without = jnp.square(high - low) * jnp.where(low == 0, nonzero, real)
    low, high = extremes(split(rest, layout), x.dtype)
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
    """The least part of a row with whole groups and whole blocks: groups, means in it.

    The rest of a row at its end may be less.
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

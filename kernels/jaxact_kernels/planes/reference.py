"""The planes format, in plain JAX: affine codes with a width for each sample.

A sample is an index along the first axis; an array with fewer than two axes is one
sample. Its codes and metadata are as in the affine format with the sample's own width,
1 to 8 bits, and the contracts in `affine.reference` hold for it. New is that widths
depend on the data while every shape is static: a shard's samples together have
`floor(bits * samples)` bits an element, and each such bit is a row of words, a *plane*,
which holds one bit from every element in one sample.

Widths are ActNN's (Chen et al. 2021, "ActNN: Reducing Training Memory Footprint via
2-Bit Activation Compressed Training", arXiv:2104.14129, section 4.2): they minimize

    sum over samples of C / (2**b - 1)**2,    C = sum over groups of range**2,

to which the variance in a weight's gradient is proportional. There C also holds the
squared norm of the sample's output gradient, which is not known in the forward pass;
its mean over the batch stands for it, a common factor, and drops out. The sum is convex
in every b, so taking the largest decreases, one bit at a time, reaches the minimum.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import words
from jaxact_kernels.affine import reference as affine_reference
from jaxact_kernels.explicit import with_whole_parts
from jaxact_kernels.layout import Layout, layout_of

MAX_BITS = words.MAX_BITS
BIT = np.arange(MAX_BITS, dtype=np.uint32).reshape(1, 1, MAX_BITS)
# log2 of the decrease in 1 / (2**b - 1)**2 that one more bit brings, b = 1 .. 7.
_ERROR = (2.0 ** np.arange(1, MAX_BITS + 1) - 1) ** -2
LOG2_GAIN = np.log2(_ERROR[:-1] - _ERROR[1:]).astype(np.float32)
# Stands for log2(0), so that equal samples share bits: no real sum is so small.
NO_RANGE = np.float32(-1024)
# Products such as 1.15 * 100 come out just below the integer.
ROUNDING = 1e-6


class Stored(NamedTuple):
    """An array in the planes format.

    Invariants: `lead`, `num_groups` and `group` are those of `planes_layout(shape,
    group_size)`; bits over a shard's samples add up to its planes; padding has code 0.

    Attributes:
        words: `uint32[shards, num_planes, *lead[1:], num_groups, group / 32]`. The
            planes for a sample, lowest bit first, follow those for the one before.
        metadata: `uint32[*lead, num_groups]`, as in the affine format.
        bits: `uint8[lead[0]]`, 1 to 8.
    """

    words: jax.Array
    metadata: jax.Array
    bits: jax.Array


def encode(
    x: jax.Array, seed: jax.Array, *, bits: float, group_size: int, shards: int
) -> Stored:
    """See `jaxact_kernels.planes.encode`."""
    layout = planes_layout(x.shape, group_size)
    shards, num_planes = budget(layout, bits, shards)
    groups = affine_reference.split(x, layout)
    summary = affine_reference.summarize(groups, layout, x.dtype)
    lo, hi, _ = summary
    sensitivity = with_whole_parts(log2_sensitivity(lo, hi), shards)
    sensitivity = sensitivity.reshape(shards, layout.lead[0] // shards)
    sample_bits = allocate(sensitivity, num_planes)
    widths = sample_bits.reshape(layout.lead[:1])
    per_group = lax.broadcast_in_dim(widths, lo.shape, (0,))
    codes, metadata = affine_reference.quantize(
        groups, summary, seed, layout, x.dtype, per_group
    )
    packed = with_whole_parts(words.pack(codes, MAX_BITS), shards)
    planes = jnp.stack(words.cut_planes(packed), 1)
    planes = planes.reshape(*sample_bits.shape, *planes.shape[1:])
    # Not one axis for both: where the array is sharded, none of its axes is flattened.
    index = _stored_planes(sample_bits, num_planes)
    chosen = _take(planes, index // MAX_BITS, index % MAX_BITS)
    return Stored(chosen, metadata, widths.astype(np.uint8))


def decode(
    stored: Stored, *, shape: tuple[int, ...], dtype: DTypeLike, group_size: int
) -> jax.Array:
    """See `jaxact_kernels.planes.decode`."""
    layout = planes_layout(shape, group_size)
    shards, num_planes, *row = stored.words.shape
    if num_planes == 0:
        return jnp.zeros(shape, dtype)
    num_samples = layout.lead[0] // shards
    sample_bits = stored.bits.astype(np.uint32).reshape(shards, num_samples, 1)
    is_stored = sample_bits > BIT
    first = lax.cumsum(sample_bits, 1) - sample_bits
    index = jnp.where(is_stored, first + BIT, np.uint32(0))
    planes = _take(stored.words, index)
    is_stored = is_stored.reshape(*is_stored.shape, *(1 for _ in row))
    planes = jnp.where(is_stored, planes, np.uint32(0))
    planes = planes.reshape(layout.lead[0], *planes.shape[2:])
    packed = words.join_planes([planes[:, i] for i in range(MAX_BITS)])
    # Without the barrier XLA joins them once for each code (12.8 Mi float32 on a CPU:
    # 221 ms, not 155, jax 0.12); with and without it takes a byte an element.
    packed = lax.optimization_barrier(packed)
    codes = words.unpack_slots(packed, MAX_BITS)
    return layout.join(
        affine_reference.dequantize(codes, stored.metadata, dtype), shape
    )


def planes_layout(shape: tuple[int, ...], group_size: int) -> Layout:
    """Lay groups over an array, whose first axis is samples."""
    return layout_of(shape if len(shape) > 1 else (1, math.prod(shape)), group_size)


def budget(layout: Layout, bits: float, shards: int) -> tuple[int, int]:
    """Shards, one if they do not divide the samples, and planes for each."""
    shards = 1 if layout.lead[0] % shards else shards
    return shards, math.floor(bits * (layout.lead[0] // shards) + ROUNDING)


def log2_sensitivity(lo: jax.Array, hi: jax.Array) -> jax.Array:
    """log2 of each sample's sum over squared ranges, `float32[samples]`.

    From half ranges, over the largest, so that no float32 overflows or vanishes. Where
    a group has a NaN its range counts as 0.
    """
    half_range = hi * np.float32(0.5) - lo * np.float32(0.5)
    half_range = jnp.where(half_range > 0, half_range, np.float32(0))  # NaN too
    axes = tuple(range(1, lo.ndim))
    largest = half_range.max(axes, keepdims=True, initial=0)
    unit = jnp.where(largest > 0, largest, np.float32(1))
    squares = jnp.square(half_range / unit).sum(axes)
    log2 = jnp.log2(squares) + np.float32(2) * jnp.log2(unit.reshape(squares.shape))
    return jnp.where(squares > 0, log2, NO_RANGE)


def allocate(log2_sensitivity: jax.Array, total: int) -> jax.Array:
    """Bits for each sample, `uint32[shards, samples]`, which add up to `total`.

    The first bit goes to every sample, the others to the largest gains; among equal
    gains the lower bit is first, then the first sample.
    """
    shards, num_samples = log2_sensitivity.shape
    gains = log2_sensitivity[:, None, :] + LOG2_GAIN[None, :, None]
    rank = _rank(-gains.reshape(shards, LOG2_GAIN.size * num_samples))
    is_taken = (rank < total - num_samples).reshape(gains.shape)
    return is_taken.sum(1, dtype=np.uint32) + np.uint32(1)


def _stored_planes(sample_bits: jax.Array, num_planes: int) -> jax.Array:
    """Indices, `uint32[shards, num_planes]`, among 8 planes a sample: those stored."""
    is_left_out = sample_bits[:, :, None] <= BIT
    shards, num_samples = sample_bits.shape
    flat = is_left_out.reshape(shards, num_samples * MAX_BITS)
    return _order(flat)[:, :num_planes]


def _order(keys: jax.Array) -> jax.Array:
    """Indices that sort each row; equal keys stay in order."""
    # Added to zeros so that it is sharded like the keys.
    index = lax.broadcasted_iota(np.uint32, keys.shape, 1)
    index = lax.full_like(keys, 0, np.uint32) + index
    return lax.sort((keys, index), dimension=1, num_keys=1, is_stable=True)[1]


def _rank(keys: jax.Array) -> jax.Array:
    """Each key's position among its row's sorted keys."""
    return _order(_order(keys))


@jax.vmap
def _take(x: jax.Array, *indices: jax.Array) -> jax.Array:
    return x.at[indices].get(mode="promise_in_bounds")

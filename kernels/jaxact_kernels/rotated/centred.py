"""Groups around their means, as ordinary numbers and as integers.

Every number that a sum over a group decides is a sum of integers, which is the same in
any order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.affine import group as affine
from jaxact_kernels.affine.group import HIGH_HALF, float_of, pattern
from jaxact_kernels.layout import Layout

MEAN_BITS = 16  # of the fractions that are added up for a mean
MANTISSA = np.uint32(23)  # bits of a float32 below its exponent


class Centred(NamedTuple):
    """Groups around their means, times a power of two that makes numbers ordinary.

    Attributes:
        elements: `float32[*lead, num_groups, group]`, below 8 in size; padding is 0.
        mean: bfloat16 bits in the high half, 0 in the low; of the group as it was.
        exponent: `int32`, of the largest element; its size is below 2**(exponent + 1).
        reach: the largest size among a group's elements, and at least 0.
        is_ordinary: whether a group has no NaN and is not constant.
    """

    elements: jax.Array
    mean: jax.Array
    exponent: jax.Array
    reach: jax.Array
    is_ordinary: jax.Array


def centre(
    groups: jax.Array, ends: tuple[jax.Array, jax.Array], layout: Layout
) -> Centred:
    """Take off each group's mean, rounded to bfloat16.

    Args:
        groups: `float32[*lead, num_groups, group]`.
        ends: each group's least and greatest finite element, NaN where it has a NaN;
            infinities count as these.
    """
    lo, hi = (affine.flush(end) for end in ends)
    is_ordinary = (lo == lo) & (lo != hi)
    lo, hi = (jnp.where(end == end, end, np.float32(0)) for end in (lo, hi))
    x = jnp.where(groups > lo[..., None], groups, lo[..., None])  # NaN too
    x = jnp.where(x < hi[..., None], x, hi[..., None])
    peak = exponent_of(lax.max(abs(lo), abs(hi)), least=-126)
    unit = power_of_two(np.int32(1) - peak)  # the peak is in [2, 4) then
    is_real = layout.is_real()
    scaled = jnp.where(is_real, x * unit[..., None], np.float32(0))
    # Back and forth, so that a mean that is too small to be normal is 0 in both.
    mean = _mean(scaled, layout) * power_of_two(peak - np.int32(1))
    most = affine.largest(np.float32)
    mean = affine.flush(lax.clamp(-most, mean, most))
    offset = mean * unit
    elements = jnp.where(is_real, scaled - offset[..., None], np.float32(0))
    reach = lax.max(abs(hi * unit - offset), abs(lo * unit - offset))
    return Centred(elements, pattern(mean), peak, reach, is_ordinary)


def integer_sizes(x: jax.Array, exponent: jax.Array, bits: int) -> jax.Array:
    """Sizes of elements below 2**(exponent + 1), rounded to `uint32` up to 2**bits."""
    unit = power_of_two(np.int32(bits - 1) - exponent)
    sizes = lax.round(abs(x) * unit[..., None], lax.RoundingMethod.TO_NEAREST_EVEN)
    return sizes.astype(np.int32).astype(np.uint32)


def exponent_of(x: jax.Array, *, least: int) -> jax.Array:
    """The exponent of positive float32, `int32`, at least `least`."""
    exponent = (pattern(x) >> MANTISSA).astype(np.int32) - np.int32(127)
    return lax.max(exponent, np.int32(least))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2 to a power from -127 to 127, exactly; the least is 0."""
    return float_of((exponent + np.int32(127)).astype(np.uint32) << MANTISSA)


def total(integers: jax.Array) -> jax.Array:
    """The sum over each group."""
    zero = np.zeros((), integers.dtype)
    return lax.reduce(integers, zero, lax.add, (integers.ndim - 1,))


def real_elements(layout: Layout) -> np.ndarray:
    """How many elements in each group of a row are no padding, `uint32`."""
    real = np.full(layout.num_groups, layout.group, np.uint32)
    real[-1:] -= np.uint32(layout.padding)
    return real.reshape(*(1 for _ in layout.lead), layout.num_groups)


def _mean(scaled: jax.Array, layout: Layout) -> jax.Array:
    """Means over real elements, rounded to bfloat16."""
    fixed = scaled * np.float32(2.0**MEAN_BITS)
    fixed = lax.round(fixed, lax.RoundingMethod.TO_NEAREST_EVEN).astype(np.int32)
    inverse = (2.0**-MEAN_BITS / real_elements(layout)).astype(np.float32)
    mean = pattern(total(fixed).astype(np.float32) * inverse)
    return float_of((mean + np.uint32(0x8000)) & HIGH_HALF)  # ties away from zero

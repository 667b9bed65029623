"""Groups around their means, in integers.

Every number that a sum over a group decides is a sum of integers, which is the same in
any order. An element x is seen as its *step*, the integer nearest to (x - middle) *
2**exponent: at most 2**`fixed_bits` in size, with the group's middle and a power of two
that its extremes decide.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxact_kernels.affine import group as affine_group
from jaxact_kernels.affine.group import HALF, HIGH_HALF, float_of, pattern
from jaxact_kernels.layout import Layout

MANTISSA = np.uint32(23)  # bits of a float32 below its exponent
# A float in [2**23, 2**24) has an integer in its low 23 bits: adding this rounds to it.
MAGIC = np.float32(1.5 * 2**23)
MAGIC_BITS = np.uint32(0x4B400000)
LEAST_REACH = np.int32(-100)  # as an exponent: below, steps are coarser


class Frame(NamedTuple):
    """The integer grid for each group.

    Attributes:
        lo: its least element, or 0 where it has a NaN.
        hi: its greatest element, or 0.
        middle: between the two; its step is 0.
        exponent: `int32`; steps are 2**-exponent apart.
        is_ordinary: whether the group has no NaN and is not constant.
    """

    lo: jax.Array
    hi: jax.Array
    middle: jax.Array
    exponent: jax.Array
    is_ordinary: jax.Array


def fixed_bits(group: int) -> int:
    """Bits of a step's size: sums over a group of twice that are exact in float32."""
    return min(14, 23 - (group - 1).bit_length())


def frame(ends: tuple[jax.Array, jax.Array], group: int) -> Frame:
    """The grid for groups of so many elements.

    Args:
        ends: each group's least and greatest finite element, NaN where it has a NaN.
    """
    lo, hi = (affine_group.flush(end) for end in ends)
    is_ordinary = lax.bitwise_and(lax.eq(lo, lo), lax.ne(lo, hi))
    lo, hi = (
        affine_group.put(np.float32(0), lax.ne(end, end), end) for end in (lo, hi)
    )
    middle = lax.add(lax.mul(lo, HALF), lax.mul(hi, HALF))
    # A mean, rounded to bfloat16, may lie this far outside.
    beyond = lax.mul(lax.max(lax.abs(lo), lax.abs(hi)), np.float32(2.0**-8))
    reach = lax.max(lax.sub(hi, middle), lax.sub(middle, lo))
    top = exponent_of(lax.add(reach, beyond), least=int(LEAST_REACH))
    exponent = lax.sub(np.int32(fixed_bits(group) - 1), top)
    return Frame(lo, hi, middle, exponent, is_ordinary)


def mean(
    frame: Frame, total: jax.Array, inverse: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Each group's mean, a bfloat16 as float32, and its step, an integer as float32.

    Args:
        total: sums of steps, `int32`.
        inverse: of how many elements were added.
    """
    above = lax.mul(lax.convert_element_type(total, np.float32), inverse)
    # A product with a power of two is exact, so that no contraction shows.
    exact = lax.add(frame.middle, lax.mul(above, power_of_two(-frame.exponent)))
    rounded = lax.add(pattern(exact), np.uint32(0x8000))  # ties away from zero
    mean = float_of(lax.bitwise_and(rounded, HIGH_HALF))
    most = affine_group.largest(np.float32)
    mean = affine_group.flush(lax.clamp(-most, mean, most))
    distance = lax.mul(lax.sub(mean, frame.middle), power_of_two(frame.exponent))
    step = as_integer(lax.add(distance, MAGIC))
    return mean, lax.convert_element_type(step, np.float32)


def as_integer(sum: jax.Array) -> jax.Array:
    """The integer nearest to x, given x + MAGIC, for sizes below 2**22: `int32`."""
    return lax.bitcast_convert_type(lax.sub(pattern(sum), MAGIC_BITS), np.int32)


def exponent_of(x: jax.Array, *, least: int) -> jax.Array:
    """The exponent of positive float32, `int32`, at least `least`."""
    exponent = lax.shift_right_logical(pattern(x), MANTISSA)
    exponent = lax.sub(lax.convert_element_type(exponent, np.int32), np.int32(127))
    return lax.max(exponent, np.int32(least))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2 to a power from -126 to 127, exactly."""
    biased = lax.convert_element_type(lax.add(exponent, np.int32(127)), np.uint32)
    return float_of(lax.shift_left(biased, MANTISSA))


def total(integers: jax.Array) -> jax.Array:
    """The sum over each group."""
    zero = np.zeros((), integers.dtype)
    return lax.reduce(integers, zero, lax.add, (integers.ndim - 1,))


def real_elements(layout: Layout) -> np.ndarray:
    """How many elements in each group of a row are no padding, `uint32`."""
    real = np.full(layout.num_groups, layout.group, np.uint32)
    real[-1:] -= np.uint32(layout.padding)
    return real.reshape(*(1 for _ in layout.lead), layout.num_groups)

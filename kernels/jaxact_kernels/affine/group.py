"""Arithmetic for one group: from its extremes to its metadata, and back to values.

Every implementation calls these functions on an array with one element a group, so
that they cannot disagree. They call `lax`, in 32 bits and elementwise, because all
implementations can compile that.

No result depends on whether a compiler contracts a product and a sum: each product that
is added to something is exact.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

Line = tuple[jax.Array, jax.Array, jax.Array]  # coefficients for each group

CONSTANT = np.uint32(0x8000)  # a scale's sign: the group holds one value
NAN = np.uint32(0x7FC0)  # zero point where a group has a NaN; its scale is 0
SMALLEST_SCALE = np.float32(2.0**-108)  # 2**17 / it is finite: 2**125
HIGH_HALF = np.uint32(0xFFFF0000)
FRACTION = np.uint32(0xFFFF)  # a fixed-point code's bits below 1
ONE = np.uint32(1)
HALF = np.float32(0.5)
F32_MAX = float(np.finfo(np.float32).max)
# A float in [MAGIC, 2 * MAGIC) has an integer in its low 23 bits: adding MAGIC rounds
# to it, ties to even, in one instruction that no device's converter slows down.
MAGIC = np.float32(2.0**23)
MAGIC_BITS = np.uint32(0x4B000000)


def largest(dtype: DTypeLike, spare: int = 0) -> np.float32:
    """The largest bfloat16 that `dtype` can hold, its last `spare` bits 0."""
    return (largest_number(dtype).view(np.uint32) & _kept(spare)).view(np.float32)


@jax.named_scope("metadata")
def metadata(
    lo: jax.Array,
    hi: jax.Array,
    bits: int | jax.Array,
    dtype: DTypeLike,
    spare: int = 0,
) -> jax.Array:
    """Zero point and scale, in one `uint32`, for groups that span `lo` to `hi`.

    Both are finite, or `lo` is NaN for a group with a NaN. `bits` is an array like them
    where groups differ in it. The last `spare` bits of both are 0, for other use,
    except in constant groups.
    """
    lo, hi = flush(lo), flush(hi)
    zero_point = _bf16_below(lax.max(lo, -largest(dtype, spare)), spare)
    scale = _covering_scale(float_of(zero_point), hi, bits, dtype, spare)
    sloped = lax.bitwise_or(zero_point, scale)
    stored = lax.select(lax.eq(lo, hi), constant_metadata(lo), sloped)
    return put(NAN << np.uint32(16), lax.ne(lo, lo), stored)


@jax.named_scope("metadata")
def encoding_line(lo: jax.Array, metadata: jax.Array) -> Line:
    """For each group: z/2, 2**17/s, and a constant's last bit times 65536.

    The slope is 0 where a group is constant or has a NaN: from the one formula for
    elements only the last bit then remains.
    """
    zero_point, scale = _halves(metadata)
    # A constant's scale has a sign, a NaN's is 0.
    is_sloped = lax.gt(lax.bitcast_convert_type(scale, np.int32), np.int32(0))
    slope = put(np.float32(0), lax.bitwise_not(is_sloped), _slope(scale))
    is_constant = lax.shift_right_logical(metadata, np.uint32(15))  # in its last bit
    last_bit = lax.bitwise_and(lax.bitwise_and(pattern(lo), is_constant), ONE)
    base = lax.shift_left(last_bit, np.uint32(16))
    return lax.mul(float_of(zero_point), HALF), slope, base


@jax.named_scope("metadata")
def decoding_line(metadata: jax.Array) -> Line:
    """For each group: z/u, s/u and u, with which x' = (z/u + s/u * code) * u.

    The unit u is 2, and 2**-64 for a small constant, whose last bit may be subnormal.
    """
    zero_point, scale = _halves(metadata)
    is_constant = lax.ge(scale, CONSTANT << np.uint32(16))
    next15 = lax.bitwise_and(lax.shift_left(metadata, ONE), np.uint32(0xFFFE))
    constant = lax.bitwise_or(zero_point, next15)
    z = float_of(lax.select(is_constant, constant, zero_point))
    is_small = lax.bitwise_and(is_constant, lax.lt(lax.abs(z), np.float32(1)))
    unit = put(np.float32(2.0**-64), is_small, lax.full_like(z, 2))
    inverse = put(np.float32(2.0**64), is_small, lax.full_like(z, HALF))
    zero = lax.mul(z, inverse)
    above = float_of(lax.bitwise_or(constant, ONE))
    ulp = lax.sub(lax.mul(above, inverse), zero)
    step = lax.select(is_constant, ulp, lax.mul(float_of(scale), inverse))
    return zero, step, unit


def dithered(code: jax.Array, noise16: jax.Array | np.uint32, bits: int) -> jax.Array:
    """Codes less the noise that rounded them, in float32: code - noise + 1/2."""
    return lax.add(small_float(code), less_noise(noise16, bits))


def less_noise(noise16: jax.Array | np.uint32, bits: int) -> jax.Array:
    """1/2 - noise, for codes with so many bits: a sum with one is exact.

    From the noise's highest 15 - bits bits and the middle between those and the next,
    so that its mean stays exact, and a sum with a code has 16 bits: its product with a
    scale is exact, and so is the one with `2**-16`. Most is computed in floats, of
    which a GPU adds and multiplies twice as many as it shifts and compares integers.
    """
    fraction = 15 - bits
    upper = lax.shift_right_logical(noise16, np.uint32(16 - fraction))
    noise = lax.mul(small_float(upper), np.float32(-(2.0**-fraction)))
    return lax.add(noise, np.float32(0.5 - 2.0 ** -(fraction + 1)))


def small_float(number: jax.Array) -> jax.Array:
    """An integer below 2**23 as float32, with no conversion instruction."""
    return lax.sub(float_of(lax.bitwise_or(number, MAGIC_BITS)), MAGIC)


def nearest_integer(t: jax.Array) -> jax.Array:
    """The nearest integer, ties to even, as `uint32`, for 0 <= t <= 2**23."""
    return lax.sub(pattern(lax.add(t, MAGIC)), MAGIC_BITS)


def is_constant(metadata: jax.Array) -> jax.Array:
    """Whether each group holds one value, by the sign of its scale."""
    return lax.ne(lax.bitwise_and(metadata, CONSTANT), np.uint32(0))


def saturated(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` within the finite range of `dtype`; NaN stays.

    By comparisons: to Triton the minimum of NaN and a number is the number.
    """
    top = lax.full_like(x, largest_number(dtype))
    x = lax.select(lax.gt(x, top), top, x)
    return lax.select(lax.lt(x, -top), -top, x)


def _slope(scale: jax.Array) -> jax.Array:
    """2**17 / s, correctly rounded, for the bits of a positive bfloat16 s.

    In integers, as some compilers divide only within two units. With
    s = m * 2**(e - 134) and 128 <= m < 256, 2**31 / m rounded to an integer has the
    result's 24 bits; there is no tie, as 2**31 / m is an integer or has an odd m.
    """
    exponent = lax.shift_right_logical(scale, np.uint32(23))
    low = lax.bitwise_and(lax.shift_right_logical(scale, np.uint32(16)), np.uint32(127))
    m = lax.bitwise_or(low, np.uint32(128))
    half = lax.shift_right_logical(m, ONE)
    quotient = lax.div(lax.add(half, np.uint32(2**31)), m)
    # The quotient's leading bit, 2**23, adds one to the exponent.
    shifted = lax.shift_left(lax.sub(np.uint32(269), exponent), np.uint32(23))
    return float_of(lax.add(shifted, quotient))


def _kept(spare: int) -> np.uint32:
    """Mask for a bfloat16 in a float32's bits without its last `spare` bits."""
    return np.uint32(2**32 - (2**16 << spare))


def flush(x: jax.Array) -> jax.Array:
    """`x` with zeros and subnormals as +0."""
    # -0 and subnormals become +0: a minimum may return either zero, and
    # XLA:CPU compares subnormals as zeros where other devices do not.
    return put(np.float32(0), lax.lt(lax.abs(x), np.finfo(np.float32).tiny), x)


def constant_metadata(value: jax.Array) -> jax.Array:
    """The value's high 16 bits, the constant's sign, the next 15 bits."""
    bits = pattern(value)
    next15 = lax.bitwise_and(lax.shift_right_logical(bits, ONE), np.uint32(0x7FFF))
    high = lax.bitwise_or(lax.bitwise_and(bits, HIGH_HALF), CONSTANT)
    return lax.bitwise_or(high, next15)


def _halves(metadata: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zero point and scale as float32 bits."""
    return (
        lax.bitwise_and(metadata, HIGH_HALF),
        lax.shift_left(metadata, np.uint32(16)),
    )


def _covering_scale(
    z: jax.Array,
    hi: jax.Array,
    bits: int | jax.Array,
    dtype: DTypeLike,
    spare: int,
) -> jax.Array:
    """Least bfloat16 scale that reaches `hi`; one less if it overflows `dtype`."""
    half_steps, inverse = _half_steps(bits)
    half_z = lax.mul(z, HALF)
    half_range = lax.sub(lax.mul(hi, HALF), half_z)
    exact = lax.mul(half_range, inverse)
    exact = lax.clamp(SMALLEST_SCALE, exact, largest(dtype, spare))
    above = lax.add(pattern(exact), np.uint32((2**16 << spare) - 1))
    above = lax.bitwise_and(above, _kept(spare))
    half_span = lax.mul(float_of(above), half_steps)
    overflows = lax.gt(lax.add(half_z, half_span), largest_number(dtype) * HALF)
    scale = lax.shift_right_logical(above, np.uint32(16))
    excess = lax.convert_element_type(overflows, np.uint32)
    if spare:
        excess = lax.shift_left(excess, np.uint32(spare))
    return lax.sub(scale, excess)


def _half_steps(
    bits: int | jax.Array,
) -> tuple[jax.typing.ArrayLike, jax.typing.ArrayLike]:
    """(2**bits - 1) / 2 and its inverse, correctly rounded."""
    if isinstance(bits, int):
        steps = 2**bits - 1
        return np.float32(steps / 2), np.float32(2 / steps)
    # Looked up, as not every compiler divides as precisely.
    case_number = lax.sub(lax.convert_element_type(bits, np.int32), np.int32(1))
    cases = zip(*(_half_steps(width) for width in range(1, 9)), strict=True)
    full = lambda value: lax.full_like(bits, value, np.float32)
    half_steps, inverse = (
        lax.select_n(case_number, *map(full, case)) for case in cases
    )
    return half_steps, inverse


def largest_number(dtype: DTypeLike) -> np.float32:
    """The largest finite number of a dtype, at most float32's."""
    return np.float32(min(float(jnp.finfo(dtype).max), F32_MAX))


def _bf16_below(x: jax.Array, spare: int) -> jax.Array:
    """Bits for the greatest bfloat16 <= x: truncation, away from zero if negative.

    They are the high half; the low one is 0. `x` is not -0.
    """
    bits = pattern(x)
    is_negative = lax.shift_right_logical(bits, np.uint32(31))
    most = np.uint32((2**16 << spare) - 1)
    away = lax.add(bits, lax.mul(is_negative, most))
    return lax.bitwise_and(away, _kept(spare))


def put(value: jax.typing.ArrayLike, where: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, with `value` where `where` holds."""
    # `full_like`, as an array from `lax.full` would not be sharded like x.
    return lax.select(where, lax.full_like(x, value), x)


def over(shape: Sequence[int], x: jax.Array) -> jax.Array:
    """A value for each group, repeated along the axes that `shape` has behind theirs.

    In one instruction; an operation on arrays that differ in rank has three for each.
    """
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


def pattern(x: jax.Array) -> jax.Array:
    """A float32's bits."""
    return lax.bitcast_convert_type(x, np.uint32)


def float_of(pattern: jax.Array) -> jax.Array:
    """The float32 with these bits."""
    return lax.bitcast_convert_type(pattern, np.float32)

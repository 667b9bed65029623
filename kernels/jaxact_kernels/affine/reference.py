"""The affine format, defined in plain JAX: the other implementations are judged by it.

    value ~ zero_point + scale * code

for each group of consecutive elements, with `code` an integer of 1 to 8 bits. The zero
point is the real value of code 0. Zero point and scale are bfloat16, rounded before
encoding (zero point down, scale up) and used rounded in both directions, so their
rounding costs range and never bias. With steps = 2**bits - 1 and z, s as stored:

    t    = (x/2 - z/2) * (2**17 / s)          clipped to [0, 65536 * steps]
    code = (uint32(t) + noise) >> 16          noise uniform in 0 .. 65535
    x'   = (z/2 + s/2 * code) * 2

All arithmetic is float32. The halves keep a group that spans +-max from overflowing;
noise is added to an integer and `s/2 * code` is exact (8 + 8 bits), so contracting a
multiplication with an addition can change neither a code nor a decoded value.

A group whose finite elements are all equal is *constant*, flagged by the sign bit of
its scale. The zero point then holds the high 16 bits of the float32, the rest of the
scale the next 15, and every code is the last one: decoding returns all 32.

Contracts:
    error: a finite element comes back within one scale, plus the rounding of its dtype.
        At the ends of the range elements saturate: below -BIG at -BIG (BIG: the largest
        bfloat16 that the dtype can hold), and where `z + s * steps` would exceed the
        dtype's maximum the scale is one bfloat16 smaller and the top of the group moves
        by less than two scales. One bit cannot span more than BIG.
    bias: E[x'] = x within 2**-16 s, from truncating t (downwards; plus the rounding of
        t, at most 2**-23 of x/s); elements at z have none.
    variance: s**2 f (1 - f), with f the fraction of (x - z) / s.
    exact: constant groups (as float32), and zeros at a group's minimum.
    infinities: take the group's finite extremes and leave their neighbours as if they
        were not there; in a group without a finite element they become about +-BIG.
    NaN: makes its whole group NaN.
    zeros and subnormals: decode to +0 where they are a group's minimum; the arithmetic
        may flush them, as XLA does on CPU.

The stochastic rounding is ActNN's (Chen et al. 2021, "ActNN: Reducing Training Memory
Footprint via 2-Bit Activation Compressed Training", arXiv:2104.14129, eq. 5-6). There
the zero point and range are stored as bfloat16 but encoding uses them unrounded; here
both directions use what is stored.

The code calls `lax`, not `jnp` or operators: their promotions and nested jits make the
trace of a new shape three times as slow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels import noise, words
from jaxact_kernels.layout import layout_of

CONSTANT = np.uint32(0x8000)  # sign of a scale: the group holds one value
NAN = np.uint32(0x7FC0)  # zero point of a group with a NaN; its scale is 0
SMALLEST_SCALE = np.float32(2.0**-108)  # 2**17 / it is finite: 2**125
NEAREST = np.uint32(0x8000)  # noise of one half
HIGH_HALF = np.uint32(0xFFFF0000)
ONE = np.uint32(1)
HALF = np.float32(0.5)
F32_MAX = float(np.finfo(np.float32).max)


class Stored(NamedTuple):
    """An array in the affine format.

    Invariants: `lead`, `num_groups` and `group` are those of `layout_of(shape,
    group_size)`; no scale is 0 unless its group is NaN; codes of padding are 0.

    Attributes:
        words: `uint32[*lead, num_groups, group * bits / 32]`, in the order of `words`.
        metadata: `uint32[*lead, num_groups]`, two bfloat16 patterns: the zero point in
            the high 16 bits; in the low, the scale, whose sign says constant group.
    """

    words: jax.Array
    metadata: jax.Array

    @property
    def zero_point(self) -> jax.Array:
        """`uint16[*lead, num_groups]`, bfloat16 patterns."""
        return (self.metadata >> np.uint32(16)).astype(np.uint16)

    @property
    def scale(self) -> jax.Array:
        """`uint16[*lead, num_groups]`, bfloat16 patterns."""
        return self.metadata.astype(np.uint16)


def encode(
    x: jax.Array, seed: jax.Array, *, bits: int, group_size: int, stochastic: bool
) -> Stored:
    """See `jaxact_kernels.affine.encode`."""
    layout = layout_of(x.shape, group_size)
    groups = layout.split(lax.convert_element_type(x, np.float32), -np.inf)
    lo, hi = _extremes(groups, _big(x.dtype))
    # Without the barrier XLA computes the metadata again in each kernel that reads it:
    # a third more code to compile.
    metadata = lax.optimization_barrier(_metadata(lo, hi, bits, x.dtype))
    fixed = _fixed_point(groups, _fixed_ends(lo, metadata), bits)
    if stochastic:
        draw = noise.sixteen_bits(noise.group_keys(seed, metadata), layout.group)
    else:
        draw = NEAREST
    codes = round_fixed_point(fixed, draw)
    if layout.padding:
        is_real = lax.convert_element_type(layout.is_real(), np.uint32)
        codes = lax.mul(codes, is_real)  # not a select: it would not broadcast
    return Stored(words.pack(codes, bits), metadata)


def decode(
    stored: Stored, *, shape: tuple[int, ...], dtype, bits: int, group_size: int
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`."""
    layout = layout_of(shape, group_size)
    zero, step, unit = _decoding_line(_for_elements(stored.metadata))
    code = words.unpack(stored.words, bits)
    code = lax.convert_element_type(_signed(code), np.float32)
    x = lax.mul(lax.add(zero, lax.mul(step, code)), unit)
    return layout.join(lax.convert_element_type(x, dtype), shape)


def round_fixed_point(fixed: jax.Array, noise16: jax.Array | np.uint32) -> jax.Array:
    """Round codes with 16 fractional bits, `uint32`, to integers.

    Up with probability (fraction / 65536) over the 65536 values of `noise16`, exactly;
    `NEAREST` rounds to nearest, ties up.
    """
    return lax.shift_right_logical(lax.add(fixed, noise16), np.uint32(16))


def _extremes(groups: jax.Array, big: np.float32) -> tuple[jax.Array, jax.Array]:
    """Least and greatest finite element of each group; NaN where there is a NaN."""
    infinite = lax.eq(lax.abs(groups), np.float32(np.inf))
    inputs = _put(big, infinite, groups), _put(-big, infinite, groups)
    start = np.float32(np.inf), np.float32(-np.inf)
    # One reduction of both: XLA:CPU hands a lone min or max to a library call that
    # wants its input in memory (16 ms against 0.7 for 8 Mi elements, jax 0.12).
    join = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))
    lo, hi = lax.reduce(inputs, start, join, (groups.ndim - 1,))
    # Where all are infinite, lo is big and hi is -big: these exchange the two.
    return _flush(lax.min(lo, hi)), _flush(lax.max(lo, hi))


def _flush(x: jax.Array) -> jax.Array:
    # -0 and subnormals become +0: which of two zeros a minimum returns is open, and
    # XLA:CPU compares subnormals as zeros where other devices do not.
    return _put(np.float32(0), lax.lt(lax.abs(x), np.finfo(np.float32).tiny), x)


def _metadata(lo: jax.Array, hi: jax.Array, bits: int, dtype) -> jax.Array:
    """Zero point and scale of each group, in one `uint32`."""
    zero_point = _bf16_below(lax.max(lo, -_big(dtype)))
    scale = _covering_scale(_float(zero_point), hi, bits, dtype)
    sloped = lax.bitwise_or(zero_point, scale)
    metadata = lax.select(lax.eq(lo, hi), _constant_metadata(lo), sloped)
    return _put(NAN << np.uint32(16), lax.ne(lo, lo), metadata)


def _constant_metadata(value: jax.Array) -> jax.Array:
    """The high 16 bits of `value`, the constant's sign, the next 15 bits."""
    pattern = _pattern(value)
    next15 = lax.bitwise_and(lax.shift_right_logical(pattern, ONE), np.uint32(0x7FFF))
    high = lax.bitwise_or(lax.bitwise_and(pattern, HIGH_HALF), CONSTANT)
    return lax.bitwise_or(high, next15)


def _halves(metadata: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Patterns of zero point and scale as float32, 32 bits each."""
    return (
        lax.bitwise_and(metadata, HIGH_HALF),
        lax.shift_left(metadata, np.uint32(16)),
    )


def _covering_scale(z: jax.Array, hi: jax.Array, bits: int, dtype) -> jax.Array:
    """Least bfloat16 scale that reaches `hi`; one less if it overflows `dtype`."""
    steps = 2**bits - 1
    half_z = lax.mul(z, HALF)
    half_range = lax.sub(lax.mul(hi, HALF), half_z)
    exact = lax.mul(half_range, np.float32(2 / steps))
    exact = lax.clamp(SMALLEST_SCALE, exact, _big(dtype))
    above = lax.add(_pattern(exact), np.uint32(0xFFFF))
    half_span = lax.mul(
        _float(lax.bitwise_and(above, HIGH_HALF)), np.float32(steps / 2)
    )
    overflows = lax.gt(lax.add(half_z, half_span), _max(dtype) * HALF)
    scale = lax.shift_right_logical(above, np.uint32(16))
    return lax.sub(scale, lax.convert_element_type(overflows, np.uint32))


def _fixed_ends(lo, metadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each group: z/2, 2**17/s, and the code's least value in 2**-16 units.

    A constant group's slope is 0 and its floor the last bit of the value, so that the
    one per-element formula serves it. Any NaN, in a group with one or from 0 * inf,
    falls to the floor.
    """
    zero_point, scale = _halves(metadata)
    slope = lax.div(np.float32(2**17), _float(scale))
    # A constant's scale has a sign, which makes its slope negative, and so 0 here, or
    # NaN, which falls to the floor too.
    slope = lax.max(slope, np.float32(0))
    is_constant = lax.shift_right_logical(metadata, np.uint32(15))  # in its last bit
    last_bit = lax.bitwise_and(lax.bitwise_and(_pattern(lo), is_constant), ONE)
    floor = lax.convert_element_type(
        lax.shift_left(last_bit, np.uint32(16)), np.float32
    )
    return lax.mul(_float(zero_point), HALF), slope, floor


def _fixed_point(x: jax.Array, ends, bits: int) -> jax.Array:
    """Real-valued codes of `x`, clipped, in units of 2**-16, as `uint32`."""
    half_zero, slope, floor = (_for_elements(end) for end in ends)
    t = lax.mul(lax.sub(lax.mul(x, HALF), half_zero), slope)
    floors = lax.broadcast_in_dim(floor, t.shape, range(t.ndim))
    t = lax.select(lax.gt(t, floor), t, floors)  # not max: NaN goes to the floor
    t = lax.min(t, np.float32((2**bits - 1) * 65536))
    return lax.convert_element_type(_signed(t), np.uint32)


def _decoding_line(metadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each group: z/u, s/u and u, with which x' = (z/u + s/u * code) * u.

    The unit u is 2, and 2**-64 for a small constant, whose last bit may be subnormal.
    """
    zero_point, scale = _halves(metadata)
    is_constant = lax.ge(scale, CONSTANT << np.uint32(16))
    next15 = lax.bitwise_and(lax.shift_left(metadata, ONE), np.uint32(0xFFFE))
    constant = lax.bitwise_or(zero_point, next15)
    z = _float(lax.select(is_constant, constant, zero_point))
    is_small = lax.bitwise_and(is_constant, lax.lt(lax.abs(z), np.float32(1)))
    unit = _put(np.float32(2.0**-64), is_small, lax.full_like(z, 2))
    inverse = _put(np.float32(2.0**64), is_small, lax.full_like(z, HALF))
    zero = lax.mul(z, inverse)
    above = _float(lax.bitwise_or(constant, ONE))
    ulp = lax.sub(lax.mul(above, inverse), zero)
    step = lax.select(is_constant, ulp, lax.mul(_float(scale), inverse))
    return zero, step, unit


def _max(dtype) -> np.float32:
    return np.float32(min(float(jnp.finfo(dtype).max), F32_MAX))


def _big(dtype) -> np.float32:
    """The largest bfloat16 that `dtype` can hold."""
    return (_max(dtype).view(np.uint32) & HIGH_HALF).view(np.float32)


def _bf16_below(x: jax.Array) -> jax.Array:
    """Bits of the greatest bfloat16 <= x: truncation, away from zero if negative.

    They are the high half; the low one is 0. `x` is not -0.
    """
    pattern = _pattern(x)
    is_negative = lax.shift_right_logical(pattern, np.uint32(31))
    away = lax.add(pattern, lax.mul(is_negative, np.uint32(0xFFFF)))
    return lax.bitwise_and(away, HIGH_HALF)


def _put(value: Any, where: jax.Array, x: jax.Array) -> jax.Array:
    """`x` with `value` in some places."""
    # `full_like`, as an array of `lax.full` would not be sharded like x.
    return lax.select(where, lax.full_like(x, value), x)


def _for_elements(x: jax.Array) -> jax.Array:
    """Add the axis of a group's elements to a value for each group."""
    return lax.expand_dims(x, (x.ndim,))


def _signed(x: jax.Array) -> jax.Array:
    # XLA:CPU converts between float32 and int32 in one instruction, uint32 in several.
    return lax.convert_element_type(x, np.int32)


def _pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.uint32)


def _float(pattern: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pattern, np.float32)

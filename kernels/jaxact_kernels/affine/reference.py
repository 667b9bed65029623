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
"""

from typing import NamedTuple

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
    groups = layout.split(x.astype(np.float32), -np.inf)
    lo, hi = _extremes(groups, _big(x.dtype))
    # Without the barrier XLA computes the metadata again in each kernel that reads it:
    # a third more code to compile.
    metadata = lax.optimization_barrier(_metadata(lo, hi, bits, x.dtype))
    fixed = _fixed_point(groups, _fixed_ends(lo, metadata), bits)
    if stochastic:
        draw = noise.sixteen_bits(noise.group_keys(seed, metadata), layout.group)
    else:
        draw = jnp.full((), NEAREST)
    codes = round_fixed_point(fixed, draw)
    if layout.padding:
        codes = jnp.where(layout.is_real(), codes, np.uint32(0))
    return Stored(words.pack(codes, bits), metadata)


def decode(
    stored: Stored, *, shape: tuple[int, ...], dtype, bits: int, group_size: int
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`."""
    layout = layout_of(shape, group_size)
    zero, step, unit = _decoding_line(stored.metadata)
    code = words.unpack(stored.words, bits).astype(np.int32).astype(np.float32)
    x = (zero[..., None] + step[..., None] * code) * unit[..., None]
    return layout.join(x.astype(dtype), shape)


def round_fixed_point(fixed: jax.Array, noise16: jax.Array) -> jax.Array:
    """Round codes with 16 fractional bits, `uint32`, to integers.

    Up with probability (fraction / 65536) over the 65536 values of `noise16`, exactly;
    `NEAREST` rounds to nearest, ties up.
    """
    return fixed + noise16 >> np.uint32(16)


def _extremes(groups: jax.Array, big: np.float32) -> tuple[jax.Array, jax.Array]:
    """Least and greatest finite element of each group; NaN where there is a NaN."""
    infinite = lax.abs(groups) == np.float32(np.inf)
    inputs = jnp.where(infinite, big, groups), jnp.where(infinite, -big, groups)
    start = np.float32(np.inf), np.float32(-np.inf)
    # One reduction of both: XLA:CPU hands a lone min or max to a library call that
    # wants its input in memory (16 ms against 0.7 for 8 Mi elements, jax 0.12).
    join = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))
    lo, hi = lax.reduce(inputs, start, join, (groups.ndim - 1,))
    all_infinite = lo > hi
    lo, hi = jnp.where(all_infinite, hi, lo), jnp.where(all_infinite, lo, hi)
    return _flush(lo), _flush(hi)


def _flush(x: jax.Array) -> jax.Array:
    # -0 and subnormals become +0: which of two zeros a minimum returns is open, and
    # XLA:CPU compares subnormals as zeros where other devices do not.
    return jnp.where(lax.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def _metadata(lo: jax.Array, hi: jax.Array, bits: int, dtype) -> jax.Array:
    """Zero point and scale of each group, in one `uint32`."""
    zero_point = _bf16_below(lax.max(lo, -_big(dtype)))
    scale = _covering_scale(_from_bf16(zero_point), hi, bits, dtype)
    pattern = _pattern(lo)
    next15 = (pattern & np.uint32(0xFFFF)) >> np.uint32(1)
    is_constant = lo == hi
    zero_point = jnp.where(is_constant, pattern >> np.uint32(16), zero_point)
    scale = jnp.where(is_constant, CONSTANT | next15, scale)
    is_nan = lo != lo
    metadata = zero_point << np.uint32(16) | scale
    return jnp.where(is_nan, NAN << np.uint32(16), metadata)


def _halves(metadata: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Patterns of zero point and scale, 16 bits in a `uint32` each."""
    return metadata >> np.uint32(16), metadata & np.uint32(0xFFFF)


def _covering_scale(z: jax.Array, hi: jax.Array, bits: int, dtype) -> jax.Array:
    """Least bfloat16 scale that reaches `hi`; one less if it overflows `dtype`."""
    steps = 2**bits - 1
    exact = (hi * HALF - z * HALF) * np.float32(2 / steps)
    exact = lax.clamp(SMALLEST_SCALE, exact, _big(dtype))
    scale = _pattern(exact) + np.uint32(0xFFFF) >> np.uint32(16)
    half_top = z * HALF + (_from_bf16(scale) * HALF) * np.float32(steps)
    return scale - (half_top > _max(dtype) * HALF).astype(np.uint32)


def _fixed_ends(lo, metadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each group: z/2, 2**17/s, and the code's least value in 2**-16 units.

    A constant group's slope is 0 and its floor the last bit of the value, so that the
    one per-element formula serves it (and any NaN from 0 * inf falls to the floor).
    """
    zero_point, scale = _halves(metadata)
    is_constant = scale >= CONSTANT
    is_flat = is_constant | (zero_point == NAN)
    slope = np.float32(2**17) / _from_bf16(scale)
    last_bit = jnp.where(is_constant, _pattern(lo) & np.uint32(1), np.uint32(0))
    floor = (last_bit << np.uint32(16)).astype(np.float32)
    return (
        _from_bf16(zero_point) * HALF,
        jnp.where(is_flat, np.float32(0), slope),
        floor,
    )


def _fixed_point(x: jax.Array, ends, bits: int) -> jax.Array:
    """Real-valued codes of `x`, clipped, in units of 2**-16, as `uint32`."""
    half_zero, slope, floor = (end[..., None] for end in ends)
    t = (x * HALF - half_zero) * slope
    t = jnp.where(t > floor, t, floor)  # not maximum: NaN goes to the floor
    top = np.float32((2**bits - 1) * 65536)
    return jnp.where(t < top, t, top).astype(np.int32).astype(np.uint32)


def _decoding_line(metadata) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each group: z/u, s/u and u, with which x' = (z/u + s/u * code) * u.

    The unit u is 2, and 2**-64 for a small constant, whose last bit may be subnormal.
    """
    zero_point, scale = _halves(metadata)
    is_constant = scale >= CONSTANT
    next15 = jnp.where(is_constant, scale & np.uint32(0x7FFF), np.uint32(0))
    pattern = zero_point << np.uint32(16) | next15 << np.uint32(1)
    z = lax.bitcast_convert_type(pattern, np.float32)
    is_small = is_constant & (lax.abs(z) < np.float32(1))
    unit = jnp.where(is_small, np.float32(2.0**-64), np.float32(2))
    inverse = jnp.where(is_small, np.float32(2.0**64), HALF)
    above = lax.bitcast_convert_type(pattern | np.uint32(1), np.float32)
    ulp = above * inverse - z * inverse
    step = jnp.where(is_constant, ulp, _from_bf16(scale) * inverse)
    return z * inverse, step, unit


def _max(dtype) -> np.float32:
    return np.float32(min(float(jnp.finfo(dtype).max), F32_MAX))


def _big(dtype) -> np.float32:
    """The largest bfloat16 that `dtype` can hold."""
    return (_max(dtype).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _bf16_below(x: jax.Array) -> jax.Array:
    """Bits of the greatest bfloat16 <= x: truncation, away from zero if negative."""
    away = jnp.where(x < np.float32(0), np.uint32(0xFFFF), np.uint32(0))
    return _pattern(x) + away >> np.uint32(16)


def _pattern(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, np.uint32)


def _from_bf16(u: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(u << np.uint32(16), np.float32)

"""The affine format, defined in plain JAX: the other implementations are judged by it.

    value ~ zero_point + scale * code

for each group of consecutive elements, with `code` an integer in 1 to 8 bits. The zero
point is the real value that code 0 stands for. Zero point and scale are bfloat16,
rounded before encoding (zero point down, scale up) and used rounded in both directions,
so their rounding costs range and never bias. With steps = 2**bits - 1 and z, s as
stored:

    t    = (x/2 - z/2) * (2**17 / s)          clipped to [0, 65536 * steps]
    code = (round(t) + noise) >> 16           noise uniform in 0 .. 65535
    x'   = (z/2 + s/2 * code) * 2

All arithmetic is float32. The halves keep a group that spans +-max from overflowing;
noise is added to an integer and `s/2 * code` is exact (8 + 8 bits), so contracting a
multiplication with an addition can change neither a code nor a decoded value.

A group whose finite elements are all equal is *constant*, flagged by its scale's sign
bit. The zero point then holds the float32's high 16 bits, the scale's other bits hold
the next 15, and every code is the last one: decoding returns all 32.

*Dithered* decoding (subtractive dither, Roberts 1962; Gray and Stockham 1993) draws the
noise again, from the seed, and takes it off the code:

    x'   = (z/2 + s/2 * (code - noise / 65536 + 1/2)) * 2

except in constant groups. The words are the same. Of the noise it takes the highest
15 - bits bits, and the middle of those below, so that s/2 times the difference is exact
(8 + 16 bits).

Contracts:
    error: a finite element comes back within one scale, plus its dtype's rounding.
        Elements saturate at both ends: below -BIG at -BIG (BIG: the largest bfloat16
        that the dtype can hold), and where `z + s * steps` would exceed the dtype's
        maximum the scale is one bfloat16 smaller and the group's top moves by less than
        two scales. One bit cannot span more than BIG.
    bias: E[x'] = x within 2**-17 s, from rounding t to an integer, to nearest and ties
        to even (plus at most 2**-23 of x/s from t itself); elements at z have none.
    variance: s**2 f (1 - f), with f the fractional part in (x - z) / s.
    dithered: the error is uniform within s/2 (1 + 2**(bits - 15)) whatever the value,
        so E[x'] = x within 2**-17 s and the variance is s**2 / 12, up to a factor
        1 +- 3 * 4**(bits - 15); zeros at the minimum have noise like all others. Beyond
        the dtype's maximum values saturate.
    exact: constant groups (as float32), and zeros at a group's minimum.
    infinities: take the group's finite extremes and leave their neighbours as if they
        were not there; in a group without a finite element they become about +-BIG.
    NaN: makes its whole group NaN.
    zeros and subnormals: decode to +0 where they are a group's minimum; the arithmetic
        may flush them, as XLA does on CPU.

The stochastic rounding is ActNN's (Chen et al. 2021, "ActNN: Reducing Training Memory
Footprint via 2-Bit Activation Compressed Training", arXiv:2104.14129, eq. 5-6). There
the zero point and range are stored as bfloat16 but encoding uses them unrounded; here
both directions use the stored, rounded values.

The code calls `lax`, not `jnp` or operators: their promotions and nested jits make the
trace three times as slow for each new shape.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import noise, words
from jaxact_kernels.affine.group import (
    Line,
    decoding_line,
    encoding_line,
    is_constant,
    largest,
    less_noise,
    metadata,
    nearest_integer,
    over,
    pattern,
    put,
    saturated,
)
from jaxact_kernels.layout import Layout, layout_of

NEAREST = np.uint32(0x8000)  # noise that is one half
ENDS = np.float32(np.inf), np.float32(-np.inf)  # a minimum and maximum of nothing


class Stored(NamedTuple):
    """An array in the affine format.

    Invariants: `lead`, `num_groups` and `group` are those of `layout_of(shape,
    group_size)`; no scale is 0 unless its group is NaN; codes of padding are 0.

    Attributes:
        words: `uint32[*lead, num_groups, group * bits / 32]`, as `words` orders them.
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


class Summary(NamedTuple):
    """What codes and noise depend on besides the elements, for each group.

    Attributes:
        lo: least finite element; NaN where there is a NaN.
        hi: greatest finite element.
        content: sum of `noise.content`; None where decoding draws the noise again,
            which knows the metadata alone.
    """

    lo: jax.Array
    hi: jax.Array
    content: jax.Array | None = None


def encode(
    x: jax.Array,
    seed: jax.Array,
    *,
    bits: int,
    group_size: int,
    stochastic: bool,
    is_dithered: bool = False,
) -> Stored:
    """See `jaxact_kernels.affine.encode`."""
    layout = layout_of(x.shape, group_size)
    groups = split(x, layout)
    if is_dithered or not stochastic:
        summary = Summary(*extremes(groups, x.dtype))
    else:
        summary = summarize(groups, layout, x.dtype)
    codes, stored = quantize(groups, summary, seed, layout, x.dtype, bits, stochastic)
    return Stored(words.pack(codes, bits), stored)


def decode(
    stored: Stored,
    seed: jax.Array | None = None,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int,
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`."""
    code = words.unpack_slots(stored.words, bits)
    layout = layout_of(shape, group_size)
    if seed is not None:
        keys = noise.group_keys(seed, stored.metadata)
        draw = noise.slots_of_bits(keys, code.shape[keys.ndim :])
        groups = dequantize_dithered(code, stored.metadata, draw, dtype, bits)
    else:
        groups = dequantize(code, stored.metadata, dtype)
    return layout.join(groups, shape)


def split(x: jax.Array, layout: Layout) -> jax.Array:
    """Groups as float32, padded with infinities, which extremes leave out."""
    return layout.split(lax.convert_element_type(x, np.float32), -np.inf)


def quantize(
    groups: jax.Array,
    summary: Summary,
    seed: jax.Array,
    layout: Layout,
    dtype: DTypeLike,
    bits: int | jax.Array,
    stochastic: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Codes, `uint32[*lead, num_groups, group]`, and metadata for groups.

    Args:
        groups: from `split`.
        summary: of these groups.
        dtype: of the array that was split.
        bits: one width, or `uint32[*lead, num_groups]`.
    """
    stored = metadata(summary.lo, summary.hi, bits, dtype)
    line = encoding_line(summary.lo, stored)
    keys = None
    if stochastic:
        keys = noise.group_keys(seed, noise.own_bits(stored, summary.content))
    # Without the barrier XLA computes these again in each kernel that reads them: a
    # third more code to compile. With one it computes them in one kernel.
    stored, line, keys = lax.optimization_barrier((stored, line, keys))
    fixed = fixed_point(groups, line, bits)
    if keys is not None:
        draw = noise.sixteen_bits(keys, layout.group)
    else:
        draw = NEAREST
    codes = round_fixed_point(fixed, draw)
    if layout.padding:
        is_real = lax.convert_element_type(layout.is_real(), np.uint32)
        codes = lax.mul(codes, is_real)  # not a select: it would not broadcast
    return codes, stored


def dequantize(code: jax.Array, metadata: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Values, `dtype[*lead, num_groups, group]`, from codes with those axes or more.

    A group's elements may lie along several axes in `code`, in row-major order.
    """
    zero, step, unit = (over(code.shape, end) for end in decoding_line(metadata))
    code = lax.convert_element_type(_signed(code), np.float32)
    x = lax.mul(lax.add(zero, lax.mul(step, code)), unit)
    group = math.prod(code.shape[metadata.ndim :])
    return lax.reshape(lax.convert_element_type(x, dtype), (*metadata.shape, group))


def dequantize_dithered(
    code: jax.Array,
    metadata: jax.Array,
    draw: jax.Array,
    dtype: DTypeLike,
    bits: int,
) -> jax.Array:
    """`dequantize`, less the noise that `quantize` drew; shaped like the codes."""
    zero, step, unit = (over(code.shape, end) for end in decoding_line(metadata))
    has_noise = lax.bitwise_not(is_constant(metadata))
    weight = over(code.shape, lax.convert_element_type(has_noise, np.float32))
    plain = lax.convert_element_type(_signed(code), np.float32)
    multiple = lax.add(plain, lax.mul(weight, less_noise(draw, bits)))
    x = lax.mul(lax.add(zero, lax.mul(step, multiple)), unit)
    x = lax.convert_element_type(saturated(x, dtype), dtype)
    group = math.prod(code.shape[metadata.ndim :])
    return lax.reshape(x, (*metadata.shape, group))


def round_fixed_point(fixed: jax.Array, noise16: jax.Array | np.uint32) -> jax.Array:
    """Round codes with 16 fractional bits, `uint32`, to integers.

    Up with probability (fraction / 65536) over the 65536 values for `noise16`, exactly;
    `NEAREST` rounds to nearest, ties up.
    """
    return lax.shift_right_logical(lax.add(fixed, noise16), np.uint32(16))


@jax.named_scope("extremes")
def extremes(groups: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Each group's least and greatest finite element; NaN where there is a NaN."""
    # One reduction for both: XLA:CPU hands a lone min or max to a library call that
    # wants its input in memory (16 ms against 0.7 for 8 Mi elements, jax 0.12).
    join = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))
    lo, hi = lax.reduce(_finite(groups, dtype), ENDS, join, (groups.ndim - 1,))
    return _in_order(lo, hi)


@jax.named_scope("extremes")
def summarize(groups: jax.Array, layout: Layout, dtype: DTypeLike) -> Summary:
    """Each group's extremes, as above, and its content, in one reduction."""
    shift = np.repeat(np.array([0, 16], np.uint32), layout.group // 2)
    shift = lax.broadcast_in_dim(shift, groups.shape, (groups.ndim - 1,))
    content = noise.content(pattern(groups), shift)
    if layout.padding:
        is_real = lax.convert_element_type(layout.is_real(), np.uint32)
        content = lax.mul(content, is_real)
    inputs = (*_finite(groups, dtype), content)
    join = lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]), lax.add(a[2], b[2]))
    axes = (groups.ndim - 1,)
    lo, hi, content = lax.reduce(inputs, (*ENDS, np.uint32(0)), join, axes)
    return Summary(*_in_order(lo, hi), content)


def _finite(groups: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The elements with infinities replaced: for a minimum, and for a maximum."""
    big = largest(dtype)
    is_infinite = lax.eq(lax.abs(groups), np.float32(np.inf))
    return put(big, is_infinite, groups), put(-big, is_infinite, groups)


def _in_order(lo: jax.Array, hi: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Where all are infinite, lo is big and hi is -big: these exchange the two.
    return lax.min(lo, hi), lax.max(lo, hi)


def fixed_point(x: jax.Array, line: Line, bits: int | jax.Array) -> jax.Array:
    """Real-valued codes for `x`, clipped, in units of 2**-16, as `uint32`."""
    half_zero, slope, base = (over(x.shape, end) for end in line)
    t = lax.mul(lax.sub(lax.mul(x, np.float32(0.5)), half_zero), slope)
    t = put(np.float32(0), lax.bitwise_not(lax.gt(t, np.float32(0))), t)  # NaN too
    t = lax.min(t, _last_code(x.shape, bits))
    if isinstance(bits, int) and bits < 8:
        # By a sum, as a GPU's converters are slow. A compiler cannot contract it with
        # the product: that passes a minimum first.
        return lax.add(nearest_integer(t), base)
    t = lax.round(t, lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.add(lax.convert_element_type(_signed(t), np.uint32), base)


def _last_code(shape: tuple[int, ...], bits: int | jax.Array) -> np.float32 | jax.Array:
    if isinstance(bits, int):
        return np.float32((2**bits - 1) * 65536)
    end = lax.shift_left(lax.full_like(bits, 65536), bits)
    last = lax.sub(end, lax.full_like(bits, 65536))
    return over(shape, lax.convert_element_type(last, np.float32))


def _signed(x: jax.Array) -> jax.Array:
    # XLA:CPU converts between float32 and int32 in one instruction, uint32 in several.
    return lax.convert_element_type(x, np.int32)

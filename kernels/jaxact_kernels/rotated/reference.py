"""The rotated format, defined in plain JAX: the other implementations are judged by it.

A group's mean is taken off, the rest is rotated at random (see `rotation`), and each
rotated element becomes the nearest of the levels that are best for a normal, times one
scale for the group (DRIVE, Vargaftik et al. 2021, arXiv:2105.08339; EDEN, 2022,
arXiv:2108.08842):

    d    = x - m                              m: the mean, a bfloat16
    y    = R d                                R: two rounds of signs and Hadamard
    q    = the level nearest to y / deviation, with the sign of y
    x'   = m + s R^T q                        s = |y|^2 / <y, q>, a bfloat16

A code has `bits` bits: the level's number below, the sign above. At half a bit eight
elements have one code, for the largest; q is 0 for the others (see `largest`).
The scale is the one with which x' has the mean x over rotations; it is rounded to
bfloat16 at random. The mean is rounded freely: d is the difference to the rounded one.

In an *adaptive* array each group has the format that is expected to err least (see
`adaptive`): codes of the affine format, with stochastic rounding or with dither, or
rotated ones. Scales and zero points then have one bit less: the scale's last is 1 for
rotated codes, the zero point's last is 1 for dither.

The signs of R come from the seed, the group's index and the mean (`noise.group_key`):
with one seed for all steps they change with the data.

Contracts:
    bias: E[x'] = x over seeds, for nearly all x: the squared bias that two rounds leave
        is below 5e-4 of the squared error, and 2e-3 for a lone spike.
    error: E |x' - x|^2 = e |x - m|^2 with e = `group.NORMAL_ERROR[bits]`, over seeds.
        None of it lies along x - m, but for the scale's rounding; it is the same in all
        other directions, so a small element beside a large one has the noise of all.
    exact: constant groups (as float32).
    infinities: count as the group's finite extremes, as in the affine format.
    NaN: makes its whole group NaN.
    small numbers: a group below 2**-90 in size may come back as its mean.
    range: values beyond the dtype's largest number saturate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import noise, words
from jaxact_kernels.affine import group as affine_group, reference as affine_reference
from jaxact_kernels.affine.group import HALF, HIGH_HALF, float_of, pattern
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.rotated import adaptive, group, largest, rotation
from jaxact_kernels.rotated.centered import (
    Frame,
    frame,
    mean as mean_of,
    power_of_two,
    real_elements,
    total,
)
from jaxact_kernels.rotated.group import HALF_BIT
from jaxact_kernels.words import WORD_BITS


class Stored(NamedTuple):
    """An array in the rotated format.

    Attributes:
        words: `uint32[*lead, num_groups, group * bits / 32]`, as `words` orders them.
        metadata: `uint32[*lead, num_groups]`, two bfloat16 patterns: the mean in the
            high 16 bits; in the low, the scale, whose sign says constant group. Groups
            in the affine format have its zero point and scale.
        seed: `uint32[]`.
    """

    words: jax.Array
    metadata: jax.Array
    seed: jax.Array


def encode(
    x: jax.Array, seed: jax.Array, *, bits: float, group_size: int, is_adaptive: bool
) -> tuple[jax.Array, jax.Array]:
    """Words and metadata; see `jaxact_kernels.rotated.encode`."""
    layout = layout_of(x.shape, group_size)
    bits = group.group_bits(layout.group, bits)
    plain_bits = group.affine_bits(bits)
    groups = affine_reference.split(x, layout)
    ends = affine_reference.extremes(groups, x.dtype)
    grid = frame(ends, layout.group)
    groups = clipped(groups, grid)
    spare = adaptive.SPARE if is_adaptive else 0
    distances, mean = center(groups, grid, layout)
    squares = total(square(group.size(distances, layout.group)))
    options = seed, bits, spare
    codes, metadata = rotated_codes(distances, squares, mean, grid, *options)
    plain = affine_group.metadata(*ends, plain_bits, x.dtype, spare)
    fixed = affine_reference.fixed_point(
        groups, affine_group.encoding_line(ends[0], plain), plain_bits
    )
    if is_adaptive:
        stochastic, count = total(adaptive.spread(fixed)), real_elements(layout)
        plain, is_rotated = adaptive.choose(
            grid, squares, stochastic, count, plain, layout.group, plain_bits
        )
        metadata = metadata | adaptive.ROTATED
        draw = noise.sixteen_bits(noise.group_keys(seed, plain), layout.group)
    else:
        is_rotated = grid.is_ordinary
        draw = affine_reference.NEAREST  # only groups without noise are left
    plain_codes = affine_reference.round_fixed_point(fixed, draw)
    if layout.padding:  # is rotated like the rest; elsewhere its code is 0
        plain_codes = jnp.where(layout.is_real(), plain_codes, np.uint32(0))
    packed = pack(codes, plain_codes, is_rotated, bits)
    return packed, jnp.where(is_rotated, metadata, plain)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: float,
    group_size: int,
    is_adaptive: bool,
) -> jax.Array:
    """See `jaxact_kernels.rotated.decode`."""
    layout = layout_of(shape, group_size)
    metadata, seed = stored.metadata, stored.seed
    bits = group.group_bits(layout.group, bits)
    plain_bits = group.affine_bits(bits)
    codes = words.unpack_slots(stored.words, plain_bits)
    if bits == HALF_BIT:
        levels = largest_levels(stored.words, layout.group)
    else:
        levels = signed_levels(codes, int(bits)).reshape(*metadata.shape, layout.group)
    is_constant = affine_group.is_constant(metadata)
    if is_adaptive:
        clean = metadata & ~adaptive.ROTATED
        rotated = rotated_values(levels, clean, seed, bits)
        clean = jnp.where(is_constant, metadata, adaptive.without_flags(metadata))
        keys = noise.group_keys(seed, metadata)
        draw = noise.slots_of_bits(keys, codes.shape[keys.ndim :])
        dithered = affine_reference.dequantize_dithered(
            codes, clean, draw, np.float32, plain_bits
        )
        plain = affine_reference.dequantize(codes, clean, np.float32)
        is_dithered = adaptive.is_dithered(metadata)
        plain = jnp.where(is_dithered[..., None], dithered, plain)
        is_plain = is_constant | ~adaptive.is_rotated(metadata)
    else:
        rotated = rotated_values(levels, metadata, seed, bits)
        plain = affine_reference.dequantize(
            first_codes(codes, metadata), metadata, np.float32
        )
        is_plain = is_constant
    x = jnp.where(is_plain[..., None], plain, rotated)
    return layout.join(affine_group.saturated(x, dtype).astype(dtype), shape)


def clipped(groups: jax.Array, grid: Frame) -> jax.Array:
    """Groups within their finite extremes; where there is a NaN, all 0."""
    lo, hi = grid.lo[..., None], grid.hi[..., None]
    return jnp.where(groups > lo, lax.min(groups, hi), lo)


def center(
    groups: jax.Array, grid: Frame, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Distances from the means in steps, integers as float32; and the means' bits.

    Padding has distance 0.
    """
    steps = (groups - grid.middle[..., None]) * power_of_two(grid.exponent)[..., None]
    steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    if layout.padding:
        steps = jnp.where(layout.is_real(), steps, np.float32(0))
    inverse = (1 / real_elements(layout)).astype(np.float32)
    mean, offset = mean_of(grid, total(steps.astype(np.int32)), inverse)
    distances = steps - offset[..., None]
    if layout.padding:
        distances = jnp.where(layout.is_real(), distances, np.float32(0))
    return distances, pattern(mean)


def rotated_codes(
    distances: jax.Array,
    squares: jax.Array,
    mean: jax.Array,
    grid: Frame,
    seed: jax.Array,
    bits: float,
    spare: int,
) -> tuple[jax.Array, jax.Array]:
    """Codes, `uint32[*lead, num_groups, codes]`, and metadata, if rotated."""
    size = distances.shape[-1]
    keys = noise.group_keys(seed, mean)
    power = group.norm_exponent(squares, size)
    y = rotation.rotate(distances, keys, power_of_two(power))
    power = power + np.int32(rotation.FRACTION_BITS)
    if bits == HALF_BIT:
        codes, products = largest.codes_and_products(largest.largest(y))
    else:
        deviation = group.deviation(squares, size)
        codes, products = level_codes(y, deviation, power, int(bits))
    products = total(products).astype(np.uint32)
    draw = rotation.spare_bits(keys, size)
    unit = power - grid.exponent + np.int32(2 * group.dropped_bits(size))
    scale = group.scale(squares.astype(np.uint32), products, unit, draw, spare)
    return codes, mean | scale


def level_codes(
    y: jax.Array, deviation: jax.Array, power: jax.Array, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Codes of the nearest levels, and these times the elements, `int32`."""
    bounds = group.thresholds(deviation, power, bits)
    number = group.level_number(y, [bound[..., None] for bound in bounds], bits)
    products = abs(y).astype(np.int32) * group.level(number, bits).astype(np.int32)
    sign = (y < np.float32(0)).astype(np.uint32)  # zeros' signs differ with the order
    return number | sign << np.uint32(bits - 1), products


def pack(
    codes: jax.Array, plain: jax.Array, is_rotated: jax.Array, bits: float
) -> jax.Array:
    """Words with rotated groups' codes, and others' in the affine format."""
    if bits != HALF_BIT:
        codes = jnp.where(is_rotated[..., None], codes, plain)
        return words.pack(codes, int(bits))
    num_words = group.num_words(plain.shape[-1], bits)
    missing = num_words * WORD_BITS // largest.CODE_BITS - codes.shape[-1]
    if missing:
        edges = [(0, 0, 0)] * is_rotated.ndim + [(0, missing, 0)]
        codes = lax.pad(codes, np.uint32(0), edges)
    codes = words.pack(codes, largest.CODE_BITS)
    # Only constants are not rotated; their codes are alike.
    plain = words.pack(plain[..., : num_words * WORD_BITS], 1)
    return jnp.where(is_rotated[..., None], codes, plain)


def first_codes(codes: jax.Array, metadata: jax.Array) -> jax.Array:
    """Each group's first code, `uint32[*lead, num_groups, 1]`: a constant's are alike.

    Args:
        codes: from `words.unpack_slots`.
    """
    limits = (*metadata.shape, *(1 for _ in codes.shape[metadata.ndim :]))
    first = lax.slice(codes, (0,) * codes.ndim, limits)
    return lax.reshape(first, (*metadata.shape, 1))


def square(sizes: jax.Array) -> jax.Array:
    """Squares as `int32`."""
    return (sizes * sizes).astype(np.int32)


def signed_levels(codes: jax.Array, bits: int) -> jax.Array:
    """The levels with these codes, float32."""
    sign = codes >> np.uint32(bits - 1) << np.uint32(31)
    number = codes & np.uint32(2 ** (bits - 1) - 1)
    level = group.level(number, bits).astype(np.int32).astype(np.float32)
    return float_of(pattern(level) | sign)


def largest_levels(packed: jax.Array, size: int) -> jax.Array:
    """The same at half a bit, from words, for groups of `size` elements."""
    *lead, _ = packed.shape
    num_codes, axis = size // largest.TOGETHER, len(lead)
    codes = words.unpack(packed, largest.CODE_BITS)[..., :num_codes]
    shape = *lead, largest.TOGETHER, num_codes
    codes = lax.broadcast_in_dim(codes, shape, (*range(axis), axis + 1))
    place = lax.broadcasted_iota(np.uint32, shape, axis)
    return largest.elements(codes, place).reshape(*lead, size)


def rotated_values(
    levels: jax.Array, metadata: jax.Array, seed: jax.Array, bits: float
) -> jax.Array:
    """Values, float32 and perhaps infinite, from levels and metadata."""
    keys = noise.group_keys(seed, metadata & HIGH_HALF)
    scale = float_of(metadata << np.uint32(16)) * HALF
    fraction = group.fraction_bits(bits, levels.shape[-1])
    half = rotation.rotate_back(levels, keys, scale, fraction)
    mean = float_of(metadata & HIGH_HALF) * HALF
    return (mean[..., None] + half) * np.float32(2)

"""The rotated format, defined in plain JAX: the other implementations are judged by it.

A group's mean is taken off, the rest is rotated at random (see `rotation`), and each
rotated element becomes the nearest of the levels that are best for a normal, times one
scale for the group (DRIVE, Vargaftik et al. 2021, arXiv:2105.08339; EDEN, 2022,
arXiv:2108.08842):

    d    = x - m                              m: the mean, a bfloat16
    y    = R d                                R: two rounds of signs and Hadamard
    q    = the level nearest to y / deviation, with the sign of y
    x'   = m + s R^T q                        s = |y|^2 / <y, q>, a bfloat16

A code has `bits` bits: the level's number below, the sign above. At half a bit every
other 16 of a group's rotated elements have codes, of one bit, and q is 0 for the rest.
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

import math
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
from jaxact_kernels.rotated import adaptive, group, rotation
from jaxact_kernels.rotated.centered import (
    Frame,
    frame,
    mean as mean_of,
    power_of_two,
    real_elements,
    total,
)
from jaxact_kernels.rotated.group import EVERY_OTHER
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
    num_coded, bits = group.num_coded(layout.group, bits), group.code_bits(bits)
    groups = affine_reference.split(x, layout)
    ends = affine_reference.extremes(groups, x.dtype)
    grid = frame(ends, layout.group)
    groups = clipped(groups, grid)
    spare = adaptive.SPARE if is_adaptive else 0
    distances, mean = center(groups, grid, layout)
    squares = total(square(group.size(distances, layout.group)))
    options = seed, bits, num_coded, spare
    codes, metadata = rotated_codes(distances, squares, mean, grid, *options)
    plain = affine_group.metadata(*ends, bits, x.dtype, spare)
    fixed = affine_reference.fixed_point(
        groups, affine_group.encoding_line(ends[0], plain), bits
    )
    if is_adaptive:
        stochastic, count = total(adaptive.spread(fixed)), real_elements(layout)
        plain, is_rotated = adaptive.choose(
            grid, squares, stochastic, count, plain, layout.group, bits
        )
        metadata = metadata | adaptive.ROTATED
        draw = noise.sixteen_bits(noise.group_keys(seed, plain), layout.group)
    else:
        is_rotated = grid.is_ordinary
        draw = affine_reference.NEAREST  # only groups without noise are left
    plain_codes = affine_reference.round_fixed_point(fixed, draw)
    if layout.padding:  # is rotated like the rest; elsewhere its code is 0
        plain_codes = jnp.where(layout.is_real(), plain_codes, np.uint32(0))
    plain_codes = with_codes(plain_codes, num_coded)
    codes = jnp.where(is_rotated[..., None], codes, plain_codes)
    if num_coded % WORD_BITS:  # half of an odd number of words
        edges = [(0, 0, 0)] * is_rotated.ndim + [(0, EVERY_OTHER, 0)]
        codes = lax.pad(codes, np.uint32(0), edges)
    return words.pack(codes, bits), jnp.where(is_rotated, metadata, plain)


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
    num_coded, bits = group.num_coded(layout.group, bits), group.code_bits(bits)
    sizes = bits, layout.group, num_coded
    codes = words.unpack_slots(stored.words, bits)
    is_constant = affine_group.is_constant(metadata)
    if is_adaptive:
        clean = metadata & ~adaptive.ROTATED
        rotated = rotated_values(codes, clean, seed, *sizes)
        clean = jnp.where(is_constant, metadata, adaptive.without_flags(metadata))
        keys = noise.group_keys(seed, metadata)
        draw = noise.slots_of_bits(keys, codes.shape[keys.ndim :])
        dithered = affine_reference.dequantize_dithered(
            codes, clean, draw, np.float32, bits
        )
        plain = affine_reference.dequantize(codes, clean, np.float32)
        is_dithered = adaptive.is_dithered(metadata)
        plain = jnp.where(is_dithered[..., None], dithered, plain)
        is_plain = is_constant | ~adaptive.is_rotated(metadata)
    else:
        rotated = rotated_values(codes, metadata, seed, *sizes)
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
    bits: int,
    num_coded: int,
    spare: int,
) -> tuple[jax.Array, jax.Array]:
    """Codes, `uint32[*lead, num_groups, num_coded]`, and metadata, if rotated."""
    size = distances.shape[-1]
    keys = noise.group_keys(seed, mean)
    power = group.norm_exponent(squares, size)
    y = rotation.rotate(distances, keys, power_of_two(power))
    y = with_codes(y, num_coded)
    power = power + np.int32(rotation.FRACTION_BITS)
    bounds = group.thresholds(group.deviation(squares, size), power, bits)
    number = group.level_number(y, [bound[..., None] for bound in bounds], bits)
    sizes = abs(y).astype(np.int32).astype(np.uint32)
    products = total(sizes * group.level(number, bits))
    draw = rotation.spare_bits(keys, size)
    unit = power - grid.exponent + np.int32(2 * group.dropped_bits(size))
    scale = group.scale(squares.astype(np.uint32), products, unit, draw, spare)
    sign = (y < np.float32(0)).astype(np.uint32)  # zeros' signs differ with the order
    return number | sign << np.uint32(bits - 1), mean | scale


def first_codes(codes: jax.Array, metadata: jax.Array) -> jax.Array:
    """Each group's first code, `uint32[*lead, num_groups, 1]`: a constant's are alike.

    Args:
        codes: from `words.unpack_slots`.
    """
    limits = (*metadata.shape, *(1 for _ in codes.shape[metadata.ndim :]))
    first = lax.slice(codes, (0,) * codes.ndim, limits)
    return lax.reshape(first, (*metadata.shape, 1))


def with_codes(groups: jax.Array, num_coded: int) -> jax.Array:
    """The elements of groups that have codes: all, or every other 16."""
    *lead, size = groups.shape
    if size == num_coded:
        return groups
    pairs = lax.reshape(groups, (*lead, size // (2 * EVERY_OTHER), 2 * EVERY_OTHER))
    return lax.reshape(pairs[..., :EVERY_OTHER], (*lead, num_coded))


def with_zeros(coded: jax.Array, size: int) -> jax.Array:
    """Undo `with_codes`, with zeros for the elements that have none."""
    *lead, num_coded = coded.shape
    pairs = lax.reshape(coded, (*lead, num_coded // EVERY_OTHER, EVERY_OTHER))
    edges = [(0, 0, 0)] * (len(lead) + 1) + [(0, EVERY_OTHER, 0)]
    pairs = lax.pad(pairs, np.zeros((), coded.dtype), edges)
    return lax.reshape(pairs, (*lead, size))


def square(sizes: jax.Array) -> jax.Array:
    """Squares as `int32`."""
    return (sizes * sizes).astype(np.int32)


def rotated_values(
    codes: jax.Array,
    metadata: jax.Array,
    seed: jax.Array,
    bits: int,
    size: int,
    num_coded: int,
) -> jax.Array:
    """Values, float32 and perhaps infinite, from codes and metadata.

    Args:
        codes: from `words.unpack_slots`.
        size: elements in a group.
        num_coded: those that have codes; the others were 0 before they are rotated.
    """
    keys = noise.group_keys(seed, metadata & HIGH_HALF)
    sign = codes >> np.uint32(bits - 1) << np.uint32(31)
    number = codes & np.uint32(2 ** (bits - 1) - 1)
    level = group.level(number, bits).astype(np.int32).astype(np.float32)
    num_codes = math.prod(codes.shape[metadata.ndim :])
    level = float_of(pattern(level) | sign).reshape(*metadata.shape, num_codes)
    if num_coded < size:
        level = with_zeros(level[..., :num_coded], size)
    scale = float_of(metadata << np.uint32(16)) * HALF
    fraction = group.fraction_bits(bits, size)
    half = rotation.rotate_back(level, keys, scale, fraction)
    mean = float_of(metadata & HIGH_HALF) * HALF
    return (mean[..., None] + half) * np.float32(2)

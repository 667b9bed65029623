"""The rotated format, defined in plain JAX: the other implementations are judged by it.

A group's mean is taken off, the rest is rotated at random (see `rotation`), and each
rotated element becomes the nearest of the levels that are best for a normal, times one
scale for the group (DRIVE, Vargaftik et al. 2021, arXiv:2105.08339; EDEN, 2022,
arXiv:2108.08842):

    d    = x - m                              m: the mean, a bfloat16
    y    = R d                                R: two rounds of signs and Hadamard
    q    = the level nearest to y / deviation, with the sign of y
    x'   = m + s R^T q                        s = |y|^2 / <y, q>, a bfloat16

A code has `bits` bits: the level's number below, the sign above. The scale is the one
with which x' has the mean x over rotations; it is rounded to bfloat16 at random. The
mean is rounded freely: d is the difference to the rounded one.

In an *adaptive* array each group has the format that is expected to err least (see
`choice`): codes of the affine format, with stochastic rounding or with dither, or
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
from jaxact_kernels.affine import group as affine_group, reference as affine
from jaxact_kernels.affine.group import HIGH_HALF, float_of, pattern
from jaxact_kernels.layout import layout_of
from jaxact_kernels.rotated import choice, group, rotation
from jaxact_kernels.rotated.centred import (
    Centred,
    centre,
    exponent_of,
    integer_sizes,
    total,
)

HALF = np.float32(0.5)


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
    x: jax.Array, seed: jax.Array, *, bits: int, group_size: int, is_adaptive: bool
) -> tuple[jax.Array, jax.Array]:
    """Words and metadata; see `jaxact_kernels.rotated.encode`."""
    layout = layout_of(x.shape, group_size)
    groups = affine.split(x, layout)
    ends = affine.extremes(groups, x.dtype)
    centred = centre(groups, ends, layout)
    spare = choice.SPARE if is_adaptive else 0
    codes, metadata = rotated_codes(centred, seed, bits, spare)
    plain = affine_group.metadata(*ends, bits, x.dtype, spare)
    fixed = affine.fixed_point(groups, affine_group.encoding_line(ends[0], plain), bits)
    if is_adaptive:
        plain, is_rotated = choice.choose(centred, fixed, plain, layout, bits)
        metadata = metadata | choice.ROTATED
        draw = noise.sixteen_bits(noise.group_keys(seed, plain), layout.group)
    else:
        is_rotated = centred.is_ordinary
        draw = affine.NEAREST  # only groups without noise are left
    plain_codes = affine.round_fixed_point(fixed, draw)
    if layout.padding:  # is rotated like the rest; elsewhere its code is 0
        plain_codes = jnp.where(layout.is_real(), plain_codes, np.uint32(0))
    codes = jnp.where(is_rotated[..., None], codes, plain_codes)
    return words.pack(codes, bits), jnp.where(is_rotated, metadata, plain)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int,
    is_adaptive: bool,
) -> jax.Array:
    """See `jaxact_kernels.rotated.decode`."""
    layout = layout_of(shape, group_size)
    codes, metadata, seed = (
        words.unpack(stored.words, bits),
        stored.metadata,
        stored.seed,
    )
    is_constant = affine_group.is_constant(metadata)
    if is_adaptive:
        rotated = rotated_values(codes, metadata & ~choice.ROTATED, seed, bits)
        clean = jnp.where(is_constant, metadata, choice.without_flags(metadata))
        draw = noise.sixteen_bits(noise.group_keys(seed, metadata), layout.group)
        dithered = affine.dequantize_dithered(codes, clean, draw, np.float32, bits)
        plain = affine.dequantize(codes, clean, np.float32)
        is_dithered = choice.is_dithered(metadata)
        plain = jnp.where(is_dithered[..., None], dithered, plain)
        is_plain = is_constant | ~choice.is_rotated(metadata)
    else:
        rotated = rotated_values(codes, metadata, seed, bits)
        plain, is_plain = affine.dequantize(codes, metadata, np.float32), is_constant
    x = jnp.where(is_plain[..., None], plain, rotated)
    return layout.join(affine_group.saturated(x, dtype).astype(dtype), shape)


def rotated_codes(
    centred: Centred, seed: jax.Array, bits: int, spare: int
) -> tuple[jax.Array, jax.Array]:
    """Codes, `uint32[*lead, num_groups, group]`, and metadata for rotated groups."""
    size = centred.elements.shape[-1]
    keys = noise.group_keys(seed, centred.mean)
    y = rotation.rotate(centred.elements, keys)
    top = lax.reduce(abs(y), np.float32(0), lax.max, (y.ndim - 1,))
    exponent = exponent_of(top, least=-60)
    size_bits = group.size_bits(size)
    sizes = integer_sizes(y, exponent, size_bits)
    squares = total(sizes * sizes)
    number = group.level_numbers(sizes, group.deviation(squares, size), bits)
    products = total(sizes * group.level(number, bits))
    # One unit of a size is 2**(exponent + 1 - size_bits), of an element 2**(peak - 1).
    unit = exponent + centred.exponent - np.int32(size_bits)
    draw = rotation.spare_bits(keys, size)
    scale = group.scale(squares, products, unit, draw, spare)
    sign = pattern(y) >> np.uint32(31)
    return number | sign << np.uint32(bits - 1), centred.mean | scale


def rotated_values(
    codes: jax.Array, metadata: jax.Array, seed: jax.Array, bits: int
) -> jax.Array:
    """Values, float32 and perhaps infinite, from codes and metadata."""
    keys = noise.group_keys(seed, metadata & HIGH_HALF)
    sign = codes >> np.uint32(bits - 1) << np.uint32(31)
    number = codes & np.uint32(2 ** (bits - 1) - 1)
    level = group.level(number, bits).astype(np.int32).astype(np.float32)
    level = float_of(pattern(level) | sign)
    scale = float_of(metadata << np.uint32(16)) * HALF
    half = rotation.rotate_back(level, keys, scale)
    mean = float_of(metadata & HIGH_HALF) * HALF
    return (mean[..., None] + half) * np.float32(2)

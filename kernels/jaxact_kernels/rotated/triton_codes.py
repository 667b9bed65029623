"""From elements to codes in the rotated format's Triton kernels, and back, by tiles.

The steps in `reference`, with one tile from every group in a block at a time.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine import group as affine_group
from jaxact_kernels.affine.group import HALF, HIGH_HALF, float_of, pattern, small_float
from jaxact_kernels.affine.triton_codes import first_counter, noise_for
from jaxact_kernels.block import Block, TileNumber
from jaxact_kernels.rotated import adaptive, group, rotation
from jaxact_kernels.rotated.centered import (
    MAGIC,
    MAGIC_BITS,
    Frame,
    as_integer,
    mean as mean_of,
    power_of_two,
)
from jaxact_kernels.rotated.group import HALF_BIT
from jaxact_kernels.rotated.triton_largest import largest_codes, largest_elements
from jaxact_kernels.rotated.triton_tiles import flip, transform
from jaxact_kernels.tiles import integer_sum

Tile = jax.Array


def centered(
    block: Block, grid: Frame, xs: Sequence[Tile]
) -> tuple[list[Tile], jax.Array]:
    """Distances from the means in steps, integers as float32; and the means' bits."""
    middle, unit = block.spread(grid.middle), block.spread(power_of_two(grid.exponent))
    sums = [lax.add(lax.mul(lax.sub(x, middle), unit), MAGIC) for x in xs]
    real = [unless_padding(block, k, as_integer(x)) for k, x in enumerate(sums)]
    total = sum_over_group(real)
    mean, offset = mean_of(grid, total, _inverse(block))
    away = block.spread(lax.add(offset, MAGIC))
    distances = (lax.sub(x, away) for x in sums)
    distances = [unless_padding(block, k, x) for k, x in enumerate(distances)]
    return distances, pattern(mean)


def rotated_codes(
    block: Block,
    distances: list[Tile],
    squares: jax.Array,
    mean: jax.Array,
    grid: Frame,
    draw: noise.Draw,
    bits: float,
    is_adaptive: bool,
    interpret: bool,
) -> tuple[list[Tile], jax.Array]:
    """Codes and metadata; see `reference.rotated_codes`."""
    size = block.tiles.layout.group
    norm, fraction = np.float32(size**-0.5), rotation.FRACTION_BITS
    key = _key(block, draw, mean)
    power = group.norm_exponent(squares, size)
    unit = block.spread(lax.mul(power_of_two(power), norm))
    y = transform(block, flip(block, distances, key, 0))
    y = [_rounded(lax.mul(v, unit), interpret) for v in y]
    y = transform(block, flip(block, y, key, 1))
    factor = norm * np.float32(2.0**fraction)
    if factor != 1:
        y = [_rounded(lax.mul(v, factor), interpret) for v in y]
    power = lax.add(power, np.int32(fraction))
    if bits == HALF_BIT:
        codes, products = largest_codes(block, y)
    else:
        bounds = group.thresholds(group.deviation(squares, size), power, int(bits))
        codes, products = _level_codes(y, [block.spread(b) for b in bounds], int(bits))
    products = sum_over_group(products).astype(np.uint32)
    unit = power - grid.exponent + np.int32(2 * group.dropped_bits(size))
    chance, spare = rotation.spare_bits(key, size), adaptive.SPARE if is_adaptive else 0
    scale = group.scale(squares.astype(np.uint32), products, unit, chance, spare)
    return codes, lax.bitwise_or(mean, scale)


def _level_codes(
    y: list[Tile], bounds: list[Tile], bits: int
) -> tuple[list[Tile], list[Tile]]:
    """Codes of the nearest levels, and these times the elements, `int32`."""
    numbers = [group.level_number(v, bounds, bits) for v in y]
    sizes = [as_integer(lax.add(lax.abs(v), MAGIC)) for v in y]
    levels = [group.level(number, bits).astype(np.int32) for number in numbers]
    products = [lax.mul(a, b) for a, b in zip(sizes, levels, strict=True)]
    # No zero is negative: sums of products begin with +0, and so does `_rounded`.
    sign = lambda v: lax.shift_right_logical(pattern(v), np.uint32(31))
    top = lambda v: (
        lax.shift_left(sign(v), np.uint32(bits - 1)) if bits > 1 else sign(v)
    )
    codes = [lax.bitwise_or(n, top(v)) for n, v in zip(numbers, y, strict=True)]
    return codes, products


def rotated_values(
    block: Block,
    codes: list[Tile],
    metadata: jax.Array,
    draw: noise.Draw,
    bits: float,
    is_adaptive: bool,
    interpret: bool,
) -> list[Tile]:
    """Values, float32 and perhaps infinite; see `reference.rotated_values`."""
    size = block.tiles.layout.group
    metadata = metadata & ~adaptive.ROTATED if is_adaptive else metadata
    mean = lax.bitwise_and(metadata, HIGH_HALF)
    key = _key(block, draw, mean)
    norm, fraction = np.float32(size**-0.5), group.fraction_bits(bits, size)
    factor = norm * np.float32(2.0**fraction)
    if bits == HALF_BIT:
        levels = largest_elements(block, codes)
    else:
        levels = [_signed_level(code, int(bits)) for code in codes]
    y = transform(block, levels)
    y = [_rounded(lax.mul(v, factor), interpret) for v in y]
    y = transform(block, flip(block, y, key, 1))
    scale = lax.mul(float_of(lax.shift_left(metadata, np.uint32(16))), HALF)
    scale = block.spread(lax.mul(scale, norm * np.float32(2.0**-fraction)))
    half = flip(block, [lax.mul(v, scale) for v in y], key, 0)
    middle = block.spread(lax.mul(float_of(mean), HALF))
    return [lax.mul(lax.add(middle, v), np.float32(2)) for v in half]


def plain_values(
    block: Block, metadata: jax.Array, draw: noise.Draw, is_adaptive: bool
) -> Callable[[jax.Array, Tile], Tile]:
    """From (tile number, codes) to values in the affine format, float32."""
    clean = metadata
    if is_adaptive:
        is_constant = affine_group.is_constant(metadata)
        clean = lax.select(is_constant, metadata, adaptive.without_flags(metadata))
        keeps = lax.bitwise_or(
            is_constant, lax.bitwise_not(adaptive.is_dithered(metadata))
        )
        keeps = block.spread(keeps)
        counter = first_counter(block, draw, metadata)
    zero, step, unit = (block.spread(end) for end in affine_group.decoding_line(clean))

    def value(k: jax.Array, code: Tile) -> Tile:
        multiple = small_float(code)
        if is_adaptive:
            noise16 = noise_for(block, counter, k)
            other = affine_group.dithered(code, noise16, block.tiles.bits)
            multiple = lax.select(keeps, multiple, other)
        return lax.mul(lax.add(zero, lax.mul(step, multiple)), unit)

    return value


def _signed_level(code: Tile, bits: int) -> Tile:
    number = lax.bitwise_and(code, np.uint32(2 ** (bits - 1) - 1))
    level = group.level_value(number, bits)
    sign = lax.shift_left(
        lax.shift_right_logical(code, np.uint32(bits - 1)), np.uint32(31)
    )
    return float_of(lax.bitwise_or(pattern(level), sign))


def _key(block: Block, draw: noise.Draw, metadata: jax.Array) -> jax.Array:
    number = lax.convert_element_type(block.number, np.uint32)
    return noise.shard_key(draw, number, metadata)


def _rounded(x: Tile, interpret: bool) -> Tile:
    if interpret:  # XLA:CPU may contract the product that x is with a sum
        x = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
        return x.astype(np.int32).astype(np.float32)
    return lax.sub(lax.add(x, MAGIC), MAGIC)


def square(distance: Tile, dropped: int) -> Tile:
    """Squared sizes; a size is a distance without its lowest bits, rounded."""
    magic = MAGIC * np.float32(2.0**dropped)
    size = lax.sub(
        pattern(lax.add(distance, magic)), MAGIC_BITS + np.uint32(dropped << 23)
    )
    size = lax.bitcast_convert_type(size, np.int32)
    return lax.mul(size, size)


def sum_over_group(tiles: Sequence[Tile]) -> jax.Array:
    """Sums over groups, `int32`."""
    return integer_sum(functools.reduce(lax.add, tiles))


def unless_padding(block: Block, k: TileNumber, tile: Tile) -> Tile:
    """Tile `k`, 0 where the array has no element."""
    is_real = block.is_real(k) if block.tiles.layout.padding else None
    if is_real is None:
        return tile
    return lax.select(is_real, tile, lax.full_like(tile, 0))


def count(block: Block) -> jax.Array | np.uint32:
    """How many elements of each group are no padding, `uint32`."""
    layout = block.tiles.layout
    if not layout.padding:
        return np.uint32(layout.group)
    full = lax.full_like(block.number, layout.group, np.uint32)
    last = lax.full_like(block.number, layout.group - layout.padding, np.uint32)
    return lax.select(_is_last(block), last, full)


def _inverse(block: Block) -> jax.Array | np.float32:
    """Of that, float32."""
    layout = block.tiles.layout
    if not layout.padding:
        return np.float32(1 / layout.group)
    full = lax.full_like(block.number, 1 / layout.group, np.float32)
    last = lax.full_like(block.number, 1 / (layout.group - layout.padding), np.float32)
    return lax.select(_is_last(block), last, full)


def _is_last(block: Block) -> jax.Array:
    """Whether a group is a row's last."""
    groups = np.int32(block.tiles.layout.num_groups)
    return lax.eq(lax.rem(block.number, groups), groups - np.int32(1))

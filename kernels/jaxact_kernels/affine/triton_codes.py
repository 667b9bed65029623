"""From elements to codes in the affine format's Triton kernels, tile by tile.

Fixed point, then 16 bits of noise, then a shift: the steps in `reference`, with one
tile from every group in a block at a time.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine import group
from jaxact_kernels.affine.group import MAGIC, nearest_integer, small_float
from jaxact_kernels.affine.reference import NEAREST
from jaxact_kernels.block import Block, TileNumber

Tile = jax.Array  # elements, one tile from every group in a block


def fixed_point(block: Block, line: group.Line) -> Callable[[Tile], Tile]:
    """Real-valued codes in units of 2**-16, clipped, as integers; see `reference`."""
    half_zero, slope, base = (block.spread(end) for end in line)
    top = np.float32((2**block.tiles.bits - 1) * 65536)

    def fixed(x: Tile) -> Tile:
        t = lax.mul(lax.sub(lax.mul(x, np.float32(0.5)), half_zero), slope)
        t = group.put(np.float32(0), lax.bitwise_not(lax.gt(t, np.float32(0))), t)
        return lax.add(_rounded(lax.min(t, top), block.tiles.bits), base)

    return fixed


def ordinary_fixed_point(
    block: Block, line: group.Line, *, is_contracted: bool
) -> Callable[[Tile], Tile]:
    """The same for ordinary numbers: nothing overflows and nothing needs clipping.

    x <= hi gives t <= top: half the range is at most s * steps / 2, an exact float32;
    that times the slope, 2**17 / s within 2**-24, rounds to top.
    """
    half_zero, slope, base = line
    zero = block.spread(lax.mul(half_zero, np.float32(2)))
    slope = block.spread(lax.mul(slope, np.float32(0.5)))
    base = block.spread(base)

    def fixed(x: Tile) -> Tile:
        t = lax.mul(lax.sub(x, zero), slope)
        if is_contracted:
            # Triton rounds every product. XLA:CPU, which runs interpreted kernels, may
            # contract this one with the sum that follows; not through a maximum.
            t = lax.max(t, np.float32(0))
        return lax.add(_rounded(t, block.tiles.bits), base)

    return fixed


def _rounded(t: jax.Array, bits: int) -> jax.Array:
    """The nearest integer, ties to even, as `uint32`, for 0 <= t < 2**(bits + 16)."""
    if bits < 8:
        return nearest_integer(t)
    is_upper = lax.ge(t, MAGIC)
    lower = lax.select(is_upper, lax.sub(t, MAGIC), t)
    upper = lax.shift_left(lax.convert_element_type(is_upper, np.uint32), np.uint32(23))
    return lax.add(nearest_integer(lower), upper)


def round_tiles(
    block: Block,
    xs: list[Tile],
    fixed: Callable[[Tile], Tile],
    draw: noise.Draw | None,
    own: jax.Array,
) -> list[Tile]:
    """Round fixed-point codes to integers, tile by tile, with noise from `noise`."""
    half = block.tiles.count // 2
    counter = first_counter(block, draw, own)
    codes: list = [None] * block.tiles.count
    for k in range(half):
        low = high = NEAREST
        if counter is not None:
            low, high = _noise_pair(block, counter, k)
        for tile, noise16 in ((k, low), (k + half, high)):
            t = fixed(to_float32(xs[tile]))
            codes[tile] = round_tile(block, tile, t, noise16)
    return codes


def dithered_tiles(
    block: Block, codes: list[Tile], draw: noise.Draw, metadata: jax.Array
) -> list[Tile]:
    """Codes less the noise that `round_tiles` rounded with, as float32."""
    half = block.tiles.count // 2
    counter = first_counter(block, draw, metadata)
    assert counter is not None
    is_constant = block.spread(group.is_constant(metadata))
    dithered = list(codes)
    for k in range(half):
        pair = _noise_pair(block, counter, k)
        for tile, noise16 in zip((k, k + half), pair, strict=True):
            value = group.dithered(codes[tile], noise16, block.tiles.bits)
            dithered[tile] = lax.select(is_constant, small_float(codes[tile]), value)
    return dithered


def round_tile(
    block: Block, k: TileNumber, fixed: Tile, noise16: jax.Array | np.uint32
) -> Tile:
    """Round the fixed-point codes in tile `k` to integers; padding gets code 0."""
    code = lax.shift_right_logical(lax.add(fixed, noise16), np.uint32(16))
    is_real = block.is_real(k)
    if block.tiles.layout.padding and is_real is not None:
        code = lax.select(is_real, code, lax.full_like(code, 0))
    return code


def first_counter(block: Block, draw: noise.Draw | None, own: jax.Array) -> Tile | None:
    """Counters whose hashes are noise for the first tile; None for no noise.

    Each group's `own` bits are from `noise.own_bits`.
    """
    if draw is None:
        return None
    number = lax.convert_element_type(block.number, np.uint32)
    key = noise.shard_key(draw, number, own)
    column = lax.convert_element_type(block.column, np.uint32)
    return lax.add(block.spread(key), lax.mul(column, noise.GOLDEN))


def _noise_pair(block: Block, counter: Tile, k: int) -> tuple[Tile, Tile]:
    """Noise for tile `k`, and for the tile half a group later."""
    return noise.halves(noise.hash32(lax.add(counter, _step(block, k))))


def _step(block: Block, k: int) -> np.uint32:
    """How far tile `k` is from the first in counters; its hashes serve two tiles."""
    return np.uint32(k * block.tiles.width * int(noise.GOLDEN) % 2**32)


def noise_for(
    block: Block, counter: Tile | None, k: jax.Array
) -> jax.Array | np.uint32:
    """Noise for tile `k`, which may be traced."""
    if counter is None:
        return NEAREST
    half = np.int32(block.tiles.count // 2)
    is_upper, k = lax.div(k, half), lax.rem(k, half)
    step = lax.mul(lax.convert_element_type(k, np.uint32), _step(block, 1))
    bits = noise.hash32(lax.add(counter, step))
    shift = lax.convert_element_type(is_upper, np.uint32) * np.uint32(16)
    bits = lax.shift_right_logical(bits, lax.full_like(bits, shift))
    return lax.bitwise_and(bits, noise.LOW_HALF)


def to_float32(x: Tile) -> Tile:
    """Widen elements; codes are computed in float32."""
    return lax.convert_element_type(x, np.float32)

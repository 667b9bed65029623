"""Tiles for rotation on tensor cores, and their transforms.

A group is cut into tiles with 16 elements, the depth of one instruction for a product
of matrices: it transforms each tile, and additions from tile to tile, element by
element, do the rest. No element moves between threads but inside a product.
"""

import dataclasses

import jax
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine.group import float_of, pattern
from jaxact_kernels.block import Block
from jaxact_kernels.layout import Layout
from jaxact_kernels.rotated import group, rotation
from jaxact_kernels.tiles import Tiles
from jaxact_kernels.words import WORD_BITS

WIDTH = group.EVERY_OTHER  # at half a bit a tile has codes or has none


def rotated_tiles(layout: Layout, bits: float, groups: int) -> tuple[Tiles, Tiles]:
    """Tiles with 16 elements, whatever the width of codes: all, and those with codes.

    At half a bit only every other tile has codes. These are packed like whole groups.
    """
    num_coded = group.num_coded(layout.group, bits)
    coded = dataclasses.replace(layout, group=num_coded)
    width, count = group.code_bits(bits), num_coded // WIDTH
    tiles = Tiles(layout, width, groups, layout.group // WIDTH)
    return tiles, Tiles(coded, width, groups, count)


def transform(block: Block, tiles: list[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform of groups of integers with 11 significant bits.

    Given every other tile, the rest is 0.
    """
    matrix = _matrix()
    numbers = (((1,), (0,)), ((), ()))
    product = lambda tile: lax.dot_general(
        lax.convert_element_type(tile, np.float16),
        matrix,
        numbers,
        preferred_element_type=np.float32,
    )
    transformed = rotation.butterflies([product(tile) for tile in tiles])
    if len(tiles) == block.tiles.count:
        return transformed
    # A butterfly of a tile and one that is 0 has the first twice.
    return [twice for tile in transformed for twice in (tile, tile)]


def flip(
    block: Block, tiles: list[jax.Array], key: jax.Array, number: int
) -> list[jax.Array]:
    """Change signs at random; see `rotation`."""
    size = block.tiles.layout.group // WORD_BITS
    column = lax.broadcasted_iota(np.uint32, block.shape, 1)
    word = lax.add(lax.rem(column, np.uint32(size)), np.uint32(number * size))
    hashes = noise.hash32(lax.add(block.spread(key), lax.mul(word, noise.GOLDEN)))
    hashes = lax.shift_right_logical(hashes, lax.div(column, np.uint32(size)))
    return [_flipped(x, hashes, k * WIDTH // size) for k, x in enumerate(tiles)]


def _flipped(x: jax.Array, hashes: jax.Array, bit: int) -> jax.Array:
    sign = lax.shift_left(hashes, np.uint32(31 - bit))
    sign = lax.bitwise_and(sign, np.uint32(1 << 31))
    return float_of(lax.bitwise_xor(pattern(x), sign))


def _matrix() -> jax.Array:
    """The Hadamard matrix of a tile, float16, computed in registers."""
    shape = (WIDTH, WIDTH)
    both = lax.bitwise_and(
        lax.broadcasted_iota(np.int32, shape, 0),
        lax.broadcasted_iota(np.int32, shape, 1),
    )
    for distance in (2, 1):
        shifted = lax.shift_right_logical(both, np.int32(distance))
        both = lax.bitwise_xor(both, shifted)
    odd = lax.bitwise_and(both, np.int32(1))
    one = lax.sub(np.int32(1), lax.mul(odd, np.int32(2)))
    return lax.convert_element_type(one, np.float16)

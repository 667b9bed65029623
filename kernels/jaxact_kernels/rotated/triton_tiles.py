"""Tiles for rotation on tensor cores, and their transforms.

A group is cut into tiles with 16 elements, the depth of one instruction for a product
of matrices: it transforms each tile, and additions from tile to tile, element by
element, do the rest. No element moves between threads but inside a product.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine.group import float_of, pattern
from jaxact_kernels.block import Block
from jaxact_kernels.layout import Layout
from jaxact_kernels.rotated import group, largest, rotation
from jaxact_kernels.tiles import Tiles
from jaxact_kernels.words import WORD_BITS

WIDTH = 16  # of a tile


class GroupTiles(NamedTuple):
    """How the groups in a block are cut.

    Attributes:
        elements: tiles with 16 elements, whatever the width of codes.
        codes: of rotated groups.
        plain: codes of other groups; half as many as elements at half a bit.
    """

    elements: Tiles
    codes: Tiles
    plain: Tiles


def rotated_tiles(layout: Layout, bits: float, groups: int) -> GroupTiles:
    """The tiles for codes with `bits` bits an element, from `group.group_bits`."""
    width, size = group.affine_bits(bits), layout.group

    def tiles(width: int, size: int) -> Tiles:
        part = dataclasses.replace(layout, group=size)
        return Tiles(part, width, groups, max(1, size // WIDTH))

    elements = tiles(width, size)
    if bits != group.HALF_BIT:
        return GroupTiles(elements, elements, elements)
    codes = tiles(largest.CODE_BITS, size // largest.TOGETHER)
    return GroupTiles(elements, codes, tiles(width, size // 2))


def transform(block: Block, tiles: list[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform of groups of integers with 11 significant bits."""
    matrix = _matrix()
    numbers = (((1,), (0,)), ((), ()))
    product = lambda tile: lax.dot_general(
        lax.convert_element_type(tile, np.float16),
        matrix,
        numbers,
        preferred_element_type=np.float32,
    )
    return rotation.butterflies([product(tile) for tile in tiles])


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

"""Codes for eight elements in the rotated format's Triton kernels; see `largest`.

Tile k has 16 elements, 16 k to 16 k + 15. In a group with 128 or more an element's
place among its eight is decided by its tile: a thread has all eight. In a smaller one a
tile has several places, side by side.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.block import Block
from jaxact_kernels.rotated import largest
from jaxact_kernels.rotated.largest import TOGETHER

Tile = jax.Array


def largest_codes(block: Block, y: list[Tile]) -> tuple[list[Tile], list[Tile]]:
    """Codes, and products with elements; in tiles with up to 16 columns."""
    apart, beside = _tiles_apart(block), _places_in_tile(block)
    keys = [largest.keys(tile, _places(block, k)) for k, tile in enumerate(y)]
    each = [functools.reduce(lax.max, keys[first::apart]) for first in range(apart)]
    if beside > 1:
        (key,) = each
        shape = block.shape[0], beside, block.shape[1] // beside
        each = [jnp.max(lax.reshape(key, shape), 1)]
    codes, products = zip(*map(largest.codes_and_products, each), strict=True)
    return list(codes), list(products)


def largest_elements(block: Block, codes: list[Tile]) -> list[Tile]:
    """From tiles of codes to tiles of what vectors have at each place, float32."""
    beside = _places_in_tile(block)
    if beside > 1:
        repeated = block.shape[0], beside, block.shape[1] // beside
        codes = [lax.broadcast_in_dim(code, repeated, (0, 2)) for code in codes]
        codes = [lax.reshape(code, block.shape) for code in codes]
    return [
        largest.elements(codes[k % len(codes)], _places(block, k))
        for k in range(block.tiles.count)
    ]


def _places(block: Block, k: int) -> Tile:
    """The places, among eight, of the elements in a tile, `uint32`."""
    beside = _places_in_tile(block)
    first = np.uint32(k // _tiles_apart(block) * beside)
    if beside == 1:
        return lax.full(block.shape, first, np.uint32)
    column = lax.broadcasted_iota(np.uint32, block.shape, 1)
    return lax.add(lax.div(column, np.uint32(block.shape[1] // beside)), first)


def _tiles_apart(block: Block) -> int:
    """How many tiles after one has the next place."""
    return max(1, block.tiles.count // TOGETHER)


def _places_in_tile(block: Block) -> int:
    return max(1, TOGETHER // block.tiles.count)

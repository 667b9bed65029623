"""Tiles for rotation on tensor cores, and their transforms.

A group is cut into tiles with 16 elements, the depth of one instruction for a product
of matrices: it transforms each tile, and additions from tile to tile, element by
element, do the rest. No element moves between threads but inside a product.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine.group import float_of, pattern
from jaxact_kernels.block import Block
from jaxact_kernels.rotated import rotation
from jaxact_kernels.rotated.group import EVERY_OTHER
from jaxact_kernels.tiles import Tiles, cut_field
from jaxact_kernels.words import WORD_BITS

WIDTH = EVERY_OTHER  # at half a bit a tile has codes or has none


@dataclasses.dataclass(frozen=True)
class RotatedTiles(Tiles):
    """Tiles with 16 elements, whatever the width of codes.

    A field has a word for every `words_of(field width)` elements. Where that is less
    than a tile's width, several columns share a word, and are joined last.

    Attributes:
        num_coded: how many of a group's elements have codes.
    """

    num_coded: int

    @property
    def count(self) -> int:
        """Tiles in a group."""
        return self.layout.group // WIDTH

    @property
    def width(self) -> int:
        """Elements in a tile."""
        return WIDTH

    @property
    def step(self) -> int:
        """From a tile that has codes to the next: every tile has, or every other."""
        return self.layout.group // self.num_coded

    @property
    def coded(self) -> range:
        """The tiles that have codes."""
        return range(0, self.count, self.step)

    @property
    def num_words(self) -> int:
        """Words that a group's codes take."""
        return self.words_of(self.bits)

    def words_of(self, field: int) -> int:
        """Words that a field with so many bits takes in a group."""
        return self.num_coded * field // WORD_BITS

    def pack(self, codes: list[jax.Array]) -> list[jax.Array]:
        """Pack the coded tiles' codes: an array for each entry in `first_words`."""
        packed = []
        for _, offset, width in self._fields():
            repeats = self._repeats(width)
            for m in range(repeats):
                terms = [
                    lax.shift_left(
                        cut_field(codes[k], offset, width, self.bits),
                        np.uint32(k // repeats * self._step(width)),
                    )
                    for k in range(m, len(codes), repeats)
                ]
                packed.append(functools.reduce(lax.bitwise_or, terms))
        return self.join(packed)

    def pack_one(
        self, k: jax.Array, code: jax.Array, packed: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Add tile `k`, an `int32` that may be traced, to words; `join` them last."""
        added = []
        for _, offset, width in self._fields():
            field = cut_field(code, offset, width, self.bits)
            field = lax.shift_left(field, lax.full_like(field, self._shift(k, width)))
            part = lax.rem(k, np.int32(self._repeats(width)))
            for m in range(self._repeats(width)):
                is_part = lax.full_like(field, lax.eq(part, np.int32(m)), np.bool_)
                words = packed[len(added)]
                added.append(lax.select(is_part, lax.bitwise_or(words, field), words))
        return tuple(added)

    def unpack(self, k: int, words: dict[int, jax.Array]) -> jax.Array:
        """Return the codes in tile `k`, from words by `first_words`."""
        code = None
        for start, offset, width in self._fields():
            repeats = self._repeats(width)
            shift = np.uint32(k // repeats * self._step(width))
            word = words[start + k % repeats * WIDTH]
            code = _with_field(code, word, shift, offset, width)
        assert code is not None
        return code

    def unpack_one(self, k: jax.Array, words: dict[int, jax.Array]) -> jax.Array:
        """The same for a `k` that is traced."""
        code = None
        for start, offset, width in self._fields():
            word = words[start]
            part = lax.rem(k, np.int32(self._repeats(width)))
            for m in range(1, self._repeats(width)):
                is_part = lax.full_like(word, lax.eq(part, np.int32(m)), np.bool_)
                word = lax.select(is_part, words[start + m * WIDTH], word)
            shift = lax.full_like(word, self._shift(k, width))
            code = _with_field(code, word, shift, offset, width)
        assert code is not None
        return code

    def join(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Join the columns that share a word."""
        fields = [
            width for *_, width in self._fields() for _ in range(self._repeats(width))
        ]
        return [self._join(a, width) for a, width in zip(packed, fields, strict=True)]

    def first_words(self) -> list[int]:
        """Where, in a group's words, each array that `pack` returns starts."""
        return [
            start + m * WIDTH
            for start, _, width in self._fields()
            for m in range(self._repeats(width))
        ]

    def widths(self) -> list[int]:
        """Words in each array that `pack` returns."""
        return [
            min(self.words_of(width), WIDTH)
            for _, _, width in self._fields()
            for _ in range(self._repeats(width))
        ]

    def _repeats(self, width: int) -> int:
        """Tiles, one after another, whose fields are in different words."""
        return max(1, self.words_of(width) // WIDTH)

    def _step(self, width: int) -> int:
        """By how many bits the fields of so many tiles lie above those before."""
        return max(1, WIDTH // self.words_of(width)) * width

    def _shift(self, k: jax.Array, width: int) -> jax.Array:
        slot = lax.div(k, np.int32(self._repeats(width)))
        shift = lax.mul(slot, np.int32(self._step(width)))
        return lax.convert_element_type(shift, np.uint32)

    def _join(self, words: jax.Array, width: int) -> jax.Array:
        """Words of columns that share one, joined."""
        size = self.words_of(width)
        if size >= WIDTH:
            return words
        words = lax.shift_left(words, column_slot(words.shape, size, width))
        parts = lax.reshape(words, (self.groups, WIDTH // size, size))
        parts = lax.bitcast_convert_type(parts, np.int32)
        return lax.bitcast_convert_type(jnp.sum(parts, axis=1), np.uint32)


def column_slot(shape: tuple[int, ...], size: int, width: int) -> jax.Array:
    """By how many bits a column's field lies above the first that shares its word."""
    column = lax.broadcasted_iota(np.uint32, shape, 1)
    return lax.mul(lax.div(column, np.uint32(size)), np.uint32(width))


def transform(block: Block, tiles: list[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform of groups of integers with 11 significant bits.

    Given tiles with codes alone, the others are 0.
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


def _with_field(
    code: jax.Array | None,
    word: jax.Array,
    shift: jax.Array | np.uint32,
    offset: int,
    width: int,
) -> jax.Array:
    """A code with one more field, which lies above `shift` in a word."""
    field = lax.shift_right_logical(word, shift)
    field = lax.bitwise_and(field, np.uint32((1 << width) - 1))
    field = lax.shift_left(field, np.uint32(offset)) if offset else field
    return field if code is None else lax.bitwise_or(code, field)

"""How a GPU kernel cuts groups, so that packing moves few elements between threads.

A group is cut into `count` tiles of consecutive elements. A field that is f bits wide
takes group * f / 32 words (see `words`). In a tile with no more elements than that,
each column has words of its own: a thread that holds one column from all tiles packs
them alone, with shifts and ORs. Wider tiles are fewer, so that a kernel compiles faster
and loads more bytes at a time, but several columns share a word there: they are joined
last, by one sum of the words.

Triton's arrays have powers of two as their axes. Columns that share no word in the
narrowest field are therefore a *run*, filled up to a power of two, and a tile is its
runs one after another: columns that share a word are a fixed number of columns apart.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.layout import Layout
from jaxact_kernels.words import WORD_BITS, fields, shift_left


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles into which a block's groups are cut.

    Attributes:
        layout: how groups lie in the array.
        bits: in a code.
        groups: in a block, a power of two.
        count: tiles in a group, a power of two.
    """

    layout: Layout
    bits: int
    groups: int
    count: int

    @property
    def width(self) -> int:
        """Elements in a tile."""
        return self.layout.group // self.count

    @property
    def run(self) -> int:
        """Consecutive elements in a tile that share no word."""
        return min(self.width, self._words_of(self.bits & -self.bits))

    @property
    def padded_run(self) -> int:
        """Columns for a run."""
        return 1 << (self.run - 1).bit_length()

    @property
    def padded_width(self) -> int:
        """Columns for a tile."""
        return self._columns(self.width)

    @property
    def num_blocks(self) -> int:
        """Blocks in the array; the last may lack some groups."""
        return -(-self.layout.total_groups // self.groups)

    def pack(self, codes: list[jax.Array]) -> list[jax.Array]:
        """Pack the tiles' codes: an array for each entry in `first_words`."""
        packed = []
        for _, offset, width in self._placed_fields():
            apart = self._tiles_apart(width)
            for m in range(apart):
                terms = [
                    shift_left(
                        cut_field(codes[k], offset, width, self.bits),
                        k // apart * self._step(width),
                    )
                    for k in range(m, self.count, apart)
                ]
                packed.append(functools.reduce(lax.bitwise_or, terms))
        return self.join(packed)

    def pack_one(
        self, k: jax.Array, code: jax.Array, packed: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Add tile `k`, an `int32` that may be traced, to words; `join` them last.

        `packed` has an array, shaped like a tile, for each entry in `first_words`, zero
        before the first tile.
        """
        added = []
        for _, offset, width in self._placed_fields():
            field = cut_field(code, offset, width, self.bits)
            shift = lax.full_like(field, self._field_shift(k, width))
            field = lax.shift_left(field, shift)
            part = lax.rem(k, np.int32(self._tiles_apart(width)))
            for m in range(self._tiles_apart(width)):
                is_part = lax.full_like(field, lax.eq(part, np.int32(m)), np.bool_)
                words = packed[len(added)]
                added.append(lax.select(is_part, lax.bitwise_or(words, field), words))
        return tuple(added)

    def join(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """Join the columns that share a word."""
        pairs = zip(packed, self._field_of_each(), strict=True)
        return [self._join(words, width) for words, width in pairs]

    def slots(self) -> list[tuple[int, int]]:
        """For each array that `pack` returns, its columns and the bits in its field."""
        return [(self.columns_of(width), width) for width in self._field_of_each()]

    def unpack(self, k: int, words: dict[int, jax.Array]) -> jax.Array:
        """Return the codes in tile `k`, from words by `first_words`.

        A column's lowest field is at bit 0: shared words are shifted first.
        """
        code = None
        for start, offset, width in self._placed_fields():
            apart = self._tiles_apart(width)
            shift = k // apart * self._step(width)
            word = words[start + k % apart * self.width]
            is_last = shift + width == WORD_BITS
            field = _field(word, np.uint32(shift), offset, width, is_last)
            code = field if code is None else lax.bitwise_or(code, field)
        assert code is not None
        return code

    def unpack_one(self, k: jax.Array, words: dict[int, jax.Array]) -> jax.Array:
        """The same for a `k` that is traced."""
        code = None
        for start, offset, width in self._placed_fields():
            word = words[start]
            part = lax.rem(k, np.int32(self._tiles_apart(width)))
            for m in range(1, self._tiles_apart(width)):
                is_part = lax.full_like(word, lax.eq(part, np.int32(m)), np.bool_)
                word = lax.select(is_part, words[start + m * self.width], word)
            shift = lax.full_like(word, self._field_shift(k, width))
            field = _field(word, shift, offset, width)
            code = field if code is None else lax.bitwise_or(code, field)
        assert code is not None
        return code

    def first_words(self) -> list[int]:
        """Where, in a group's words, each array that `pack` returns starts."""
        return [
            start + m * self.width
            for start, _, width in self._placed_fields()
            for m in range(self._tiles_apart(width))
        ]

    def columns_of(self, width: int) -> int:
        """Columns that do not share a word in a field with so many bits."""
        return self._columns(min(self._words_of(width), self.width))

    def _placed_fields(self) -> list[tuple[int, int, int]]:
        """List (first word, offset in the code, width) for each field."""
        return [
            (self._words_of(offset), offset, width)
            for offset, width in fields(self.bits)
        ]

    def _field_of_each(self) -> list[int]:
        return [
            width
            for *_, width in self._placed_fields()
            for _ in range(self._tiles_apart(width))
        ]

    def _words_of(self, bits: int) -> int:
        """Words that so many bits of every code take in a group."""
        return self.layout.group * bits // WORD_BITS

    def _columns(self, elements: int) -> int:
        """Columns for so many elements, whole runs."""
        return elements // self.run * self.padded_run

    def _tiles_apart(self, width: int) -> int:
        """Tiles, one after another, whose fields are in different words."""
        return max(1, self._words_of(width) // self.width)

    def _step(self, width: int) -> int:
        """By how many bits the fields of so many tiles lie above those before."""
        return max(1, self.width // self._words_of(width)) * width

    def _field_shift(self, k: jax.Array, width: int) -> jax.Array:
        slot = lax.div(k, np.int32(self._tiles_apart(width)))
        shift = lax.mul(slot, np.int32(self._step(width)))
        return lax.convert_element_type(shift, np.uint32)

    def _join(self, words: jax.Array, width: int) -> jax.Array:
        columns = self.columns_of(width)
        if columns == self.padded_width:
            return words
        words = lax.shift_left(words, column_slot(words.shape, columns, width))
        shape = self.groups, self.padded_width // columns, columns
        total = integer_sum(lax.reshape(words, shape))
        return lax.bitcast_convert_type(total, np.uint32)


def integer_sum(x: jax.Array) -> jax.Array:
    """Sums of 32-bit integers along axis 1, `int32` also where JAX has x64.

    Kernels' reductions add up signed integers; the sums have the same bits.
    """
    return jnp.sum(lax.bitcast_convert_type(x, np.int32), 1, np.int32)


def separate(bits: int) -> int:
    """The least count of tiles whose columns share no word."""
    return WORD_BITS // (bits & -bits)


def column_slot(shape: tuple[int, ...], columns: int, width: int) -> jax.Array:
    """By how many bits a column's field lies above the first that shares its word."""
    column = lax.broadcasted_iota(np.uint32, shape, 1)
    return lax.mul(lax.div(column, np.uint32(columns)), np.uint32(width))


def cut_field(code: jax.Array, offset: int, width: int, bits: int) -> jax.Array:
    """`width` bits of a code, from bit `offset` on."""
    if offset:
        code = lax.shift_right_logical(code, np.uint32(offset))
    if offset + width < bits:
        code = lax.bitwise_and(code, np.uint32((1 << width) - 1))
    return code


def _field(
    word: jax.Array,
    shift: jax.Array | np.uint32,
    offset: int,
    width: int,
    is_last: bool = False,
) -> jax.Array:
    """The field above `shift` in a word, where it lies in a code; `is_last`: on top."""
    field = lax.shift_right_logical(word, shift)
    if not is_last:
        field = lax.bitwise_and(field, np.uint32((1 << width) - 1))
    return shift_left(field, offset)

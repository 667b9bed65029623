"""How a GPU kernel cuts groups, so that packing moves no element between threads.

A group is cut into `count` tiles with `width` consecutive elements each, where `width`
is the word count for a code's narrowest field (see `words`). Element w in every tile
then goes into word w, modulo `width`, in every field: a thread that holds one column
from all tiles packs its words alone, with shifts and ORs.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax import lax

from jaxact_kernels.layout import Layout
from jaxact_kernels.words import WORD_BITS, fields, num_words


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles into which a block's groups are cut.

    Attributes:
        layout: how groups lie in the array.
        bits: in a code.
        groups: in a block, a power of two.
    """

    layout: Layout
    bits: int
    groups: int

    @property
    def finest(self) -> int:
        """Bits in the narrowest field."""
        return self.bits & -self.bits

    @property
    def count(self) -> int:
        """Tiles in a group."""
        return WORD_BITS // self.finest

    @property
    def coded(self) -> range:
        """The tiles that have codes."""
        return range(self.count)

    @property
    def width(self) -> int:
        """Elements in a tile."""
        return self.layout.group // self.count

    @property
    def num_words(self) -> int:
        """Words that a group's codes take."""
        return num_words(self.layout.group, self.bits)

    @property
    def padded_width(self) -> int:
        """Elements in a tile that is filled up to a power of two."""
        return 1 << (self.width - 1).bit_length()

    @property
    def num_blocks(self) -> int:
        """Blocks in the array; the last may lack some groups."""
        return -(-self.layout.total_groups // self.groups)

    def pack(self, codes: list[jax.Array]) -> list[jax.Array]:
        """Pack the tiles' codes: an array for each entry in `first_words`."""
        packed = []
        for _, offset, width in self._fields():
            repeats = width // self.finest
            for m in range(repeats):
                terms = [
                    _shift(
                        cut_field(codes[k], offset, width, self.bits),
                        k // repeats * width,
                    )
                    for k in range(m, self.count, repeats)
                ]
                words = functools.reduce(lax.bitwise_or, terms)
                packed.append(words)
        return packed

    def pack_one(
        self, k: jax.Array, code: jax.Array, packed: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Add tile `k`, an `int32` that may be traced, to packed words.

        `packed` has one array for each entry in `first_words`, zero before the first
        tile.
        """
        added = []
        for _, offset, width in self._fields():
            repeats = width // self.finest
            slot = lax.div(k, np.int32(repeats))
            part = lax.rem(k, np.int32(repeats))
            shift = lax.convert_element_type(slot * np.int32(width), np.uint32)
            field = cut_field(code, offset, width, self.bits)
            field = lax.shift_left(field, lax.full_like(field, shift))
            for m in range(repeats):
                is_part = lax.full_like(field, lax.eq(part, np.int32(m)), np.bool_)
                words = lax.bitwise_or(packed[len(added)], field)
                added.append(lax.select(is_part, words, packed[len(added)]))
        return tuple(added)

    def unpack(self, k: int, words: dict[int, jax.Array]) -> jax.Array:
        """Return the codes in tile `k`, from words by `first_words`."""
        code = None
        for start, offset, width in self._fields():
            slot, m = divmod(k, width // self.finest)
            field = lax.shift_right_logical(
                words[start + m * self.width], np.uint32(slot * width)
            )
            if (slot + 1) * width < WORD_BITS:
                field = lax.bitwise_and(field, np.uint32((1 << width) - 1))
            field = _shift(field, offset)
            code = field if code is None else lax.bitwise_or(code, field)
        assert code is not None
        return code

    def first_words(self) -> list[int]:
        """Where, in a group's words, each array that `pack` returns starts."""
        return [
            start + m * self.width
            for start, _, width in self._fields()
            for m in range(width // self.finest)
        ]

    def _fields(self) -> list[tuple[int, int, int]]:
        """List (first word, offset in the code, width) for each field."""
        per_bit = self.layout.group // WORD_BITS
        return [
            (offset * per_bit, offset, width) for offset, width in fields(self.bits)
        ]


def cut_field(code: jax.Array, offset: int, width: int, bits: int) -> jax.Array:
    """`width` bits of a code, from bit `offset` on."""
    if offset:
        code = lax.shift_right_logical(code, np.uint32(offset))
    if offset + width < bits:
        code = lax.bitwise_and(code, np.uint32((1 << width) - 1))
    return code


def _shift(x: jax.Array, by: int) -> jax.Array:
    return lax.shift_left(x, np.uint32(by)) if by else x

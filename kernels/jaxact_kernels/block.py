"""How one program in a Triton kernel loads and stores its block of groups."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxact_kernels.layout import Layout
from jaxact_kernels.tiles import Tiles

TileNumber = int | jax.Array  # which tile; may be traced
Position = tuple[jax.Array, ...]  # one index for each axis of a reference


def elements_shape(layout: Layout) -> tuple[int, int]:
    """Shape in which kernels see an array: its groups, or rows that need padding."""
    if layout.padding:
        return layout.total_groups // layout.num_groups, layout.length
    return layout.total_groups, layout.group


def output(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """Describe a kernel's result; also inside a `shard_map` that checks its axes."""
    unvarying = jax.sharding.ManualAxisType()
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=unvarying)


class Block:
    """The running program's groups, and where their tiles are in memory.

    Attributes:
        tiles: how groups are cut.
        number: `int32[groups]`, each group's number in the array.
        shape: of one tile from all groups: `(groups, padded_width)`.
    """

    def __init__(self, tiles: Tiles):
        """Call inside a kernel whose grid is `(tiles.num_blocks,)`."""
        self.tiles = tiles
        self.shape = tiles.groups, tiles.padded_width
        first = lax.mul(pl.program_id(0), np.int32(tiles.groups))
        self.number = lax.add(lax.iota(np.int32, tiles.groups), first)
        self._column = lax.broadcasted_iota(np.int32, self.shape, 1)
        total = tiles.layout.total_groups
        is_whole = total % tiles.groups == 0
        self._is_group = None if is_whole else lax.lt(self.number, np.int32(total))
        is_padded = tiles.padded_width != tiles.width
        width = np.int32(tiles.width)
        self._is_column = lax.lt(self._column, width) if is_padded else None

    def spread(self, x: jax.Array) -> jax.Array:
        """Repeat a value for each group over a tile."""
        return lax.broadcast_in_dim(x, self.shape, (0,))

    def is_real(self, k: TileNumber) -> jax.Array | None:
        """Where tile `k` has elements from the array; None for everywhere."""
        return self._tile(k)[1]

    def load(self, ref: jax.Ref, k: TileNumber, *, again: bool = False) -> jax.Array:
        """Load the elements in tile `k`; 0 where there are none.

        Loaded `again`, they are not held in registers in between.
        """
        index, is_real = self._tile(k)
        return _load(ref, index, is_real, volatile=again)

    def store(
        self, ref: jax.Ref, k: TileNumber, x: jax.Array, only: jax.Array | None = None
    ) -> None:
        """Store the elements in tile `k`, for groups where `only` holds."""
        index, is_real = self._tile(k)
        mask = _all(is_real, None if only is None else self.spread(only))
        plt.store(ref.at[index], x, mask=mask)

    def load_words(self, ref: jax.Ref) -> dict[int, jax.Array]:
        """Load every array that `Tiles.pack` returned, by its first word."""
        mask = _all(self._spread_is_group(), self._is_column)
        return {
            first: _load(ref, self._words(first), mask)
            for first in self.tiles.first_words()
        }

    def store_words(self, ref: jax.Ref, packed: Sequence[jax.Array]) -> None:
        """Store the arrays that `Tiles.pack` returned."""
        mask = _all(self._spread_is_group(), self._is_column)
        for first, words in zip(self.tiles.first_words(), packed, strict=True):
            plt.store(ref.at[self._words(first)], words, mask=mask)

    def load_at(self, ref: jax.Ref, column: jax.Array) -> jax.Array:
        """Load, for each group, the words in some columns, `[groups, any]`."""
        return _load(ref, *self._at(column))

    def store_at(self, ref: jax.Ref, column: jax.Array, words: jax.Array) -> None:
        """Store words in some columns, shaped like them."""
        index, mask = self._at(column)
        plt.store(ref.at[index], words, mask=mask)

    def load_groups(self, ref: jax.Ref) -> jax.Array:
        """Load one value for each group."""
        return _load(ref, (self.number,), self._is_group)

    def store_groups(self, ref: jax.Ref, x: jax.Array) -> None:
        """Store one value for each group."""
        plt.store(ref.at[self.number], x, mask=self._is_group)

    def _at(self, column: jax.Array) -> tuple[Position, jax.Array | None]:
        over = lambda x: lax.broadcast_in_dim(x, column.shape, (0,))
        mask = None if self._is_group is None else over(self._is_group)
        return (over(self.number), column), mask

    def _words(self, first: int) -> Position:
        return self.spread(self.number), lax.add(self._column, np.int32(first))

    def _tile(self, k: TileNumber) -> tuple[Position, jax.Array | None]:
        layout = self.tiles.layout
        row = self.number
        element = lax.add(self._column, k * np.int32(self.tiles.width))
        is_element = None
        if layout.padding:
            num_groups = np.int32(layout.num_groups)
            row, group = lax.div(row, num_groups), lax.rem(row, num_groups)
            start = lax.mul(group, np.int32(layout.group))
            element = lax.add(element, self.spread(start))
            is_element = lax.lt(element, np.int32(layout.length))
        is_real = _all(self._spread_is_group(), self._is_column, is_element)
        return (self.spread(row), element), is_real

    def _spread_is_group(self) -> jax.Array | None:
        return None if self._is_group is None else self.spread(self._is_group)


def _load(
    ref: jax.Ref, index: Position, mask: jax.Array | None, *, volatile: bool = False
) -> jax.Array:
    other = None if mask is None else np.zeros((), ref.dtype)
    return plt.load(ref.at[index], mask=mask, other=other, volatile=volatile)


def _all(*masks: jax.Array | None) -> jax.Array | None:
    partial = [mask for mask in masks if mask is not None]
    return functools.reduce(lax.bitwise_and, partial) if partial else None

"""How one program in a Triton kernel loads and stores its block of groups."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxact_kernels.along import Along
from jaxact_kernels.layout import Layout
from jaxact_kernels.tiles import Tiles, column_slot

TileNumber = int | jax.Array  # which tile; may be traced
Position = tuple[jax.Array, ...]  # one index for each axis of a reference
State = TypeVar("State")


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
        column: `int32` of this shape, each element's index in its tile.
    """

    def __init__(self, tiles: Tiles):
        """Call inside a kernel whose grid is `(tiles.num_blocks,)`."""
        self.tiles = tiles
        self.shape = tiles.groups, tiles.padded_width
        first = lax.mul(pl.program_id(0), np.int32(tiles.groups))
        self.number = lax.add(lax.iota(np.int32, tiles.groups), first)
        self.column, self._is_column = self._position(self.shape)
        total = tiles.layout.total_groups
        is_whole = total % tiles.groups == 0
        self._is_group = None if is_whole else lax.lt(self.number, np.int32(total))

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

    def load_along(
        self, refs: Sequence[jax.Ref], k: TileNumber, along: Along
    ) -> list[jax.Array]:
        """Load, for the elements in tile `k`, values that differ along some axes.

        From each of several flat arrays; 0 where there are no elements.
        """
        index = along.index(self.number, self._element(k))
        return [_load(ref, (index,), self.is_real(k)) for ref in refs]

    def store(
        self, ref: jax.Ref, k: TileNumber, x: jax.Array, only: jax.Array | None = None
    ) -> None:
        """Store the elements in tile `k`, for groups where `only` holds."""
        index, is_real = self._tile(k)
        mask = _all(is_real, None if only is None else self.spread(only))
        plt.store(ref.at[index], x, mask=mask)

    def load_words(self, ref: jax.Ref) -> dict[int, jax.Array]:
        """Load every array that `Tiles.pack` returned, by its first word.

        Columns that share a word have it shifted, each as far as its field lies.
        """
        packed = {}
        slots = zip(self.tiles.first_words(), self.tiles.slots(), strict=True)
        mask = _all(self._over_is_group(self.shape), self._is_column)
        for first, (columns, width) in slots:
            if columns == self.shape[1]:
                packed[first] = _load(ref, self._words(self.column, first), mask)
                continue
            shared, _ = self._position(self.shape, columns)
            words = _load(ref, self._words(shared, first), mask)
            slot = column_slot(self.shape, columns, width)
            packed[first] = lax.shift_right_logical(words, slot)
        return packed

    def store_words(self, ref: jax.Ref, packed: Sequence[jax.Array]) -> None:
        """Store the arrays that `Tiles.pack` returned."""
        for first, words in zip(self.tiles.first_words(), packed, strict=True):
            column, is_column = self._position(words.shape)
            mask = _all(self._over_is_group(words.shape), is_column)
            plt.store(ref.at[self._words(column, first)], words, mask=mask)

    def load_groups(self, ref: jax.Ref) -> jax.Array:
        """Load one value for each group."""
        return _load(ref, (self.number,), self._is_group)

    def store_groups(self, ref: jax.Ref, x: jax.Array) -> None:
        """Store one value for each group."""
        plt.store(ref.at[self.number], x, mask=self._is_group)

    def _words(self, column: jax.Array, first: int) -> Position:
        number = lax.broadcast_in_dim(self.number, column.shape, (0,))
        return number, lax.add(column, np.int32(first))

    def _position(
        self, shape: tuple[int, ...], period: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Each column's index without the padding of runs, and which are no padding.

        With a `period`, columns repeat.
        """
        column = lax.broadcasted_iota(np.int32, shape, 1)
        if period is not None:
            column = lax.rem(column, np.int32(period))
        run, padded = np.int32(self.tiles.run), np.int32(self.tiles.padded_run)
        if run == padded:
            return column, None
        place = lax.rem(column, padded)
        start = lax.mul(lax.div(column, padded), run)
        return lax.add(start, place), lax.lt(place, run)

    def _element(self, k: TileNumber) -> jax.Array:
        """The index in its group of each element in tile `k`."""
        return lax.add(self.column, k * np.int32(self.tiles.width))

    def _tile(self, k: TileNumber) -> tuple[Position, jax.Array | None]:
        layout = self.tiles.layout
        row, element = self.number, self._element(k)
        is_element = None
        if layout.padding:
            num_groups = np.int32(layout.num_groups)
            row, group = lax.div(row, num_groups), lax.rem(row, num_groups)
            element = lax.add(element, self._start_of(group))
            is_element = lax.lt(element, np.int32(layout.length))
        is_real = _all(self._over_is_group(self.shape), self._is_column, is_element)
        return (self.spread(row), element), is_real

    def _start_of(self, group: jax.Array) -> jax.Array:
        """Where the groups with these numbers start in a row, over a tile."""
        return self.spread(lax.mul(group, np.int32(self.tiles.layout.group)))

    def _over_is_group(self, shape: tuple[int, ...]) -> jax.Array | None:
        if self._is_group is None:
            return None
        return lax.broadcast_in_dim(self._is_group, shape, (0,))


def over_tiles(
    count: int, body: Callable[[jax.Array, State], State], state: State
) -> State:
    """The state after a loop over numbers of tiles, `int32` also where JAX has x64."""
    step = lambda k, state: body(lax.convert_element_type(k, np.int32), state)
    return lax.fori_loop(0, count, step, state)


def _load(
    ref: jax.Ref, index: Position, mask: jax.Array | None, *, volatile: bool = False
) -> jax.Array:
    other = None if mask is None else np.zeros((), ref.dtype)
    return plt.load(ref.at[index], mask=mask, other=other, volatile=volatile)


def _all(*masks: jax.Array | None) -> jax.Array | None:
    partial = [mask for mask in masks if mask is not None]
    return functools.reduce(lax.bitwise_and, partial) if partial else None

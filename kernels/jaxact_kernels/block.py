"""What one program of a Triton kernel loads and stores: a block of groups."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxact_kernels.layout import Layout
from jaxact_kernels.tiles import Tiles

Index = int | jax.Array  # of a tile; may be traced


def elements_shape(layout: Layout) -> tuple[int, int]:
    """Shape in which kernels see an array: its groups, or rows that need padding."""
    if layout.padding:
        return layout.total_groups // layout.num_groups, layout.length
    return layout.total_groups, layout.group


def output(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describe a kernel's result; also inside a `shard_map` that checks its axes."""
    nowhere = jax.sharding.ManualAxisType()
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=nowhere)


class Block:
    """The groups of the running program, and where their tiles are in memory.

    Attributes:
        tiles: how groups are cut.
        number: `int32[groups]`, each group's number in the array.
        shape: of a tile of all groups: `(groups, lanes)`.
    """

    def __init__(self, tiles: Tiles):
        """Call inside a kernel whose grid is `(tiles.num_blocks,)`."""
        self.tiles = tiles
        self.shape = tiles.groups, tiles.lanes
        first = lax.mul(pl.program_id(0), np.int32(tiles.groups))
        self.number = lax.add(lax.iota(np.int32, tiles.groups), first)
        self._lane = lax.broadcasted_iota(np.int32, self.shape, 1)
        total = tiles.layout.total_groups
        is_whole = total % tiles.groups == 0
        self._is_group = None if is_whole else lax.lt(self.number, np.int32(total))
        has_fill = tiles.lanes != tiles.width
        self._is_lane = lax.lt(self._lane, np.int32(tiles.width)) if has_fill else None

    def spread(self, x: jax.Array) -> jax.Array:
        """Repeat a value for each group over a tile."""
        return lax.broadcast_in_dim(x, self.shape, (0,))

    def is_real(self, k: Index) -> jax.Array | None:
        """Where tile `k` has elements of the array; None for everywhere."""
        return self._tile(k)[1]

    def load(self, ref: Any, k: Index) -> jax.Array:
        """Load tile `k` of the elements; 0 where there are none."""
        index, is_real = self._tile(k)
        return _load(ref, index, is_real)

    def store(self, ref: Any, k: int, x: jax.Array) -> None:
        """Store tile `k` of the elements."""
        index, is_real = self._tile(k)
        plt.store(ref.at[index], x, mask=is_real)

    def load_words(self, ref: Any) -> dict[int, jax.Array]:
        """Load every tile of words, by its first word in the group."""
        mask = _all(self._spread_is_group(), self._is_lane)
        return {
            first: _load(ref, self._words(first), mask)
            for first in self.tiles.first_words()
        }

    def store_words(self, ref: Any, packed: Sequence[jax.Array]) -> None:
        """Store what `Tiles.pack` returned."""
        mask = _all(self._spread_is_group(), self._is_lane)
        for first, words in zip(self.tiles.first_words(), packed, strict=True):
            plt.store(ref.at[self._words(first)], words, mask=mask)

    def load_groups(self, ref: Any) -> jax.Array:
        """Load one value for each group."""
        return _load(ref, (self.number,), self._is_group)

    def store_groups(self, ref: Any, x: jax.Array) -> None:
        """Store one value for each group."""
        plt.store(ref.at[self.number], x, mask=self._is_group)

    def _words(self, first: int) -> tuple[jax.Array, jax.Array]:
        return self.spread(self.number), lax.add(self._lane, np.int32(first))

    def _tile(self, k: Index) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
        layout = self.tiles.layout
        row = self.number
        element = lax.add(self._lane, k * np.int32(self.tiles.width))
        is_element = None
        if layout.padding:
            num_groups = np.int32(layout.num_groups)
            row, column = lax.div(row, num_groups), lax.rem(row, num_groups)
            start = lax.mul(column, np.int32(layout.group))
            element = lax.add(element, self.spread(start))
            is_element = lax.lt(element, np.int32(layout.length))
        is_real = _all(self._spread_is_group(), self._is_lane, is_element)
        return (self.spread(row), element), is_real

    def _spread_is_group(self) -> jax.Array | None:
        return None if self._is_group is None else self.spread(self._is_group)


def _load(ref: Any, index: Any, mask: jax.Array | None) -> jax.Array:
    other = None if mask is None else np.zeros((), ref.dtype)
    return plt.load(ref.at[index], mask=mask, other=other)


def _all(*masks: jax.Array | None) -> jax.Array | None:
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(lax.bitwise_and, given) if given else None

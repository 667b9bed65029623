"""How one program in a Mosaic GPU kernel loads and stores its block of groups."""

import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxact_kernels import mosaic_compat
from jaxact_kernels.tiles import Tiles

WARPS = 4  # in a warpgroup, which Mosaic GPU programs as one
WARP_THREADS = 32  # in a warp
THREADS = WARPS * WARP_THREADS
WIDEST = 16  # bytes in the widest load


class Block:
    """The running program's groups, and which thread holds which elements.

    Attributes:
        tiles: how groups are cut.
        shape: of one tile from all groups: `(groups, width)`.
    """

    def __init__(self, tiles: Tiles, dtype: np.dtype):
        """Call inside a kernel whose grid is `(tiles.num_blocks,)`."""
        self.tiles = tiles
        self.shape = tiles.groups, tiles.width
        self._of_tile = _layout(tiles, dtype.itemsize)
        self._of_groups = self._of_tile.reduce(1)
        # The last block begins early enough to be whole: it repeats some groups in the
        # one before, and writes the same values.
        last = np.int32(tiles.layout.total_groups - tiles.groups)
        self._first = lax.min(lax.axis_index("block") * np.int32(tiles.groups), last)

    def number(self) -> jax.Array:
        """Each group's number in the array, `uint32`."""
        number = lax.iota(np.uint32, self.tiles.groups)
        number = plgpu.layout_cast(number, self._of_groups)
        return lax.add(number, lax.convert_element_type(self._first, np.uint32))

    def column(self) -> jax.Array:
        """Each element's index in its tile, `uint32`."""
        column = lax.broadcasted_iota(np.uint32, self.shape, 1)
        return plgpu.layout_cast(column, self._of_tile)

    def spread(self, x: jax.Array) -> jax.Array:
        """Repeat a value for each group over a tile."""
        x = lax.broadcast_in_dim(x, self.shape, (0,))
        return plgpu.layout_cast(x, self._of_tile)

    def load(self, ref: jax.Ref, start: int) -> jax.Array:
        """Load the tile whose first column is `start`."""
        return mosaic_compat.load(self._columns(ref, start), self._of_tile)

    def store(self, ref: jax.Ref, start: int, x: jax.Array) -> None:
        """Store a tile whose first column is `start`."""
        mosaic_compat.store(self._columns(ref, start), x)

    def load_groups(self, ref: jax.Ref) -> jax.Array:
        """Load one value for each group."""
        return mosaic_compat.load(ref.at[self._rows], self._of_groups)

    def store_groups(self, ref: jax.Ref, x: jax.Array) -> None:
        """Store one value for each group."""
        mosaic_compat.store(ref.at[self._rows], x)

    @property
    def _rows(self) -> slice | pl.Slice:
        return pl.ds(self._first, self.tiles.groups)

    def _columns(self, ref: jax.Ref, start: int) -> jax.Ref:
        return ref.at[self._rows, pl.ds(start, self.tiles.width)]


def _layout(tiles: Tiles, item_bytes: int) -> Any:
    """Which elements each thread holds: alike in all tiles, in wide loads."""
    threads = threads_per_group(tiles)
    vector = math.gcd(tiles.width // threads, WIDEST // item_bytes)
    columns, rows = threads * vector, WARP_THREADS // threads
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((WARPS * rows, columns), (rows, columns), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )


def threads_per_group(tiles: Tiles) -> int:
    """Threads that share a group, each with equally many elements from a tile."""
    return min(most_threads_per_group(tiles), max(1, THREADS // tiles.groups))


def most_threads_per_group(tiles: Tiles) -> int:
    """The same in a block with so few groups that threads are left over."""
    return math.gcd(tiles.width, WARP_THREADS)

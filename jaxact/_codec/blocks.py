"""Cut an array into blocks along some axes, to average over them."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of `width` positions along each of `axes`, fewer at the far border.

    Attributes:
      shape: the array's, without a 0.
      axes: not negative, in ascending order.
      width: at least 1; an axis that is shorter is one block.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    width: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks along each axis."""
        return tuple(math.prod(self._cut(axis)[:1]) for axis in range(len(self.shape)))

    @property
    def most_elements(self) -> int:
        """Elements in a whole block."""
        return math.prod(self._cut(axis)[-1] for axis in self.axes)

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over each block, `[*counts]`."""
        if any(self._padding):
            edges = [(0, padding, 0) for padding in self._padding]
            x = lax.pad(x, np.zeros((), x.dtype), edges)
        for axis in reversed(self.axes):  # one by one: others may be sharded
            x = x.reshape(*x.shape[:axis], *self._cut(axis), *x.shape[axis + 1 :])
        return x.sum(self._inner_axes)

    def mean(self, x: jax.Array) -> jax.Array:
        """Mean over the elements that each block really has, `[*counts]`."""
        return self.sum(x) / self._num_elements.astype(x.dtype)

    def spread(self, blocks: jax.Array) -> jax.Array:
        """Repeat each block's value, `[*counts]`, at all its elements."""
        rank = len(self.shape) + len(self.axes)
        outer = [i for i in range(rank) if i not in self._inner_axes]
        split = [n for axis in range(len(self.shape)) for n in self._cut(axis)]
        x = lax.broadcast_in_dim(blocks, split, outer)
        for axis in self.axes:
            merged = math.prod(x.shape[axis : axis + 2])
            x = x.reshape(*x.shape[:axis], merged, *x.shape[axis + 2 :])
            x = lax.slice_in_dim(x, 0, self.shape[axis], axis=axis)
        return x

    def _cut(self, axis: int) -> tuple[int, ...]:
        """(blocks, width) for an axis that is cut, else its size alone."""
        size = self.shape[axis]
        if axis not in self.axes:
            return (size,)
        width = min(self.width, size)
        return -(-size // width), width

    @property
    def _padding(self) -> tuple[int, ...]:
        cuts = (math.prod(self._cut(axis)) for axis in range(len(self.shape)))
        return tuple(cut - size for cut, size in zip(cuts, self.shape, strict=True))

    @property
    def _inner_axes(self) -> tuple[int, ...]:
        return tuple(axis + number + 1 for number, axis in enumerate(self.axes))

    @property
    def _num_elements(self) -> np.ndarray:
        along_axes = []
        for axis in self.axes:
            blocks, width = self._cut(axis)
            start = width * np.arange(blocks)
            ones = [1] * len(self.shape)
            ones[axis] = blocks
            sizes = np.minimum(width, self.shape[axis] - start)
            along_axes.append(sizes.reshape(ones))
        return functools.reduce(np.multiply, along_axes)

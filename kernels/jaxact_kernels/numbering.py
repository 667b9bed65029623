"""From a group's number in one shard to its number in the whole array.

Noise depends on a group's number in row-major order. A kernel sees one shard, whose
groups are a box among the whole array's: it is told where the box begins and how far
apart the box's groups are in each direction.
"""

import dataclasses
import math

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Numbers for a box of groups, counted from the box's first.

    Attributes:
        sizes: groups in the box along each axis, outermost first.
        strides: by how much a step along each axis raises the number, modulo 2**32.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, local: jax.Array) -> jax.Array:
        """Numbers in the array for those in the box, both `uint32`."""
        number, outer = None, local
        for axis in reversed(range(len(self.sizes))):
            size = np.uint32(self.sizes[axis])
            index = outer if axis == 0 else lax.rem(outer, size)
            outer = outer if axis == 0 else lax.div(outer, size)
            if self.strides[axis] != 1:
                index = lax.mul(index, np.uint32(self.strides[axis] % 2**32))
            number = index if number is None else lax.add(number, index)
        return local if number is None else number


def box(sizes: tuple[int, ...], whole: tuple[int, ...]) -> Numbering:
    """Number a box with `sizes` in an array whose groups have shape `whole`.

    Numbers are row-major. Axes that the box spans are joined with the one before, so
    that a box cut along its first axis alone counts by ones.
    """
    joined: list[tuple[int, int]] = []
    for size, full, stride in zip(sizes, whole, row_major(whole), strict=True):
        if joined and size == full:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    return Numbering(tuple(s for s, _ in joined), tuple(s for _, s in joined))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """By how much a step along each axis raises a row-major number."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

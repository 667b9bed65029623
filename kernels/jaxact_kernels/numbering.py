"""What number a group of one shard has in the whole array.

Noise depends on a group's number in row-major order. A kernel sees one shard, whose
groups are a box of the whole array's: it is told where the box begins and how far apart
the box's groups are in each direction.
"""

import dataclasses
import math

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Numbers, counted from the box's first, of a box of groups of shape `sizes`.

    Attributes:
        sizes: groups of the box along each axis, outermost first.
        strides: what one step along each axis adds to the number, modulo 2**32.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, local: jax.Array) -> jax.Array:
        """Numbers of groups that are number `local` of the box, both `uint32`."""
        number, rest = None, local
        for axis in reversed(range(len(self.sizes))):
            size = np.uint32(self.sizes[axis])
            place = rest if axis == 0 else lax.rem(rest, size)
            rest = rest if axis == 0 else lax.div(rest, size)
            if self.strides[axis] != 1:
                place = lax.mul(place, np.uint32(self.strides[axis] % 2**32))
            number = place if number is None else lax.add(number, place)
        return local if number is None else number


def box(sizes: tuple[int, ...], whole: tuple[int, ...]) -> Numbering:
    """Number a box of `sizes` in an array of groups of shape `whole`, row-major.

    Axes that the box spans are joined with the one before, so that a box cut along its
    first axis alone counts by ones.
    """
    joined: list[tuple[int, int]] = []
    for size, of, stride in zip(sizes, whole, row_major(whole), strict=True):
        if joined and size == of:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    return Numbering(tuple(s for s, _ in joined), tuple(s for _, s in joined))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What one step along each axis adds to a row-major number."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

"""Where an element lies along some axes of its array, in a kernel's block of groups.

A norm's coefficients differ along those axes alone: by channel, by image and channel,
or by row. An array with them is read at these places.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jaxact_kernels.layout import Layout


@dataclasses.dataclass(frozen=True)
class _Run:
    """Adjacent axes, as one.

    Attributes:
        size: of the axes together.
        inner: how many rows, or elements in a row, share a place along them.
    """

    size: int
    inner: int

    def place(self, index: jax.Array) -> jax.Array:
        """That of the row or element with this index."""
        return _rem(_div(index, self.inner), self.size)


@dataclasses.dataclass(frozen=True)
class Along:
    """Some axes of an array.

    Attributes:
        layout: how groups lie in the array.
        lead: those that groups do not run along.
        row: those in a row.
    """

    layout: Layout
    lead: tuple[_Run, ...]
    row: tuple[_Run, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: Sequence[int], layout: Layout) -> "Along":
        """`axes` of an array with this shape, counted from the last."""
        kept = [axis - len(shape) in axes for axis in range(len(shape))]
        split = len(layout.lead)
        lead = _runs(shape[:split], kept[:split])
        return cls(layout, lead, _runs(shape[split:], kept[split:]))

    def index(self, number: jax.Array, element: jax.Array) -> jax.Array:
        """The places in an array with the sizes of the axes, flattened.

        Args:
            number: `int32[groups]`, each group's number in the array.
            element: `int32[groups, columns]`, each element's index in its group.

        Returns:
            `int32[groups, columns]`; anything at padding.
        """
        row = _div(number, self.layout.num_groups)
        index = lax.full(element.shape, 0, np.int32)
        for run in self.lead:
            place = lax.broadcast_in_dim(run.place(row), element.shape, (0,))
            index = lax.add(_mul(index, run.size), place)
        for run in self.row:
            place = self._in_row(run, number, element)
            index = lax.add(_mul(index, run.size), place)
        return index

    def _in_row(self, run: _Run, number: jax.Array, element: jax.Array) -> jax.Array:
        """The elements' places along axes in a row."""
        layout, size = self.layout, self.layout.group
        if size % (run.size * run.inner) == 0 and not layout.padding:
            # Each group starts at place 0: the 64 channels of a ResNet's first stage.
            return run.place(element)
        if run.inner % size == 0:
            # One place for a group: the heads of a norm by head.
            group = _rem(number, layout.num_groups)
            place = _Run(run.size, run.inner // size).place(group)
            return lax.broadcast_in_dim(place, element.shape, (0,))
        if run.inner == 1 and run.size % size == 0:
            # A row has whole groups: the wide layers of a ResNet.
            first = _mul(_rem(number, run.size // size), size)
            return lax.add(element, lax.broadcast_in_dim(first, element.shape, (0,)))
        # The 40 or 112 channels of an EfficientNet.
        first = _mul(_rem(number, layout.num_groups), size)
        first = lax.broadcast_in_dim(first, element.shape, (0,))
        return run.place(lax.add(element, first))


def _runs(sizes: Sequence[int], kept: Sequence[bool]) -> tuple[_Run, ...]:
    """The kept axes among some with these sizes; adjacent ones are one."""
    found: list[_Run] = []
    was_kept = False
    for axis, (size, is_kept) in enumerate(zip(sizes, kept, strict=True)):
        if is_kept:
            before = found.pop().size if was_kept else 1
            found.append(_Run(before * size, math.prod(sizes[axis + 1 :])))
        was_kept = is_kept
    return tuple(found)


def _mul(x: jax.Array, number: int) -> jax.Array:
    return lax.mul(x, np.int32(number))


def _div(x: jax.Array, number: int) -> jax.Array:
    return x if number == 1 else lax.div(x, np.int32(number))


def _rem(x: jax.Array, number: int) -> jax.Array:
    return lax.rem(x, np.int32(number))

"""What an implementation must compute: one encode or decode, with all options fixed.

An operation is a value. It knows its definition, the kernels that may stand in for
that, and how the axes of what it reads and writes correspond, which is what a sharded
call needs.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxact_kernels.device import Device
from jaxact_kernels.layout import Layout

# The name of an axis. Two names on one axis: it is their product, outermost first.
Axis = str | tuple[str, str]
Axes = tuple[Axis, ...]

GROUP = "group"


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """One operation of a format on arrays of one shape and dtype.

    Attributes:
        shape: of the unpacked array.
        dtype: of the unpacked array.
        is_fused: whether elementwise operations compute the array to encode, or read
            the decoded one, so that XLA can make one kernel of them and the definition.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_fused: bool = dataclasses.field(default=False, kw_only=True)

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Where groups lie in the unpacked array."""

    @abc.abstractmethod
    def reference(self, *arrays: Any) -> Any:
        """The definition."""

    @abc.abstractmethod
    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        """Why each implementation cannot do this on a device; None where it can.

        In order of preference.
        """

    @abc.abstractmethod
    def kernel(self, implementation: str, numbering: Any) -> Callable[..., Any]:
        """The kernel: a function of the operands and, if there is a `numbering`, of
        the number of the shard's first group.
        """

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[Axes, ...]:
        """Axes of each operand; none for a scalar."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[Axes, ...]:
        """Axes of each result."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each named axis of the unpacked array and of groups."""
        layout = self.layout
        lead = {f"lead{i}": size for i, size in enumerate(layout.lead)}
        return lead | {GROUP: layout.num_groups, "element": layout.group}

    @property
    def lead_axes(self) -> tuple[str, ...]:
        """Axes that groups do not run along."""
        return tuple(f"lead{i}" for i in range(len(self.layout.lead)))

    @property
    def unpacked_axes(self) -> Axes:
        """Axes of the unpacked array.

        Groups can be told apart along its last axis only if they fill it and no other
        axis is part of a row. Shardy wants no factors of 1.
        """
        layout = self.layout
        rows = self.shape[len(layout.lead) :]
        if len(rows) == 1 and not layout.padding and layout.num_groups > 1:
            return *self.lead_axes, (GROUP, "element")
        return *self.lead_axes, *(f"row{i}" for i in range(len(rows)))

    def at(self, shape: tuple[int, ...]) -> "Operation":
        """The same on arrays of another shape."""
        return dataclasses.replace(self, shape=shape)

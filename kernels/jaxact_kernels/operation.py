"""The interface of an implementation: one encode or decode, with all options fixed.

An operation is a value. It knows its definition, the kernels that may stand in for
that, and how the axes of its operands and results correspond, which a sharded call
needs.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxact_kernels.device import Device
from jaxact_kernels.layout import Layout
from jaxact_kernels.numbering import Numbering

# The name of an axis. Two names on one axis: it is their product, outermost first.
Axis = str | tuple[str, str]
Axes = tuple[Axis, ...]

# For each `vmap` around a call, outermost first: which operands it maps.
Vmaps = tuple[tuple[bool, ...], ...]

GROUP_AXIS = "group"


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """One operation on arrays with one shape and dtype, in one format.

    Attributes:
        shape: of the unpacked array.
        dtype: of the unpacked array.
        is_fused: whether elementwise operations compute the array to encode, or read
            the decoded one, so that XLA can make one kernel from them and the
            definition.
        mapped: sizes of the axes that `vmap` adds, outermost first.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_fused: bool = dataclasses.field(default=False, kw_only=True)
    mapped: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        self.check()

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `ValueError` where the format does not hold such an array."""

    @property
    def is_called_on_cpu(self) -> bool:
        """Whether XLA:CPU calls the definition, and fuses it with nothing around it.

        A decoding that is fused with its reader saves the decoded array.
        """
        return False

    @property
    def scope(self) -> str:
        """Its name in compiled programs and in profiles: 'jaxact.affine.encode'."""
        kind = type(self)
        _, folder, *_ = kind.__module__.split(".")
        return f"jaxact.{folder}.{kind.__name__.lower()}"

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Where groups lie in the unpacked array."""

    @property
    def mapped_layout(self) -> Layout:
        """Where they lie with the axes that `vmap` adds, which limit kernels too."""
        layout = self.layout
        return dataclasses.replace(layout, lead=(*self.mapped, *layout.lead))

    @property
    @abc.abstractmethod
    def reference(self) -> Callable[..., Any]:
        """The definition: a function from the operands."""

    @abc.abstractmethod
    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        """Why each implementation cannot do this on a device; None where it can.

        In order of preference.
        """

    @abc.abstractmethod
    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: a function from the operands, as separate arrays.

        With a `numbering`, the number of the shard's first group follows them.
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
        """Size of each axis that the unpacked array or its groups have, by name."""
        layout = self.layout
        lead = {f"lead{i}": size for i, size in enumerate(layout.lead)}
        return lead | {GROUP_AXIS: layout.num_groups, "element": layout.group}

    @property
    def lead_axes(self) -> tuple[str, ...]:
        """Axes that groups do not run along."""
        return tuple(f"lead{i}" for i in range(len(self.layout.lead)))

    @property
    def unpacked_axes(self) -> Axes:
        """Axes of the unpacked array.

        Groups can be told apart along its last axis only if they fill it and no other
        axis belongs to a row. Shardy rejects factors of size 1.
        """
        layout = self.layout
        rows = self.shape[len(layout.lead) :]
        if len(rows) == 1 and not layout.padding and layout.num_groups > 1:
            return *self.lead_axes, (GROUP_AXIS, "element")
        return *self.lead_axes, *(f"row{i}" for i in range(len(rows)))

    def at(self, shape: tuple[int, ...]) -> "Operation":
        """The same on arrays with another shape."""
        return dataclasses.replace(self, shape=shape)


def over_vmapped_axes(f: Callable[..., Any], vmaps: Vmaps) -> Callable[..., Any]:
    """Map `f` over the leading axes that `vmaps` gave its operands."""
    for is_mapped in reversed(vmaps):
        f = jax.vmap(f, in_axes=tuple(0 if mapped else None for mapped in is_mapped))
    return f

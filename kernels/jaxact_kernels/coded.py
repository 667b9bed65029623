"""Encode and decode in formats with packed codes and metadata for each group."""

import abc
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax

from jaxact_kernels import checks, words
from jaxact_kernels.device import Device, without_triton
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.operation import GROUP_AXIS, Axes, Operation


@dataclasses.dataclass(frozen=True)
class CodedOperation(Operation):
    """An operation with words of codes, and 32 bits for each group.

    Attributes:
        bits: in a code; in the rotated format also half a bit for an element.
        group_size: most elements that share metadata.
    """

    bits: float
    group_size: int = 256

    format: ClassVar[str]

    def check(self) -> None:
        """Raise `ValueError` where the format does not hold such an array."""
        self.check_bits()
        checks.check_float(self.dtype, self.shape, self.format)

    def check_bits(self) -> None:
        """Raise `ValueError` where codes do not have so many bits."""
        checks.check_bits(self.bits, "a code")

    @property
    def num_words(self) -> int:
        """Words that a group's codes take."""
        return words.num_words(self.layout.group, int(self.bits))

    @property
    def layout(self) -> Layout:
        """Where groups lie in the unpacked array."""
        return layout_of(self.shape, self.group_size)

    @property
    def stored_axes(self) -> tuple[Axes, Axes]:
        """Axes of words and metadata."""
        groups = (*self.lead_axes, GROUP_AXIS)
        return (*groups, "word"), groups

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """Arguments of the definition and of kernels, besides operands."""

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        """Why each implementation cannot do this on a device; None where it can."""
        return {"triton": self._triton_declines}

    def module(self, implementation: str) -> ModuleType:
        """The module of an implementation."""
        name = f"jaxact_kernels.{self.format}.{implementation}"
        return importlib.import_module(name)

    def check_arrays(self, stored: Sequence[jax.Array], *others: str) -> None:
        """Require words and metadata, and arrays that `others` describe."""
        layout = self.layout
        groups = (*layout.lead, layout.num_groups)
        packed = (*groups, self.num_words)
        required = [checks.array_text("uint32", each) for each in (packed, groups)]
        options = {"bits": self.bits, "group_size": self.group_size}
        checks.check_stored(stored, [*required, *others], shape=self.shape, **options)

    def _triton_declines(self, device: Device) -> str | None:
        reason = without_triton(device)
        return reason or self.module("triton").declines(self.mapped_layout, self.dtype)

"""Encode and decode in the rotated format, as values that `choose` is asked about."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels import checks, words
from jaxact_kernels.device import Device
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import GROUP_AXIS, Axes, Operation
from jaxact_kernels.rotated import reference
from jaxact_kernels.rotated.group import MOST_PER_GROUP
from jaxact_kernels.rotated.reference import Stored


@dataclasses.dataclass(frozen=True)
class RotatedOperation(Operation):
    """Options that encode and decode share."""

    bits: int
    group_size: int = 256
    is_adaptive: bool = False

    def check(self) -> None:
        checks.check_bits(self.bits, "a code")
        checks.check_float(self.dtype, self.shape, "rotated")
        if self.group_size > MOST_PER_GROUP:
            raise ValueError(
                f"got group_size={self.group_size}; sums over a group fit 32 bits only "
                f"for at most {MOST_PER_GROUP} elements; pass 256, as larger groups "
                "save 32 bits each and no noise"
            )

    @property
    def layout(self) -> Layout:
        return layout_of(self.shape, self.group_size)

    @property
    def stored_axes(self) -> tuple[Axes, Axes]:
        """Axes of words and metadata."""
        groups = (*self.lead_axes, GROUP_AXIS)
        return (*groups, "word"), groups

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "is_adaptive": self.is_adaptive,
        }

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        return {}

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array, ...]]:
        raise NotImplementedError(f"the rotated format has no {implementation} kernel")


@dataclasses.dataclass(frozen=True)
class Encode(RotatedOperation):
    """Encode an array: (x, seed) to (words, metadata)."""

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return self.unpacked_axes, ()

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return self.stored_axes

    @property
    def reference(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return functools.partial(reference.encode, **self.options)


@dataclasses.dataclass(frozen=True)
class Decode(RotatedOperation):
    """Decode (words, metadata, seed)."""

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return *self.stored_axes, ()

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return (self.unpacked_axes,)

    @property
    def reference(self) -> Callable[..., jax.Array]:
        options = {"shape": self.shape, "dtype": self.dtype, **self.options}
        return functools.partial(reference.decode, **options)

    def check_stored(self, stored: Stored) -> None:
        """Raise `ValueError` where this cannot decode such arrays."""
        layout = self.layout
        groups = (*layout.lead, layout.num_groups)
        packed = (*groups, words.num_words(layout.group, self.bits))
        required = [checks.described("uint32", each) for each in (packed, groups, ())]
        checks.check_stored(stored, required, shape=self.shape, **self.options)

"""Encode and decode in the index format, as values that `choose` is asked about."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels import checks, words
from jaxact_kernels.device import Device, without_triton
from jaxact_kernels.index import reference
from jaxact_kernels.layout import Layout
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import GROUP_AXIS, Axes, Axis, Operation


@dataclasses.dataclass(frozen=True)
class IndexOperation(Operation):
    """Layout and axes that encode and decode share; also in the mask format."""

    bits: int

    def check(self) -> None:
        check_index_bits(self.bits)
        checks.check_integer(self.dtype, self.shape)

    @property
    def layout(self) -> Layout:
        return reference.index_layout(self.shape)

    @property
    def stored_axes(self) -> Axes:
        """Axes of the words."""
        words: Axis = (GROUP_AXIS, "word") if self.layout.num_groups > 1 else "word"
        return *self.lead_axes, words

    @property
    def sizes(self) -> dict[str, int]:
        num_words = words.num_words(self.layout.group, self.bits)
        return super().sizes | {"word": num_words}

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        return {"triton": self._triton_declines}

    def _triton_declines(self, device: Device) -> str | None:
        return without_triton(device) or self._kernel_declines()

    def _kernel_declines(self) -> str | None:
        from jaxact_kernels.index import triton

        return triton.declines(self.mapped_layout, self.dtype, self.bits)


@dataclasses.dataclass(frozen=True)
class Encode(IndexOperation):
    """Encode an array: x to words."""

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return (self.unpacked_axes,)

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return (self.stored_axes,)

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return functools.partial(reference.encode, bits=self.bits)

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        from jaxact_kernels.index import triton

        return lambda x, *_: (triton.encode(x, bits=self.bits),)


@dataclasses.dataclass(frozen=True)
class Decode(IndexOperation):
    """Decode words."""

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return (self.stored_axes,)

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return (self.unpacked_axes,)

    @property
    def _options(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": self.dtype, "bits": self.bits}

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return functools.partial(reference.decode, **self._options)

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        from jaxact_kernels.index import triton

        return lambda packed, *_: (triton.decode(packed, **self._options),)


def check_index_bits(bits: int) -> None:
    """Raise `ValueError` unless indices can have `bits` bits."""
    instead = "keep larger integers in an array of their own dtype"
    checks.check_bits(bits, "an index", instead)

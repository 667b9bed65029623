"""Encode and decode of the affine format, as values that `choose` is asked about."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels.affine import reference
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.device import Device, old_for_triton
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.operation import GROUP, Axes, Operation


@dataclasses.dataclass(frozen=True)
class _Affine(Operation):
    bits: int
    group_size: int = 256

    @property
    def layout(self) -> Layout:
        return layout_of(self.shape, self.group_size)

    @property
    def stored_axes(self) -> tuple[Axes, Axes]:
        """Axes of words and metadata."""
        groups = (*self.lead_axes, GROUP)
        return (*groups, "word"), groups

    @property
    def options(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        # Both are bound by memory by their instruction counts (kernels/benchmarks).
        # Triton comes first because it serves every shape.
        return {"triton": self._triton_declines, "mosaic_gpu": self._mosaic_declines}

    def _triton_declines(self, device: Device) -> str | None:
        try:
            from jaxact_kernels.affine import triton
        except ImportError:
            return "this version of JAX has no Pallas Triton"
        return old_for_triton(device) or triton.declines(self.layout, self.dtype)

    def _mosaic_declines(self, device: Device) -> str | None:
        from jaxact_kernels.affine import mosaic_gpu

        return mosaic_gpu.declines(self.layout, self.dtype, self.bits, device)


@dataclasses.dataclass(frozen=True)
class Encode(_Affine):
    """Encode an array: (x, seed) to (words, metadata)."""

    stochastic: bool = True

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return self.unpacked_axes, ()

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return self.stored_axes

    def reference(self, x: jax.Array, seed: jax.Array) -> Stored:
        return reference.encode(x, seed, **self.options, stochastic=self.stochastic)

    def kernel(self, implementation: str, numbering: Any) -> Callable[..., Stored]:
        module = _module(implementation)
        return functools.partial(
            module.encode,
            **self.options,
            stochastic=self.stochastic,
            numbering=numbering,
        )


@dataclasses.dataclass(frozen=True)
class Decode(_Affine):
    """Decode (words, metadata, *operands) and apply `then(x, *operands)`."""

    then: Callable[..., jax.Array] | None = None
    num_operands: int = 0

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return *self.stored_axes, *(self.num_operands * (self.unpacked_axes,))

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return (self.unpacked_axes,)

    def reference(
        self, words: jax.Array, metadata: jax.Array, *operands: jax.Array
    ) -> jax.Array:
        stored = Stored(words, metadata)
        x = reference.decode(stored, shape=self.shape, dtype=self.dtype, **self.options)
        return x if self.then is None else self.then(x, *operands)

    def kernel(self, implementation: str, numbering: Any) -> Callable[..., Any]:
        module = _module(implementation)

        def decode(words, metadata, *rest):
            # The number of the first group comes last and does not matter here.
            operands = rest[: self.num_operands]
            x = module.decode(
                Stored(words, metadata),
                *operands,
                shape=self.shape,
                dtype=self.dtype,
                then=self.then,
                **self.options,
            )
            return (x,)

        return decode


def _module(implementation: str) -> Any:
    return importlib.import_module(f"jaxact_kernels.affine.{implementation}")

"""Encode and decode in the affine format, as values that `choose` is asked about."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels import noise
from jaxact_kernels.affine import reference
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.coded import CodedOperation
from jaxact_kernels.device import Device
from jaxact_kernels.encoding import EncodingOperation
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import Axes


@dataclasses.dataclass(frozen=True)
class AffineOperation(CodedOperation):
    """Options that encode and decode share."""

    format = "affine"

    @property
    def options(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        # Both are bound by memory by their instruction counts (kernels/benchmarks).
        # Triton comes first because it serves every shape.
        return {**super().kernels(), "mosaic_gpu": self._mosaic_declines}

    def _mosaic_declines(self, device: Device) -> str | None:
        from jaxact_kernels.affine import mosaic_gpu

        return mosaic_gpu.declines(
            self.mapped_layout, self.dtype, int(self.bits), device
        )


@dataclasses.dataclass(frozen=True)
class Encode(EncodingOperation, AffineOperation):
    """Encode an array: (x, seed) to (words, metadata).

    Attributes:
        is_dithered: whether decoding will draw the noise again.
    """

    stochastic: bool = True
    is_dithered: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def options(self) -> dict[str, Any]:
        noise = {"stochastic": self.stochastic, "is_dithered": self.is_dithered}
        return super().options | noise

    @property
    def definition(self) -> Callable[..., Stored]:
        return functools.partial(reference.encode, **self.options)

    def _mosaic_declines(self, device: Device) -> str | None:
        if self.normalization is not None:
            return "the kernel does no normalization"
        return super()._mosaic_declines(device)


@dataclasses.dataclass(frozen=True)
class Decode(AffineOperation):
    """Decode (words, metadata); a dithered one has the seed after the metadata."""

    is_dithered: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def is_called_on_cpu(self) -> bool:
        # Every reader would draw the noise again: a step of a small ResNet takes 1.20
        # times the time that it takes without dither then, and 1.09 times this way.
        return self.is_dithered

    @property
    def inputs(self) -> tuple[Axes, ...]:
        seed: tuple[Axes, ...] = ((),) if self.is_dithered else ()
        return *self.stored_axes, *seed

    @property
    def outputs(self) -> tuple[Axes, ...]:
        return (self.unpacked_axes,)

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"shape": self.shape, "dtype": self.dtype}

    def kernels(self) -> dict[str, Callable[[Device], str | None]]:
        kernels = super().kernels()
        if self.is_dithered:
            kernels["mosaic_gpu"] = lambda _: "the kernel draws no noise in decoding"
        return kernels

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return functools.partial(reference.decode, **self.options)

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        module, options = self.module(implementation), self.options

        def decode(
            words: jax.Array, metadata: jax.Array, *numbers: jax.Array
        ) -> tuple[jax.Array]:
            # A seed, and the first group's number; without dither it is no matter.
            draw = {}
            if self.is_dithered:
                seed, *first = numbers
                draw = {"draw": noise.Draw(seed, numbering, *first)}
            return (module.decode(Stored(words, metadata), **options, **draw),)

        return decode

"""Encode and decode of the mask format, as values that `choose` is asked about."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels.device import Device, old_for_triton
from jaxact_kernels.index import _operations as index
from jaxact_kernels.mask import reference
from jaxact_kernels.operation import Axes


@dataclasses.dataclass(frozen=True)
class _Mask(index._Index):
    bits: int = 1

    def _triton_declines(self, device: Device) -> str | None:
        from jaxact_kernels.mask import triton

        return old_for_triton(device) or triton.declines(self.layout, self.dtype)


@dataclasses.dataclass(frozen=True)
class Encode(_Mask, index.Encode):
    """Encode booleans x; or `x > above`, from (x, above)."""

    is_comparison: bool = False

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return super().inputs + self.is_comparison * ((),)

    def reference(self, x: jax.Array, *above: jax.Array) -> jax.Array:
        return reference.encode(x, *above)

    def kernel(self, implementation: str, numbering: Any) -> Callable[..., Any]:
        from jaxact_kernels.mask import triton

        num_operands = len(self.inputs)
        return lambda *arrays: (triton.encode(*arrays[:num_operands]),)


@dataclasses.dataclass(frozen=True)
class Decode(_Mask, index.Decode):
    """Decode words to booleans."""

    def reference(self, packed: jax.Array) -> jax.Array:
        return reference.decode(packed, shape=self.shape)

    def kernel(self, implementation: str, numbering: Any) -> Callable[..., Any]:
        from jaxact_kernels.mask import triton

        return lambda packed, *_: (triton.decode(packed, shape=self.shape),)

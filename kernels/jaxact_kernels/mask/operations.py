"""Encode and decode in the mask format, as values that `choose` is asked about."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxact_kernels import checks
from jaxact_kernels.index import operations as index
from jaxact_kernels.mask import reference
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import Axes


@dataclasses.dataclass(frozen=True)
class MaskOperation(index.IndexOperation):
    """The index format's layout and axes, with one bit."""

    bits: int = 1

    @property
    def is_called_on_cpu(self) -> bool:
        return True

    def check(self) -> None:
        if self.dtype != np.bool_:
            raise ValueError(
                f"got {checks.array_text(self.dtype, self.shape)} and no threshold; a "
                "mask is boolean; pass above=0 to store x > 0, compare first, or use "
                "jaxact_kernels.affine for floats"
            )

    def _kernel_declines(self) -> str | None:
        from jaxact_kernels.mask import triton

        return triton.declines(self.mapped_layout, self.dtype)


@dataclasses.dataclass(frozen=True)
class Encode(MaskOperation, index.Encode):
    """Encode booleans x; or `x > above`, from (x, above)."""

    is_comparison: bool = False

    def check(self) -> None:
        if not self.is_comparison:
            super().check()

    @property
    def inputs(self) -> tuple[Axes, ...]:
        return super().inputs + self.is_comparison * ((),)

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return reference.encode

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        from jaxact_kernels.mask import triton

        num_operands = len(self.inputs)
        return lambda *arrays: (triton.encode(*arrays[:num_operands]),)


@dataclasses.dataclass(frozen=True)
class Decode(MaskOperation, index.Decode):
    """Decode words to booleans."""

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return functools.partial(reference.decode, shape=self.shape)

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        from jaxact_kernels.mask import triton

        return lambda packed, *_: (triton.decode(packed, shape=self.shape),)

"""Encode and decode in the rotated format, as values that `choose` is asked about."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels import checks
from jaxact_kernels.coded import CodedOperation
from jaxact_kernels.encoding import EncodingOperation
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import Axes
from jaxact_kernels.rotated import reference
from jaxact_kernels.rotated.group import (
    HALF_BIT,
    MOST_PER_GROUP,
    check_bits,
    num_words,
)
from jaxact_kernels.rotated.reference import Stored


@dataclasses.dataclass(frozen=True)
class RotatedOperation(CodedOperation):
    """Options that encode and decode share."""

    is_adaptive: bool = False

    format = "rotated"

    @property
    def is_called_on_cpu(self) -> bool:
        # A rotation makes arrays anyway: two blocks of width 256 take 43 MiB this way,
        # and 63 where it is fused.
        return True

    def check(self) -> None:
        super().check()
        if self.is_adaptive and self.bits == HALF_BIT:
            raise ValueError(
                f"got bits={self.bits} and is_adaptive=True; at half a bit every group "
                "is rotated; pass is_adaptive=False"
            )
        if self.group_size > MOST_PER_GROUP:
            raise ValueError(
                f"got group_size={self.group_size}; sums over a group fit 32 bits only "
                f"for at most {MOST_PER_GROUP} elements; pass 256, as larger groups "
                "save 32 bits each and no noise"
            )

    def check_bits(self) -> None:
        check_bits(self.bits)

    @property
    def num_words(self) -> int:
        return num_words(self.layout.group, self.bits)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "is_adaptive": self.is_adaptive,
        }


@dataclasses.dataclass(frozen=True)
class Encode(EncodingOperation, RotatedOperation):
    """Encode an array: (x, seed) to (words, metadata)."""

    @property
    def definition(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
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
    def options(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": self.dtype, **super().options}

    @property
    def reference(self) -> Callable[..., jax.Array]:
        return functools.partial(reference.decode, **self.options)

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array]]:
        module, options = self.module(implementation), self.options

        def decode(
            words: jax.Array, metadata: jax.Array, seed: jax.Array, *first: jax.Array
        ) -> tuple[jax.Array]:
            stored = Stored(words, metadata, seed)
            return (module.decode(stored, *first, **options, numbering=numbering),)

        return decode

    def check_stored(self, stored: Stored) -> None:
        """Raise `ValueError` where this cannot decode such arrays."""
        self.check_arrays(stored, checks.array_text("uint32", ()))

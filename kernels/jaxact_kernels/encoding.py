"""Encode an array, or values that are normalized from it as they are read."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxact_kernels.coded import CodedOperation
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization, normalized_dtype
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.operation import Axes


@dataclasses.dataclass(frozen=True)
class EncodingOperation(CodedOperation):
    """Encode an array: (x, seed) to (words, metadata).

    Attributes:
        normalization: its result is encoded, and its coefficients are further operands;
            None: x is encoded.
    """

    normalization: Normalization | None = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def definition(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The words and metadata of (x, seed), without a normalization."""

    @property
    def is_called_on_cpu(self) -> bool:
        """Not with a normalization."""
        # Else each of its passes would normalize the array again.
        return self.normalization is None

    @property
    def inputs(self) -> tuple[Axes, ...]:
        """Axes of the array, of the seed, and of each coefficient."""
        x = self.unpacked_axes
        if self.normalization is None:
            return x, ()
        axes = tuple(x[axis] for axis in self.normalization.axes)
        return x, (), *(self.normalization.count * (axes,))

    @property
    def outputs(self) -> tuple[Axes, ...]:
        """Axes of words and metadata."""
        return self.stored_axes

    @property
    def reference(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The definition, of the normalized values where there is a normalization."""
        normalize = self.normalization
        if normalize is None:
            return self.definition
        of_values = dataclasses.replace(
            self,
            dtype=normalized_dtype(self.dtype),
            normalization=None,
            is_fused=True,
        )

        def encode_normalized(
            x: jax.Array, seed: jax.Array, *coefficients: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return run(of_values, normalize(x, *coefficients), seed)

        return encode_normalized

    def kernel(
        self, implementation: str, numbering: Numbering | None
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """The kernel, which takes the coefficients behind the seed."""
        module, normalization = self.module(implementation), self.normalization
        options: dict[str, Any] = {**self.options, "numbering": numbering}

        def encode(
            x: jax.Array, seed: jax.Array, *arrays: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            if normalization is None:
                return module.encode(x, seed, *arrays, **options)
            count = normalization.count
            how = {"normalization": normalization, "coefficients": arrays[:count]}
            return module.encode(x, seed, *arrays[count:], **options, **how)

        return encode

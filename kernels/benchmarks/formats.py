"""The formats with codes, as benchmarks pack and unpack by them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from shapes import Activation

from jaxact_kernels import affine, rotated
from jaxact_kernels.operation import Operation


@dataclasses.dataclass(frozen=True)
class Format:
    """A format, and the options of its operations besides shape, dtype and bits.

    Attributes:
      module: `affine` or `rotated` of `jaxact_kernels`.
      options: of both operations.
      draws_again: whether decoding wants the seed that noise was drawn from, and no
        options.
    """

    name: str
    module: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    draws_again: bool = False

    def operations(
        self, activation: Activation, bits: float
    ) -> tuple[Operation, Operation]:
        """Encode and decode, as `choose` takes them."""
        array = activation.shape, jnp.dtype(activation.dtype), bits
        return (
            self.module.Encode(*array, **self.options),
            self.module.Decode(*array, **self.options),
        )

    def encode(self, bits: float) -> Callable[..., tuple[jax.Array, ...]]:
        """A function of (array, seed), to all that decoding needs."""

        def encode(x: tuple[jax.Array, jax.Array], **which: Any) -> Any:
            stored = self.module.encode(*x, bits=bits, **self.options, **which)
            return (*stored, x[1]) if self.draws_again else stored

        return encode

    def decode(self, activation: Activation, bits: float) -> Callable[..., jax.Array]:
        """A function of what `encode` returns, to the array."""
        shape, dtype = activation.shape, jnp.dtype(activation.dtype)
        array = {"shape": shape, "dtype": dtype, "bits": bits}
        decode = functools.partial(self.module.decode, **array)
        if not self.draws_again:
            return functools.partial(decode, **self.options)

        def again(stored: tuple[jax.Array, ...], **which: Any) -> jax.Array:
            *arrays, seed = stored
            return decode(self.module.Stored(*arrays), seed=seed, **which)

        return again


FORMATS = {
    each.name: each
    for each in (
        Format("affine", affine),
        Format("dithered", affine, {"is_dithered": True}, draws_again=True),
        Format("rotated", rotated),
        Format("adaptive", rotated, {"is_adaptive": True}),
    )
}

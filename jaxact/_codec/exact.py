"""Keep a residual as it is, or do not keep it at all."""

import dataclasses
from typing import Any

import jax

from jaxact._codec.base import Action


@dataclasses.dataclass(frozen=True)
class Exact(Action):
    """Keep the array as it is."""

    def declines(self, shape: tuple[int, ...], dtype: Any) -> None:
        return None

    def encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool = False
    ) -> jax.Array:
        return x

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return stored


@dataclasses.dataclass(frozen=True)
class Recompute(Action):
    """Keep nothing: backward computes the value again from what else is kept.

    The value is computed from the nearest arguments and stored residuals, decoded, so
    it is exact only if those are.
    """

    def declines(self, shape: tuple[int, ...], dtype: Any) -> None:
        return None

    def encode(self, x: jax.Array, seed: jax.Array, is_fused: bool = False) -> Any:
        raise TypeError("Recompute stores nothing; it cannot be nested in Offload.")

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        raise TypeError("Recompute stores nothing; it cannot be nested in Offload.")

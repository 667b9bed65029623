"""Keep a residual as it is, or do not keep it at all."""

import dataclasses

import jax
from jax.typing import DTypeLike

from jaxact._codec.base import Action, Bias, Codec
from jaxact._written_as import written_as


@written_as("Exact()")
@dataclasses.dataclass(frozen=True)
class Exact(Codec[jax.Array]):
    """Keep the array as it is."""

    bias = Bias.EXACT
    bits = None
    is_packed = False
    is_differentiable = True

    @property
    def label(self) -> str:
        return "exact"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        return None

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return x

    def decode(
        self, stored: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return stored


@written_as("Recompute()")
@dataclasses.dataclass(frozen=True)
class Recompute(Action):
    """Keep nothing: backward computes the value again from other kept values.

    It starts from the nearest arguments and decoded residuals, so the result is exact
    only if those are.
    """

    bias = Bias.BIASED
    bits = None

    @property
    def label(self) -> str:
        return "recompute"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        return None

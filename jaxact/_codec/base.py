"""What every action can do."""

import abc
import enum
from typing import Any

import jax


class Bias(enum.StrEnum):
    """How the mean of a gradient, over the rounding noise, differs from its value."""

    EXACT = "exact"  # every draw is the exact gradient
    UNBIASED = "unbiased"  # noise of mean zero
    BIASED = "biased"  # something nonlinear is computed from rounded values


class Action(abc.ABC):
    """How one residual is kept from forward to backward.

    An action is a value: frozen, hashable, equal by its fields. `encode` and `decode`
    are traced into the forward and the backward pass.
    """

    @abc.abstractmethod
    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        """Why it cannot store such an array, or None when it can."""

    @abc.abstractmethod
    def encode(self, x: jax.Array, seed: jax.Array, is_fused: bool = False) -> Any:
        """The stored pytree of arrays; `seed` is a uint32 scalar.

        `is_fused`: elementwise operations compute x, and only for this.
        """

    @abc.abstractmethod
    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """An array of the given shape and dtype."""

    def keep(self, stored: Any) -> Any:
        """What `encode` gave, moved to where it waits for the backward pass."""
        return stored

    def fetch(self, kept: Any) -> Any:
        """What `keep` moved, for `decode`."""
        return kept

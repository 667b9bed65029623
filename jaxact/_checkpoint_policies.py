"""Checkpoint policies for compressed calls inside an outer `jax.checkpoint`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import core

from jaxact._jaxpr.types import Primitive
from jaxact._saved import Saved

# The `checkpoint_name` of every array that a compressed call stores.
PACKED_NAME = "jaxact_packed"


@dataclasses.dataclass(frozen=True)
class SavePacked(Saved):
    """A `jax.checkpoint` policy that saves the arrays compressed calls inside stored.

    `jax.checkpoint(f, policy=jaxact.policies.save_packed)` keeps the packed residuals
    that every compressed call in `f` stored and recomputes all else. Without it, an
    outer checkpoint recomputes the compressed calls, and packs, in the backward pass.
    """

    def __call__(
        self, primitive: Primitive, *_: core.AbstractValue, **params: Any
    ) -> bool:
        """Whether the equation names an array that jaxact packed."""
        return primitive.name == "name" and params["name"] == PACKED_NAME


save_packed = SavePacked()


@dataclasses.dataclass(frozen=True)
class SaveEither(Saved):
    """Save (or offload) the values that `first` does, and save those of `second`."""

    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(
        self, primitive: Primitive, *avals: core.AbstractValue, **params: Any
    ) -> Any:
        """True where `second` saves, else the answer that `first` gives."""
        if self.second(primitive, *avals, **params) is True:
            return True
        return self.first(primitive, *avals, **params)

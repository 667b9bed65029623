"""Checkpoint policies for compressed calls inside an outer `jax.checkpoint`."""

import dataclasses
from collections.abc import Callable
from typing import Any

# The `checkpoint_name` of every array that a compressed call stores.
PACKED_NAME = "jaxact_packed"


@dataclasses.dataclass(frozen=True)
class SavePacked:
    """A `jax.checkpoint` policy that saves what compressed calls inside stored.

    `jax.checkpoint(f, policy=jaxact.policies.save_packed)` keeps the packed residuals
    of every compressed call in `f` and recomputes all else. Without it, an outer
    checkpoint recomputes the compressed calls, and packs, in the backward pass.
    """

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        """Whether the equation names something that jaxact packed."""
        return primitive.name == "name" and params["name"] == PACKED_NAME


save_packed = SavePacked()


@dataclasses.dataclass(frozen=True)
class SaveEither:
    """Save what `first` saves (or offloads), and what `second` saves."""

    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """What `first` says, unless `second` saves."""
        if self.second(primitive, *avals, **params) is True:
            return True
        return self.first(primitive, *avals, **params)

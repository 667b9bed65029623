"""Keep a residual in host memory, through any other codec."""

import dataclasses
from typing import Any

import jax

from jaxact._codec.base import Action
from jaxact._codec.exact import Exact, Recompute


@dataclasses.dataclass(frozen=True)
class Offload(Action):
    """Store what `codec` encodes in host memory and fetch it in the backward pass."""

    codec: Action = Exact()

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Action) or isinstance(
            self.codec, Offload | Recompute
        ):
            raise ValueError(
                f"Offload({self.codec!r}): a codec that stores something is required, "
                "such as Exact() or Quantize(4)."
            )

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        return self.codec.declines(shape, dtype)

    def encode(self, x: jax.Array, seed: jax.Array, is_fused: bool = False) -> Any:
        return self.codec.encode(x, seed, is_fused)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return self.codec.decode(stored, shape, dtype)

    def keep(self, stored: Any) -> Any:
        return jax.device_put(stored, jax.memory.Space.Host)

    def fetch(self, kept: Any) -> Any:
        return jax.device_put(kept, jax.memory.Space.Device)

"""Keep a residual in host memory, through any other codec."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxact._codec.around import AroundCodec
from jaxact._codec.base import Codec
from jaxact._codec.exact import Exact
from jaxact._written_as import written_as
from jaxact_kernels.normalization import Normalization


@written_as("Offload(Quantize(4))")
@dataclasses.dataclass(frozen=True)
class Offload(AroundCodec[Any]):
    """Encode by `codec`, keep the stored arrays in host memory, fetch them in backward.

    Attributes:
      codec: any other codec; `Exact()` moves the array itself.

    Raises:
      TypeError: `codec` stores nothing, is no codec, or is an Offload itself.
    """

    codec: Codec[Any] = Exact()

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, Offload):
            raise TypeError(
                f"Offload({self.codec!r}): a codec that stores something is required, "
                "such as Exact() or Quantize(4)."
            )

    @property
    def is_differentiable(self) -> bool:
        return self.codec.is_differentiable

    @property
    def label(self) -> str:
        return f"{self.codec.label}, host"

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        return self.codec.encode(x, seed)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Any:
        return self.codec.encode_fused(x, seed)

    def encode_normalized(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization,
        coefficients: Sequence[jax.Array],
    ) -> Any:
        return self.codec.encode_normalized(x, seed, normalization, coefficients)

    def decode(
        self, stored: Any, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return self.codec.decode(stored, shape, dtype)

    def keep(self, stored: Any) -> Any:
        return jax.device_put(self.codec.keep(stored), jax.memory.Space.Host)

    def fetch(self, kept: Any) -> Any:
        return self.codec.fetch(jax.device_put(kept, jax.memory.Space.Device))

"""Round a residual as a codec does, and store the rounded values unpacked."""

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxact._codec.around import AroundCodec
from jaxact._codec.base import Codec
from jaxact._written_as import written_as


@written_as("Rounded(Quantize(4))")
@dataclasses.dataclass(frozen=True)
class Rounded(AroundCodec[jax.Array]):
    """Keep the values that decoding `codec`'s stored arrays gives (fake quantization).

    For studies of rounding noise: gradients have the same bits as with the codec
    itself, and a rounded residual can be looked at and changed like any array. Nothing
    is saved: the array is as large as before.

    Attributes:
      codec: any other codec.

    Raises:
      TypeError: `codec` is no codec, or a Rounded itself.

    Example:
      >>> import jaxact
      >>> codec = jaxact.Rounded(jaxact.Quantize(2))
      >>> jaxact.Policy(default=codec).action_for_floats.label
      '2 bits, not packed'
    """

    codec: Codec[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, Rounded):
            raise TypeError(
                f"Rounded({self.codec!r}): a codec whose rounding is wanted is "
                "required. Write Rounded(Quantize(2))."
            )

    @property
    def label(self) -> str:
        return f"{self.codec.label}, not packed"

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return self._rounded(self.codec.encode(x, seed), x)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return self._rounded(self.codec.encode_fused(x, seed), x)

    def decode(
        self, stored: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return stored

    def _rounded(self, stored: Any, x: jax.Array) -> jax.Array:
        return self.codec.decode(stored, x.shape, x.dtype)

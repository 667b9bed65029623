"""A codec around another one."""

from typing import Any

from jax.typing import DTypeLike

from jaxact._codec.base import Bias, Codec, Stored


class AroundCodec(Codec[Stored]):
    """Stores by `codec`, whose bias and bits it has, and declines as that does.

    Attributes:
      codec: the other one.
    """

    codec: Codec[Any]

    @property
    def bias(self) -> Bias:
        return self.codec.bias

    @property
    def bits(self) -> float | None:
        return self.codec.bits

    @property
    def is_free_of_axes(self) -> bool:
        return self.codec.is_free_of_axes

    @property
    def decodes_to_memory(self) -> bool:
        return self.codec.decodes_to_memory

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return self.codec.declines(shape, dtype)

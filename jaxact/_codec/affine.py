"""Group-wise integers with stochastic rounding (ActNN, Chen et al. 2021)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxact._codec.base import Action
from jaxact_kernels import affine


@dataclasses.dataclass(frozen=True)
class Quantize(Action):
    """Store groups of the last axis as value ~ zero point + scale * code.

    Codes are integers of `bits` bits. With stochastic rounding the decoded value's mean
    is the encoded value, and its variance is scale^2 f (1 - f), f being the fractional
    code (ActNN, Chen et al. 2021, arXiv:2104.14129, eq. 6). Constant groups, and zeros
    at a group's minimum, come back exactly.

    Attributes:
      bits: per element, 1 to 8.
      group_size: elements that share a scale and a zero point (32 bits together); a
        multiple of 32.
      stochastic: round at random (unbiased), not to nearest.
    """

    bits: int = 4
    group_size: int = 256
    stochastic: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in range(1, 9):
            raise ValueError(
                f"Quantize(bits={self.bits!r}): bits must be an integer from 1 to 8. "
                "To keep 16 bits use Cast(jnp.bfloat16), to keep all use Exact()."
            )
        if not isinstance(self.group_size, int) or self.group_size not in range(
            32, 1 << 20, 32
        ):
            raise ValueError(
                f"Quantize(group_size={self.group_size!r}): group_size must be a "
                "positive multiple of 32, because groups fill whole 32-bit words. "
                "Use 256 unless a smaller error is worth 32 bits per group."
            )

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        real = jnp.issubdtype(dtype, jnp.floating)
        return None if real else f"Quantize stores real floats, not {dtype}"

    def encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool = False
    ) -> affine.Stored:
        return affine.encode(
            x,
            seed,
            bits=self.bits,
            group_size=self.group_size,
            stochastic=self.stochastic,
            is_fused=is_fused,
        )

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return affine.decode(
            stored,
            shape=shape,
            dtype=dtype,
            bits=self.bits,
            group_size=self.group_size,
            is_fused=True,
        )

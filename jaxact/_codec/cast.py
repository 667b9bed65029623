"""Store a residual in a narrower float type."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxact._codec.base import Action


@dataclasses.dataclass(frozen=True)
class Cast(Action):
    """Store as `dtype` (bfloat16, float16, float8_*), rounded to nearest.

    The rounding is not random, so the gradient carries a bias of at most half a unit
    in the last place of `dtype`.
    """

    dtype: Any

    def __post_init__(self) -> None:
        dtype = jnp.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"Cast({dtype}): a float type is required, such as jnp.bfloat16 or "
                "jnp.float8_e4m3fn. For integer codes use Quantize(bits)."
            )
        object.__setattr__(self, "dtype", dtype)

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        if not jnp.issubdtype(dtype, jnp.floating):
            return f"Cast stores real floats, not {dtype}"
        if jnp.dtype(dtype).itemsize <= self.dtype.itemsize:
            return f"{dtype} is no wider than {self.dtype}"
        return None

    def encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool = False
    ) -> jax.Array:
        return x.astype(self.dtype)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return stored.astype(dtype)

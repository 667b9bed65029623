"""Store a residual in a narrower float type."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxact._codec.base import Bias, Codec
from jaxact._codec.checks import checked_dtype
from jaxact._written_as import written_as


@written_as("Cast(jnp.bfloat16)")
@dataclasses.dataclass(frozen=True, init=False)
class Cast(Codec[jax.Array]):
    """Store as `dtype` (bfloat16, float16, float8_*), rounded to nearest.

    The rounding is not random, so the gradient carries a bias: at most half a unit in
    the last place that `dtype` has. Numbers beyond its largest one, and infinities,
    become that where it has fewer exponents than the residual; those that are nearer to
    zero than half its smallest one become zero.

    Attributes:
      dtype: any real float type, or its name.

    Raises:
      TypeError: not a dtype.
      ValueError: not a real float type, or one without a sign.
    """

    dtype: np.dtype

    bias = Bias.BIASED

    def __init__(self, dtype: DTypeLike) -> None:
        checked = checked_dtype("Cast(", dtype)
        if not jnp.issubdtype(checked, jnp.floating):
            raise ValueError(
                f"Cast({checked}): a float type is required, such as jnp.bfloat16 or "
                "jnp.float8_e4m3fn. For integer codes use Quantize(bits)."
            )
        if float(jnp.finfo(checked).min) >= 0:
            raise ValueError(
                f"Cast({checked}): a type with a sign is required, such as "
                "jnp.float8_e4m3fn."
            )
        object.__setattr__(self, "dtype", checked)

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def label(self) -> str:
        return str(self.dtype)

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        declined = super().declines(shape, dtype)
        if declined is None and jnp.dtype(dtype).itemsize <= self.dtype.itemsize:
            return f"{dtype} is no wider than {self.dtype}"
        return declined

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        own = jnp.finfo(self.dtype)
        if own.maxexp < jnp.finfo(x.dtype).maxexp:
            largest = jnp.asarray(own.max, x.dtype)
            x = jnp.clip(x, -largest, largest)
        return x.astype(self.dtype)

    def decode(
        self, stored: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return stored.astype(dtype)

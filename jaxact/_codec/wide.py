"""Condition float64 groups so that float32 arithmetic loses nothing that counts.

The formats for floats compute in float32. Outside its range, or where a group lies far
from zero for its width, a float64 array would come back as zeros or as one value. So
each group keeps an anchor, its least finite element, and a power of two, both float64,
and only the remainder above the anchor, between 0 and 2, is encoded.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels.layout import Layout, layout_of

# With these the power of two and its inverse are normal numbers.
_LEAST_EXPONENT, _LARGEST_EXPONENT = -1000, 1022
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023


Stored = TypeVar("Stored")


class Wide(NamedTuple, Generic[Stored]):
    """A float64 array in a format for floats, conditioned.

    An element is 2 * (anchor / 2 + unit * remainder).

    Attributes:
      remainder: of float32 values, all at least 0.
      anchor: `float64[*lead, num_groups]`, the least finite element, or 0.
      unit: `float64[*lead, num_groups]`, a power of two.
    """

    remainder: Stored
    anchor: jax.Array
    unit: jax.Array


def is_needed(dtype: DTypeLike) -> bool:
    """Whether arrays of this dtype are conditioned."""
    return np.dtype(dtype) == np.float64


def encode(
    x: jax.Array, group_size: int, pack: Callable[[jax.Array], Stored]
) -> Wide[Stored]:
    """Condition `x`, and encode the remainder by `pack`, which computes in float32.

    Args:
      x: floating point.
      group_size: most elements in a group, see `layout_of`.
    """
    remainder, anchor, unit = condition(x, layout_of(x.shape, group_size))
    return Wide(pack(remainder), anchor, unit)


def decode(
    stored: Wide[Stored],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    group_size: int,
    unpack: Callable[[Stored, np.dtype], jax.Array],
) -> jax.Array:
    """Undo `encode`; `unpack` decodes to the dtype that it is given."""
    x = unpack(stored.remainder, np.dtype(np.float32))
    layout = layout_of(shape, group_size)
    return restore(x, stored.anchor, stored.unit, layout).astype(dtype)


def condition(x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The remainder, float32 and shaped like `x`, and each group's anchor and unit.

    Infinities and NaNs stay what they are in the remainder.
    """
    groups = layout.split(x, jnp.nan)
    is_finite = jnp.isfinite(groups)
    low = jnp.min(jnp.where(is_finite, groups, jnp.inf), -1)
    high = jnp.max(jnp.where(is_finite, groups, -jnp.inf), -1)
    has_finite = low <= high
    anchor = jnp.where(has_finite, low, 0.0)
    half_range = jnp.where(has_finite, high / 2 - low / 2, 0.0)
    exponent = lax.bitcast_convert_type(half_range, jnp.int64) >> _MANTISSA_BITS
    exponent = jnp.clip(exponent - _EXPONENT_BIAS, _LEAST_EXPONENT, _LARGEST_EXPONENT)
    # Infinities without a finite element beside them decode to float32's largest.
    exponent = jnp.where(has_finite, exponent, -1)
    remainder = (groups / 2 - anchor[..., None] / 2) * _power(-exponent)[..., None]
    return layout.join(remainder, x.shape).astype(jnp.float32), anchor, _power(exponent)


def restore(
    remainder: jax.Array, anchor: jax.Array, unit: jax.Array, layout: Layout
) -> jax.Array:
    """The float64 array, given a decoded remainder with its shape."""
    groups = layout.split(remainder.astype(jnp.float64), 0.0)
    half = groups * unit[..., None] + anchor[..., None] / 2
    most = float(jnp.finfo(jnp.float64).max)
    # A group's top code may lie a scale's rounding above its largest element.
    return layout.join(jnp.clip(2 * half, -most, most), remainder.shape)


def _power(exponent: jax.Array) -> jax.Array:
    """2 to an integer power, exactly; `exp2` is off by some units."""
    bits = (exponent + _EXPONENT_BIAS) << _MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float64)

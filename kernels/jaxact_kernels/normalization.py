"""The map from a norm's input to its normalized values.

A value like it is stored through the map, so that a few numbers for each channel are
all that its groups need not cover. An encoder that applies the map itself reads the
input, which a norm's statistics read too, and nothing else is in memory.
"""

import dataclasses

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike


def normalized_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of values that are normalized from an array with this one."""
    return np.promote_types(dtype, np.float32)


@dataclasses.dataclass(frozen=True)
class Normalization:
    """(x - mean) * factor, in float32 or wider.

    Attributes:
        axes: those of the array along which mean and factor differ, ascending; counted
            from the last, -1, so that axes in front change nothing.
        is_centered: whether there is a mean.
    """

    axes: tuple[int, ...]
    is_centered: bool

    @property
    def count(self) -> int:
        """How many arrays of coefficients there are."""
        return 1 + self.is_centered

    def __call__(self, x: jax.Array, *coefficients: jax.Array) -> jax.Array:
        """The normalized values.

        Args:
            x: the norm's input.
            *coefficients: the mean, if there is one, and the factor: arrays with the
                sizes of `axes` and the dtype of the result.
        """
        kept = [axis % x.ndim for axis in self.axes]
        wide = [lax.broadcast_in_dim(c, x.shape, kept) for c in coefficients]
        x = lax.convert_element_type(x, normalized_dtype(x.dtype))
        return self.scaled(x, *wide)

    def scaled(self, x: jax.Array, *coefficients: jax.Array) -> jax.Array:
        """The same for arrays with one shape and the dtype of the result."""
        *mean, factor = coefficients
        return lax.mul(lax.sub(x, *mean) if mean else x, factor)

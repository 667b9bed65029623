"""Which format an adaptive group has: the one that is expected to err least.

Decided from the values alone, so that the decoded values stay unbiased.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.affine.group import FRACTION, float_of
from jaxact_kernels.rotated.centered import Frame, fixed_bits, power_of_two
from jaxact_kernels.rotated.group import NORMAL_ERROR, size_bits

SPARE = 1  # bits of a scale and of a zero point, which say the choice
ROTATED = np.uint32(1)
DITHERED = np.uint32(1 << 16)
SMALLEST_REACH = -87  # its exponent; below, scales could underflow: no rotation


def choose(
    frame: Frame,
    squares: jax.Array,
    stochastic: jax.Array,
    count: jax.Array | np.ndarray | np.uint32,
    metadata: jax.Array,
    group: int,
    bits: int,
) -> tuple[jax.Array, jax.Array]:
    """Metadata with the flag for dither; and whether a group is rotated.

    Expected squared errors: of stochastic rounding, scale^2 f (1 - f) for each element,
    f the fraction of its code; with dither, scale^2 / 12; rotated, a known part of the
    squared distance from the mean.

    Args:
        frame: of each group.
        squares: `int32`, sums of squared sizes.
        stochastic: `uint32`, sums of `spread`.
        count: `uint32`, how many elements were added.
        metadata: of the affine format.
    """
    dithered = jnp.broadcast_to(
        count * np.uint32(65536) // np.uint32(12), squares.shape
    )
    is_dithered = (dithered < stochastic) & frame.is_ordinary
    least = lax.min(dithered, stochastic).astype(np.int32).astype(np.float32)
    # In a unit in which nothing overflows: no distance from the mean is above 1.
    step = float_of(metadata << np.uint32(16)) * power_of_two(frame.exponent)
    step = step * np.float32(2.0 ** -(fixed_bits(group) + 1))
    affine_error = step * step * (least * np.float32(2.0**-16))
    factor = np.float32(NORMAL_ERROR[bits] * 4.0 ** -size_bits(group))
    rotated_error = squares.astype(np.float32) * factor
    largest = np.int32(fixed_bits(group) - 1 - SMALLEST_REACH)
    is_rotated = (rotated_error < affine_error) & (frame.exponent <= largest)
    flag = is_dithered.astype(np.uint32) * DITHERED
    return metadata | flag, is_rotated & frame.is_ordinary


def spread(fixed: jax.Array) -> jax.Array:
    """f (1 - f) for the fraction f of an affine code, `uint32`, in units of 2**-16.

    Args:
        fixed: codes in units of 2**-16.
    """
    fraction = fixed & FRACTION
    return fraction * (np.uint32(65536) - fraction) >> np.uint32(16)


def is_rotated(metadata: jax.Array) -> jax.Array:
    """Whether the flag for rotation is set; a constant group has its own bits there."""
    return (metadata & ROTATED) != np.uint32(0)


def is_dithered(metadata: jax.Array) -> jax.Array:
    """Whether the flag for dither is set."""
    return (metadata & DITHERED) != np.uint32(0)


def without_flags(metadata: jax.Array) -> jax.Array:
    """Zero point and scale."""
    return metadata & ~(ROTATED | DITHERED)

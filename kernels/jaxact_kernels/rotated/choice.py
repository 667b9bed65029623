"""Which format an adaptive group has: the one that is expected to err least.

Decided from the values alone, so that the decoded values stay unbiased.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.affine.group import float_of
from jaxact_kernels.layout import Layout
from jaxact_kernels.rotated import group
from jaxact_kernels.rotated.centred import (
    Centred,
    exponent_of,
    integer_sizes,
    power_of_two,
    real_elements,
    total,
)

SPARE = 1  # bits of a scale and of a zero point, which say the choice
ROTATED = np.uint32(1)
DITHERED = np.uint32(1 << 16)
SMALLEST_PEAK = np.int32(-87)  # below, scales could underflow: no rotation


def choose(
    centred: Centred, fixed: jax.Array, metadata: jax.Array, layout: Layout, bits: int
) -> tuple[jax.Array, jax.Array]:
    """Metadata with the flag for dither; and whether a group is rotated.

    Expected squared errors: of stochastic rounding, scale^2 f (1 - f) for each element,
    f the fraction of its code; with dither, scale^2 / 12; rotated, a known part of the
    squared distance from the mean.

    Args:
        fixed: affine codes in units of 2**-16.
        metadata: of the affine format.
    """
    fraction = fixed & np.uint32(0xFFFF)
    product = fraction * (np.uint32(65536) - fraction)
    stochastic = total(product >> np.uint32(16))
    dithered = real_elements(layout) * np.uint32(65536) // np.uint32(12)
    dithered = jnp.broadcast_to(dithered, stochastic.shape)
    is_dithered = (dithered < stochastic) & centred.is_ordinary
    least = lax.min(dithered, stochastic).astype(np.int32).astype(np.float32)
    # In a unit in which nothing overflows: the largest distance is between 1 and 2.
    exponent = exponent_of(centred.reach, least=-60)
    step = float_of(metadata << np.uint32(16)) * power_of_two(
        np.int32(1) - centred.exponent
    )
    step = step * power_of_two(-exponent)
    affine_error = step * step * (least * np.float32(2.0**-16))
    bits_of_size = group.size_bits(layout.group)
    distances = integer_sizes(centred.elements, exponent, bits_of_size)
    squares = (total(distances * distances) >> np.uint32(1)).astype(np.int32)
    factor = 2 * group.NORMAL_ERROR[bits] * 4.0 ** (1 - bits_of_size)
    rotated_error = squares.astype(np.float32) * np.float32(factor)
    is_rotated = (rotated_error < affine_error) & (centred.exponent >= SMALLEST_PEAK)
    flag = is_dithered.astype(np.uint32) * DITHERED
    return metadata | flag, is_rotated & centred.is_ordinary


def is_rotated(metadata: jax.Array) -> jax.Array:
    """Whether the flag for rotation is set; a constant group has its own bits there."""
    return (metadata & ROTATED) != np.uint32(0)


def is_dithered(metadata: jax.Array) -> jax.Array:
    """Whether the flag for dither is set."""
    return (metadata & DITHERED) != np.uint32(0)


def without_flags(metadata: jax.Array) -> jax.Array:
    """Zero point and scale."""
    return metadata & ~(ROTATED | DITHERED)

"""Levels and scale for one rotated group, in integers.

Sums over a group decide its metadata. Integers add up to the same in any order, so all
implementations agree on them. A rotated element y is seen as its *size*, an integer up
to 2**f: |y| times a power of two, rounded; f is `size_bits(group)`.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.affine.group import pattern

# Positive levels with the least squared error for a standard normal (Lloyd 1982; Max
# 1960, "Quantizing for minimum distortion"), in units of 1 / 512.
LEVELS = {
    1: (409,),
    2: (232, 773),
    3: (125, 387, 688, 1102),
    4: (66, 199, 336, 482, 643, 828, 1059, 1399),
}
# Above, levels lie half a step from zero and a step apart, in units of 1 / 4096; these
# steps have the least squared error.
STEPS = {5: 771, 6: 426, 7: 233, 8: 126}
# Expected squared error over squared values, with the unbiased scale.
NORMAL_ERROR = {
    **{1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009592},
    **{5: 0.003507, 6: 0.001041, 7: 0.0003044, 8: 0.0000877},
}
MOST_PER_GROUP = 4096
DEVIATION_BITS = 15  # a standard deviation is in units of 2**-15 of the top size
SMALLEST_EXPONENT = np.int32(19)  # of a scale: 2**-108, as in the affine format


def size_bits(group: int) -> int:
    """The bits f with which sums of squared sizes, up to group * 4**f, fit 32 bits."""
    return (31 - (group - 1).bit_length()) // 2


def deviation(squares: jax.Array, group: int) -> jax.Array:
    """The root of a mean square, rounded down, in units of 2**-15 of the top size.

    Args:
        squares: `uint32`, the sum of squared sizes over each group.
    """
    shift = 2 * (DEVIATION_BITS - size_bits(group))
    return _integer_root(squares // np.uint32(group) << np.uint32(shift))


def level_numbers(sizes: jax.Array, deviations: jax.Array, bits: int) -> jax.Array:
    """Which positive level is nearest to each size: `uint32[..., group]`.

    Args:
        sizes: of elements, `uint32[..., group]`.
        deviations: from `deviation`, one for each group.
    """
    shift = DEVIATION_BITS - size_bits(sizes.shape[-1])
    if bits in LEVELS:
        number = lax.full_like(sizes, 0)
        for a, b in itertools.pairwise(LEVELS[bits]):
            # Half way between two levels, (a + b) / 1024 standard deviations.
            middle = deviations * np.uint32(a + b) >> np.uint32(10 + shift)
            number = number + (sizes > middle[..., None]).astype(np.uint32)
        return number
    # A product with an inverse, 2**31 / (deviation * step).
    steps = lax.max(deviations * np.uint32(STEPS[bits]), np.uint32(1 << 16))
    inverse = np.uint32(1 << 31) // steps
    number = (sizes << np.uint32(shift)) * inverse[..., None] >> np.uint32(19)
    return lax.min(number, np.uint32(2 ** (bits - 1) - 1))


def level(number: jax.Array, bits: int) -> jax.Array:
    """The level with a number, `uint32`: in units of 1 / 512, or of half steps."""
    if bits not in LEVELS:
        return (number << np.uint32(1)) + np.uint32(1)
    return _chosen(number, LEVELS[bits])


def scale(
    squares: jax.Array,
    products: jax.Array,
    exponent: jax.Array,
    draw: jax.Array,
    spare: int,
) -> jax.Array:
    """bfloat16 bits of squares / products * 2**exponent, rounded at random.

    This is the scale with which levels are unbiased over rotations (Vargaftik et al.
    2021, "DRIVE", arXiv:2105.08339; 2022, "EDEN", arXiv:2108.08842). Rounded to nearest
    it would be biased for every element alike. 0 where it is below 2**-108.

    Args:
        squares: sum of squared sizes.
        products: sum of sizes times levels.
        exponent: `int32`.
        draw: `uint32`, random.
        spare: how many of the last bits are 0.
    """
    zeros, divisor_zeros = lax.clz(squares), lax.clz(products)
    divisor = products << divisor_zeros  # of which 16 bits, rounded, are enough
    divisor = (divisor >> np.uint32(16)) + (divisor >> np.uint32(15) & np.uint32(1))
    quotient = (squares << zeros) // lax.max(divisor, np.uint32(1))
    exact = pattern(quotient.astype(np.int32).astype(np.float32))
    exponent = exponent + (divisor_zeros - zeros).astype(np.int32) - np.int32(16)
    biased = (exact >> np.uint32(23)).astype(np.int32) + exponent
    exact = exact + (exponent.astype(np.uint32) << np.uint32(23))
    rounded = exact + (draw & np.uint32((2**16 << spare) - 1))
    rounded = rounded >> np.uint32(16 + spare) << np.uint32(spare)
    is_normal = (products > np.uint32(0)) & (biased >= SMALLEST_EXPONENT)
    return jnp.where(is_normal, rounded, np.uint32(0))


def _integer_root(x: jax.Array) -> jax.Array:
    """The square root of `uint32` below 2**31, rounded down."""
    root = lax.sqrt(x.astype(np.int32).astype(np.float32))
    root = root.astype(np.int32).astype(np.uint32)
    # Compilers' roots may be off by some units in the last place.
    root = root - (root * root > x).astype(np.uint32)
    above = root + np.uint32(1)
    return root + (above * above <= x).astype(np.uint32)


def _chosen(number: jax.Array, values: Sequence[int]) -> jax.Array:
    """`values[number]`, by selects over the number's bits."""
    full = [lax.full_like(number, value) for value in values]
    bit = 0
    while len(full) > 1:
        is_set = (number & np.uint32(1 << bit)) != np.uint32(0)
        pairs = zip(full[::2], full[1::2], strict=True)
        full = [lax.select(is_set, odd, even) for even, odd in pairs]
        bit += 1
    return full[0]

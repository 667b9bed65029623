"""Levels and scale for one rotated group, in integers.

Sums over a group decide its metadata. Integers add up to the same in any order, so all
implementations agree on them.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels import checks
from jaxact_kernels.affine.group import pattern
from jaxact_kernels.rotated import largest
from jaxact_kernels.rotated.centered import exponent_of, fixed_bits, power_of_two
from jaxact_kernels.words import WORD_BITS

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
HALF_BIT = 0.5  # codes of four bits for eight elements, see `largest`
# Expected squared error over squared values, with the unbiased scale.
NORMAL_ERROR = {
    **{HALF_BIT: 1.517, 1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009592},
    **{5: 0.003507, 6: 0.001041, 7: 0.0003044, 8: 0.0000877},
}
MOST_PER_GROUP = 4096
SMALLEST_EXPONENT = np.int32(19)  # of a scale: 2**-108, as in the affine format


def check_bits(bits: float) -> None:
    """Raise `ValueError` unless `bits` is half a bit or an integer from 1 to 8."""
    if bits != HALF_BIT:
        checks.check_bits(bits, f"an element has {HALF_BIT} bits, or it")


def group_bits(group: int, bits: float) -> float:
    """Bits for each element; a group of 32, which takes a word at any, has one each."""
    return 1 if bits == HALF_BIT and group == WORD_BITS else bits


def affine_bits(bits: float) -> int:
    """Bits in a code of a group that is not rotated, at half a bit of a constant."""
    return max(1, int(bits))


def num_words(group: int, bits: float) -> int:
    """Words that a group's codes take: whole ones."""
    return math.ceil(group * group_bits(group, bits) / WORD_BITS)


def size_bits(group: int) -> int:
    """The bits f with which sums of squared sizes, up to group * 4**f, fit 31 bits."""
    return (31 - (group - 1).bit_length()) // 2


def size(distance: jax.Array, group: int) -> jax.Array:
    """Sizes of distances from the mean in steps, in `size_bits`, `uint32`."""
    scaled = lax.mul(lax.abs(distance), np.float32(2.0 ** -dropped_bits(group)))
    scaled = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    return scaled.astype(np.int32).astype(np.uint32)


def dropped_bits(group: int) -> int:
    """By how many bits a size is shorter than a distance from the mean, in steps."""
    return fixed_bits(group) + 1 - size_bits(group)


def norm_exponent(squares: jax.Array, group: int) -> jax.Array:
    """The e with which a group's norm times 2**e is at most 2**norm_bits, `int32`.

    Args:
        squares: `int32`, the sum of squared sizes over each group.
    """
    above = exponent_of(squares.astype(np.float32), least=0) + np.int32(2)
    bits = lax.shift_right_arithmetic(above, np.int32(1)) + np.int32(
        dropped_bits(group)
    )
    return np.int32(norm_bits(group)) - bits


def norm_bits(group: int) -> int:
    """A norm's bits, with which sums of its products with levels fit 32 bits."""
    return 13 if group <= 1024 else 12


def deviation(squares: jax.Array, group: int) -> jax.Array:
    """The root of a mean square, rounded down, `int32`, in steps.

    Args:
        squares: `int32`, the sum of squared sizes over each group.
    """
    shift = np.uint32(2 * dropped_bits(group))
    mean = lax.div(squares.astype(np.uint32), np.uint32(group))
    return _integer_root(lax.shift_left(mean, shift))


def thresholds(deviation: jax.Array, exponent: jax.Array, bits: int) -> list[jax.Array]:
    """Bounds between positive levels, lowest first; for 5 bits or more a slope.

    Args:
        deviation: from `deviation`, one for each group.
        exponent: `int32`, of what the rotation multiplied steps with.
    """
    if bits in LEVELS:
        scaled = deviation.astype(np.float32) * power_of_two(exponent)
        # Half way between two levels: (a + b) / 1024 standard deviations.
        pairs = itertools.pairwise(LEVELS[bits])
        return [scaled * np.float32((a + b) / 1024) for a, b in pairs]
    # 2**31 / (deviation * step) by integers: not every device divides floats alike.
    steps = lax.max(
        deviation.astype(np.uint32) * np.uint32(STEPS[bits]), np.uint32(1 << 15)
    )
    inverse = lax.div(lax.full_like(steps, 1 << 31), steps)
    return [inverse.astype(np.int32).astype(np.float32) * power_of_two(-19 - exponent)]


def level_number(y: jax.Array, bounds: list[jax.Array], bits: int) -> jax.Array:
    """Which positive level is nearest to |y|, `uint32`.

    Args:
        y: a rotated element.
        bounds: from `thresholds`, with one element where `y` has one.
    """
    y = lax.abs(y)
    if bits in LEVELS:
        number = lax.full_like(y, 0, np.uint32)
        for bound in bounds:
            number = lax.add(number, lax.gt(y, bound).astype(np.uint32))
        return number
    number = lax.mul(y, bounds[0]).astype(np.int32).astype(np.uint32)  # rounds down
    return lax.min(number, np.uint32(2 ** (bits - 1) - 1))


def fraction_bits(bits: float, group: int) -> int:
    """Elements' fraction in a decoder's transforms, which keeps them below 2**15."""
    if bits == HALF_BIT:  # for each element, over the root of the sum of squares
        most = largest.LEVEL / math.sqrt(largest.TOGETHER)
    else:
        most = LEVELS[int(bits)][-1] if bits in LEVELS else 2**bits - 1
    return math.floor(15 - math.log2(most * math.sqrt(group)))


def level(number: jax.Array, bits: int) -> jax.Array:
    """The level with a number, `uint32`: in units of 1 / 512, or of half steps."""
    if bits not in LEVELS:
        return (number << np.uint32(1)) + np.uint32(1)
    return _chosen(number, LEVELS[bits])


def level_value(number: jax.Array, bits: int) -> jax.Array:
    """The level as float32."""
    if bits not in LEVELS:
        return level(number, bits).astype(np.int32).astype(np.float32)
    return _chosen(number, LEVELS[bits], np.float32)


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
        squares: sum of squared sizes, `uint32`.
        products: sum of rotated elements times levels, both positive, `uint32`.
        exponent: `int32`.
        draw: `uint32`, random.
        spare: how many of the last bits are 0.
    """
    zeros, divisor_zeros = _leading_zeros(squares), _leading_zeros(products)
    divisor = products << divisor_zeros  # of which 16 bits, rounded, are enough
    divisor = (divisor >> np.uint32(16)) + (divisor >> np.uint32(15) & np.uint32(1))
    quotient = (squares << zeros) // lax.max(divisor, np.uint32(1))
    exact = pattern(quotient.astype(np.int32).astype(np.float32))
    exponent = exponent + (divisor_zeros - zeros).astype(np.int32) - np.int32(16)
    biased = (exact >> np.uint32(23)).astype(np.int32) + exponent
    exact = exact + (exponent.astype(np.uint32) << np.uint32(23))
    rounded = exact + (draw & np.uint32((2**16 << spare) - 1))
    rounded = rounded >> np.uint32(16 + spare) << np.uint32(spare)
    is_normal = (products > np.uint32(0)) & (squares > np.uint32(0))
    is_normal = is_normal & (biased >= SMALLEST_EXPONENT)
    return jnp.where(is_normal, rounded, np.uint32(0))


def _leading_zeros(x: jax.Array) -> jax.Array:
    """Zeros above the highest one, `uint32`; 31 for 0. Triton has no `lax.clz`."""
    count = lax.full_like(x, 0)
    for half in (16, 8, 4, 2, 1):
        is_low = x < np.uint32(1 << (32 - half))
        step = is_low.astype(np.uint32) * np.uint32(half)
        count, x = count + step, lax.shift_left(x, step)
    return count


def _integer_root(x: jax.Array) -> jax.Array:
    """The square root of `uint32` below 2**31, rounded down."""
    root = lax.sqrt(x.astype(np.int32).astype(np.float32))
    root = root.astype(np.int32).astype(np.uint32)
    # Compilers' roots may be off by some units in the last place.
    root = root - (root * root > x).astype(np.uint32)
    above = root + np.uint32(1)
    return root + (above * above <= x).astype(np.uint32)


def _chosen(
    number: jax.Array, values: Sequence[int], dtype: type = np.uint32
) -> jax.Array:
    """`values[number]`, by selects over the number's bits."""
    full = [lax.full_like(number, value, dtype) for value in values]
    bit = 0
    while len(full) > 1:
        is_set = (number & np.uint32(1 << bit)) != np.uint32(0)
        pairs = zip(full[::2], full[1::2], strict=True)
        full = [lax.select(is_set, odd, even) for even, odd in pairs]
        bit += 1
    return full[0]

"""Half a bit for an element: eight rotated elements have one code of four bits.

It says which of the eight is largest, and its sign: three bits and the lowest. The
vector of eight becomes the nearest of 16 vectors, with 1 or -1 at one place. That errs
less than signs of half of the elements (1.52 and 2.14 times the square), as the largest
of eight has 0.4 of the square on average, and any other an eighth.

The eight lie an eighth of the group apart, so that a GPU's thread has them in registers
of its own. Of elements with one size the last is taken.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.affine.group import float_of, pattern
from jaxact_kernels.rotated.centered import MAGIC, as_integer

TOGETHER = 8  # elements that have one code
CODE_BITS = 4
LEVEL = 512  # of the largest, in units of 1 / 512
_CODE = np.uint32(2**CODE_BITS - 1)
_PLACE = np.uint32(1)  # where, in a code, the place begins


def keys(y: jax.Array, place: jax.Array) -> jax.Array:
    """Numbers in the order of sizes, then places, whose last four bits are codes.

    Args:
        y: integers below 2**20 in size, float32: the last bits of their patterns are 0.
            No zero is negative.
        place: of each among its eight, `uint32`.
    """
    bits = pattern(y)  # turned by one, so that the sign comes last
    size = lax.shift_left(bits, np.uint32(1))
    bits = lax.bitwise_or(size, lax.shift_right_logical(bits, np.uint32(31)))
    return lax.bitwise_or(bits, lax.shift_left(place, _PLACE))


def largest(y: jax.Array) -> jax.Array:
    """The largest key of each eight in groups, `float32[*lead, group]`.

    Returns:
        `uint32[*lead, group / 8]`.
    """
    *lead, group = y.shape
    # Signs of zeros differ with the order of sums.
    y = jnp.where(y == np.float32(0), np.float32(0), y)
    shape, axis = (*lead, TOGETHER, group // TOGETHER), len(lead)
    place = lax.broadcasted_iota(np.uint32, shape, axis)
    return lax.reduce(keys(y.reshape(shape), place), np.uint32(0), lax.max, (axis,))


def codes_and_products(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes; and products of vectors and elements, `int32`."""
    size = lax.shift_right_logical(lax.bitwise_and(key, ~_CODE), np.uint32(1))
    size = as_integer(lax.add(float_of(size), MAGIC))
    return lax.bitwise_and(key, _CODE), lax.mul(size, np.int32(LEVEL))


def elements(code: jax.Array, place: jax.Array) -> jax.Array:
    """What the vectors with these codes have at places, float32."""
    sign = lax.shift_left(code, np.uint32(31))  # the lowest bit on top
    one = lax.full(code.shape, LEVEL, np.float32)
    there = float_of(lax.bitwise_or(pattern(one), sign))
    is_there = lax.eq(lax.shift_right_logical(code, _PLACE), place)
    return lax.select(is_there, there, lax.full_like(there, 0))

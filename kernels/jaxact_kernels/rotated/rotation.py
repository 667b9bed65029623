"""A random rotation for each group: signs and a Hadamard transform, two rounds.

A round flips each element's sign at random and takes the Hadamard transform, so that
every element is spread over all of the group and elements look like draws from a
normal. One round is not enough for groups with few elements that are not zero: all
rotated elements can then have few different sizes, and rounding them is biased (bias^2
up to 0.3 of the squared error for 4 values in 256). After two rounds it is under 5e-4
on every residual tried (`tests/laws/test_rotated.py`).

A group that is no power of two has two overlapping *windows*, its first and its last
2**k elements, which together cover it; a round transforms one after the other.

Elements are integers, as float32, and are rounded to integers after every transform
but a decoder's last. Before a transform they are also rounded to the 11 significant
bits of float16. All sums stay below 2**24, where float32 adds integers exactly: in any
order, and on tensor cores.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.words import WORD_BITS

ROUNDS = 2
SIGN = np.uint32(31)  # the sign's place in a float32
# The largest transform by one product with a matrix: XLA:CPU takes half the time for
# 256 elements as 4 such parts and butterflies (jax 0.12).
DENSE = 64
FRACTION_BITS = 4  # below the point, that rotated elements have


class Window(NamedTuple):
    """Consecutive elements that are transformed together; `size` is a power of two."""

    start: int
    size: int


def windows(group: int) -> tuple[Window, ...]:
    """The windows in a group, in the order in which `rotate` transforms them."""
    size = 1 << (group.bit_length() - 1)
    if size == group:
        return ROUNDS * (Window(0, group),)
    return ROUNDS * (Window(0, size), Window(group - size, size))


def rotate(x: jax.Array, keys: jax.Array, unit: jax.Array) -> jax.Array:
    """Rotate integers, `float32[*keys.shape, group]`; orthogonal up to rounding.

    Args:
        x: the groups.
        keys: `uint32`, one for each group.
        unit: for each group a power of two, with which its norm is at most
            `2**norm_bits(group)`.

    Returns:
        Integers: the rotated elements times `unit * 2**FRACTION_BITS`.
    """
    stages = windows(x.shape[-1])
    for number, window in enumerate(stages):
        x = _transform(_flip(_significant(x), keys, number), window)
        if number == 0:
            x = lax.mul(x, lax.broadcast_in_dim(unit, x.shape, range(unit.ndim)))
        factor = norms(x.shape[-1], window)
        if number == len(stages) - 1:
            factor = factor * np.float32(2.0**FRACTION_BITS)
        x = _rounded(lax.mul(x, _row(factor, x)))
    return x


def rotate_back(
    x: jax.Array, keys: jax.Array, scale: jax.Array, bits: int
) -> jax.Array:
    """Undo `rotate` for integers with 11 significant bits, and scale each group.

    Args:
        x: the groups.
        keys: `uint32`, one for each group.
        scale: by which each group is multiplied.
        bits: of fraction that elements have between transforms; may be negative.
    """
    stages = windows(x.shape[-1])
    for number, window in reversed([*enumerate(stages)]):
        x, factor = _transform(x, window), norms(x.shape[-1], window)
        if number == len(stages) - 1:
            factor = factor * np.float32(2.0**bits)
        if number:
            x = _flip(_significant(_rounded(lax.mul(x, _row(factor, x)))), keys, number)
            continue
        scale = lax.broadcast_in_dim(scale, x.shape, range(scale.ndim))
        scale = lax.mul(scale, _row(factor * np.float32(2.0**-bits), x))
        x = _flip(lax.mul(x, scale), keys, 0)
    return x


def norms(group: int, window: Window) -> np.ndarray:
    """By how much a transform of a window has to be multiplied to be orthogonal."""
    factor = np.ones(group, np.float32)
    factor[window.start :][: window.size] = window.size**-0.5
    return factor


def spare_bits(keys: jax.Array, group: int) -> jax.Array:
    """32 random bits for each group that no sign is taken from."""
    number = len(windows(group)) * (group // WORD_BITS)
    return noise.hash32(lax.add(keys, np.uint32(number * int(noise.GOLDEN) % 2**32)))


def hadamard(size: int) -> np.ndarray:
    """The matrix H with H[i, j] = -1 where i & j has an odd number of bits, else 1."""
    index = np.arange(size)
    odd = np.bitwise_count(index[:, None] & index) % 2
    return np.where(odd, np.float32(-1), np.float32(1))


def butterflies(slots: Sequence[jax.Array]) -> list[jax.Array]:
    """The Hadamard transform over slots, element by element, without a factor."""
    slots, distance = list(slots), len(slots) // 2
    while distance:
        pairs = [(i, i + distance) for i in range(len(slots)) if not i & distance]
        for i, j in pairs:
            a, b = slots[i], slots[j]
            slots[i], slots[j] = lax.add(a, b), lax.sub(a, b)
        distance //= 2
    return slots


def _significant(x: jax.Array) -> jax.Array:
    """Integers below 2**16, rounded to 11 significant bits, ties to even."""
    return lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def _rounded(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _row(factor: np.ndarray, x: jax.Array) -> np.ndarray:
    return factor.reshape(*(1 for _ in x.shape[1:]), -1)


def _flip(x: jax.Array, keys: jax.Array, number: int) -> jax.Array:
    """Change signs at random, by bits in the order of `words.pack(bits, 1)`."""
    *lead, group = x.shape
    width = group // WORD_BITS
    ones = (1,) * keys.ndim
    index = lax.broadcasted_iota(np.uint32, (*ones, 1, width), keys.ndim + 1)
    index = lax.add(index, np.uint32(number * width))
    key = lax.expand_dims(keys, (keys.ndim, keys.ndim + 1))
    hashes = noise.hash32(lax.add(key, lax.mul(index, noise.GOLDEN)))
    shift = np.arange(WORD_BITS, dtype=np.uint32).reshape(*ones, WORD_BITS, 1)
    signs = lax.shift_left(lax.shift_right_logical(hashes, shift), SIGN)
    bits = lax.bitcast_convert_type(x, np.uint32)
    bits = lax.bitwise_xor(bits, lax.reshape(signs, (*lead, group)))
    return lax.bitcast_convert_type(bits, np.float32)


def _transform(x: jax.Array, window: Window) -> jax.Array:
    """The Hadamard transform of a window, without a factor."""
    *lead, group = x.shape
    start, size = window
    axis = len(lead)
    part = lax.slice_in_dim(x, start, start + size, axis=axis)
    dense = min(size, DENSE)
    part = lax.reshape(part, (*lead, size // dense, dense))
    numbers = (((axis + 1,), (0,)), ((), ()))
    # The highest precision: float32 even where products of matrices have less.
    part = lax.dot_general(
        part, hadamard(dense), numbers, precision=lax.Precision.HIGHEST
    )
    slots = [lax.slice_in_dim(part, i, i + 1, axis=axis) for i in range(size // dense)]
    part = lax.reshape(lax.concatenate(butterflies(slots), axis), (*lead, size))
    before = lax.slice_in_dim(x, 0, start, axis=axis)
    after = lax.slice_in_dim(x, start + size, group, axis=axis)
    return lax.concatenate([before, part, after], axis)

"""The only definition of random bits: counter-based, in 32-bit integers alone.

16 bits for every element, from the caller's seed, the group's index in the array, the
group's own metadata and content, and the element's position in the group. There is no
state, so a resumed or resharded run draws the same bits, and integer arithmetic is the
same on every device. In a group with g elements, e and e + g/2 share one 32-bit hash:
the first takes its low half, the second its high half.

A group's content is there because steps of a scan, arrays under `vmap` and batches of
a training often have one seed, and groups that are clipped have one metadata: with one
noise for all of them, errors multiply into a bias, or never average out. Decoders that
draw the noise again do not know the content, so noise for these does without.

The finalizer is lowbias32 (Wellons 2018, "Prospecting for Hash Functions",
https://nullprogram.com/blog/2018/07/31/), a bijection whose avalanche is ideal within
0.2 %.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxact_kernels.numbering import Numbering

GOLDEN = np.uint32(0x9E3779B9)  # odd, 2**32 / golden ratio: counters spread evenly
LOW_HALF = np.uint32(0xFFFF)  # of a hash: 16 random bits


def hash32(x: jax.Array) -> jax.Array:
    """Mix `uint32` values: a bijection in which every bit depends on every bit."""
    x = lax.mul(_xor_shifted(x, 16), np.uint32(0x7FEB352D))
    x = lax.mul(_xor_shifted(x, 15), np.uint32(0x846CA68B))
    return _xor_shifted(x, 16)


def halves(hashes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high 16 bits of hashes."""
    low = lax.bitwise_and(hashes, LOW_HALF)
    return low, lax.shift_right_logical(hashes, np.uint32(16))


def content(pattern: jax.Array, shift: jax.Array | np.uint32) -> jax.Array:
    """What an element adds to its group's content, both `uint32`.

    The high half of its float32 pattern: in the low half of the sum for the elements in
    the group's first half (shift 0), in the high half for the others (shift 16).
    """
    upper = lax.shift_right_logical(pattern, np.uint32(16))
    return lax.shift_left(upper, shift)


def content_of_tiles(patterns: Sequence[jax.Array]) -> jax.Array:
    """The same, added up over tiles that hold the elements of a group in order."""
    count = len(patterns)
    shifts = (np.uint32(16 * (2 * k // count)) for k in range(count))
    return functools.reduce(lax.add, map(content, patterns, shifts))


def own_bits(metadata: jax.Array, content: jax.Array | None) -> jax.Array:
    """A group's own part in its key.

    Args:
        metadata: `uint32`, zero point above scale.
        content: sum over the group, `uint32`; None where decoding draws the noise
            again. 7 bits count from each half of the elements, in units of 2 in their
            exponents: not the sign's, as zeros have either, and none that depend much
            on last bits of values, in which programs for several devices, or with other
            fusions, differ. Two batches of 256 values in (0, 1) have all 14 in common
            with a probability of about 1 / 900.
    """
    if content is None:
        return metadata
    return lax.bitwise_xor(metadata, lax.bitwise_and(content, np.uint32(0x7F007F00)))


@jax.named_scope("metadata")
def group_keys(seed: jax.Array, own: jax.Array) -> jax.Array:
    """One key a group.

    Args:
        seed: `uint32[]`.
        own: `uint32[*lead, num_groups]`, from `own_bits`. It makes noise differ between
            arrays that share a seed, also under `vmap`, where groups are counted within
            each mapped array.
    """
    return group_key(seed, _row_major_index(own.shape), own)


def group_key(seed: jax.Array, index: jax.Array, own: jax.Array) -> jax.Array:
    """The key for the group that is number `index` in its array, all `uint32`."""
    counter = lax.mul(index, GOLDEN)
    return hash32(lax.bitwise_xor(hash32(lax.add(seed, counter)), own))


class Draw(NamedTuple):
    """The origin of a shard's noise.

    Attributes:
        seed: `uint32[]`.
        numbering: of the shard's groups; None if the shard is the whole array.
        first: the number that the shard's first group has, `uint32[]`; None for 0.
    """

    seed: jax.Array
    numbering: Numbering | None = None
    first: jax.Array | None = None


def shard_key(draw: Draw, local: jax.Array, own: jax.Array) -> jax.Array:
    """The key for the group that is number `local` in a shard."""
    index = local if draw.numbering is None else draw.numbering.of(local)
    if draw.first is not None:
        index = lax.add(draw.first, index)
    return group_key(draw.seed, index, own)


def sixteen_bits(keys: jax.Array, group: int) -> jax.Array:
    """16 random bits, `uint32[*keys.shape, group]`, for every element of each group.

    In this form XLA:CPU fuses an encoder, and in that of `slots_of_bits` a decoder; the
    other one takes three to ten times as long (4 Mi float32, jax 0.12).
    """
    half, axis, repeat = group // 2, keys.ndim, lax.broadcast_in_dim
    step = lax.mul(lax.iota(np.uint32, half), GOLDEN)
    each = (*keys.shape, half)
    counters = lax.add(repeat(keys, each, range(axis)), repeat(step, each, (axis,)))
    both = (*keys.shape, 2, half)
    hashes = repeat(hash32(counters), both, (*range(axis), axis + 1))
    # Low bits for a group's first half.
    shift = repeat(np.array([0, 16], np.uint32), both, (axis,))
    bits = lax.bitwise_and(lax.shift_right_logical(hashes, shift), LOW_HALF)
    return lax.reshape(bits, (*keys.shape, group))


def slots_of_bits(keys: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The same bits, for elements along axes with these sizes, in row-major order.

    Args:
        keys: one for each group.
        sizes: the first is even.
    """
    axis, (first, *others) = keys.ndim, sizes
    key = lax.expand_dims(keys, range(axis, axis + len(sizes)))
    index = _row_major_index((first // 2, *others), leading=axis)
    hashes = hash32(lax.add(key, lax.mul(index, GOLDEN)))
    return lax.platform_dependent(
        hashes,
        cpu=functools.partial(halves_in_turn, axis=axis),
        default=functools.partial(halves_at_once, axis=axis),
    )


def halves_in_turn(hashes: jax.Array, axis: int) -> jax.Array:
    """The low halves, and after them, along an axis, the high ones.

    XLA:CPU takes five times as long in the other form (4 Mi float32, jax 0.12).
    """
    return lax.concatenate(halves(hashes), axis)


def halves_at_once(hashes: jax.Array, axis: int) -> jax.Array:
    """The same from one expression.

    XLA:GPU does not fuse a concatenation with what reads it: two layers of ViT-B are
    predicted to take 2.0 % longer with the other form on an H100.
    """
    ones = (1,) * (hashes.ndim - axis)
    # Up, then down: `words` says why no shift ascends.
    shift = np.array([16, 0], np.uint32).reshape((1,) * axis + (2, *ones))
    halves = lax.shift_left(lax.expand_dims(hashes, (axis,)), shift)
    *lead, first = hashes.shape[: axis + 1]
    joined = lax.reshape(halves, (*lead, 2 * first, *hashes.shape[axis + 1 :]))
    return lax.shift_right_logical(joined, np.uint32(16))


def _xor_shifted(x: jax.Array, shift: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))


def _row_major_index(shape: tuple[int, ...], leading: int = 0) -> jax.Array:
    """Each element's number, `uint32`, behind so many `leading` axes with size 1."""
    # An iota along each axis, not one reshaped: it shards like the array it belongs to.
    full = (1,) * leading + shape
    index = lax.broadcasted_iota(np.uint32, full, leading)
    for axis, size in enumerate(shape[1:], leading + 1):
        iota = lax.broadcasted_iota(np.uint32, full, axis)
        index = lax.add(lax.mul(index, np.uint32(size)), iota)
    return index

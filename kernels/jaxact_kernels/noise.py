"""The one definition of random bits: counter-based, in 32-bit integers alone.

16 bits for every element, from the caller's seed, the group's index in the array, the
group's own stored metadata and the element's place in the group. There is no state, so
a resumed or resharded run draws the same bits, and integer arithmetic is the same on
every device. In a group of g elements, e and e + g/2 share one 32-bit hash: the first
takes its low half, the second its high half.

The finalizer is lowbias32 (Wellons 2018, "Prospecting for Hash Functions",
https://nullprogram.com/blog/2018/07/31/), a bijection whose avalanche is within 0.2 %
of ideal.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GOLDEN = np.uint32(0x9E3779B9)  # odd, 2**32 / golden ratio: counters spread evenly


def hash32(x: jax.Array) -> jax.Array:
    """Mix `uint32` values: a bijection in which every bit depends on every bit."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def group_keys(seed: jax.Array, metadata: jax.Array) -> jax.Array:
    """One key a group.

    Args:
        seed: `uint32[]`.
        metadata: `uint32[*lead, num_groups]`, zero point above scale. It makes noise
            differ between arrays that share a seed and between `vmap` lanes, where
            the group's index is counted inside the lane.
    """
    return hash32(hash32(seed + GOLDEN * _row_major_index(metadata.shape)) ^ metadata)


def sixteen_bits(keys: jax.Array, group: int) -> jax.Array:
    """16 random bits, `uint32[*keys.shape, group]`, for every element of each group."""
    half = group // 2
    lead = tuple(range(keys.ndim))
    counter = jnp.expand_dims(GOLDEN * lax.iota(jnp.uint32, half), lead)
    hashes = hash32(keys[..., None] + counter)[..., None, :]
    shift = np.array([[0], [16]], np.uint32)  # low bits for the first half of a group
    bits = hashes >> jnp.expand_dims(shift, lead) & np.uint32(0xFFFF)
    return bits.reshape(*keys.shape, group)


def _row_major_index(shape: tuple[int, ...]) -> jax.Array:
    # An iota along each axis, not one reshaped: it shards like the array it belongs to.
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * np.uint32(size) + iota
    return index

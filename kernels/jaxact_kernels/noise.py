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


def pair_hashes(keys: jax.Array, half: int) -> jax.Array:
    """`uint32[*keys.shape, half]`: a hash for each pair of elements of a group."""
    counter = GOLDEN * lax.iota(jnp.uint32, half)
    counter = jnp.expand_dims(counter, tuple(range(keys.ndim)))
    return hash32(keys[..., None] + counter)


def pair_noise(keys: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """16 random bits for the first and for the second half of a group's elements."""
    hashes = pair_hashes(keys, half)
    return hashes & np.uint32(0xFFFF), hashes >> np.uint32(16)


def _row_major_index(shape: tuple[int, ...]) -> jax.Array:
    # An iota along each axis, not one reshaped: it shards like the array it belongs to.
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        iota = lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * np.uint32(size) + iota
    return index

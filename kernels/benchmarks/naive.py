"""Packing in plain JAX: the code anyone writes first, and the best known.

`encode` and `decode` are the first attempt: groups, their extremes, uniform noise,
codes shifted to their offset in a word and summed. They know no special values, and no
bits but those that divide 32.

`fused_encode` gives the same bits as `affine`. XLA cannot keep an array in registers
from a group's extremes to its codes, so it reads it twice: a kernel for extremes, a
small one for metadata, one for words. In the last a thread makes whole words from
strided elements, and each hash, which two elements share, once. Decoding has no such
twin: the reference compiles to one pass, in which a thread stores several elements.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels import noise
from jaxact_kernels.affine import Stored, group
from jaxact_kernels.affine.reference import summarize
from jaxact_kernels.layout import layout_of
from jaxact_kernels.tiles import Tiles, separate


def encode(x, seed, *, bits, group_size=256):
    """Pack as (words, minimum, scale)."""
    groups = x.astype(jnp.float32).reshape(-1, group_size)
    lo = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - lo) / (2**bits - 1)
    uniform = jax.random.uniform(jax.random.key(seed), groups.shape)
    codes = jnp.floor((groups - lo) / scale + uniform).clip(0, 2**bits - 1)
    codes = codes.astype(jnp.uint32).reshape(-1, 32 // bits)
    return jnp.sum(codes << _shifts(bits), axis=-1, dtype=jnp.uint32), lo, scale


def decode(stored, *, shape, dtype, bits, group_size=256):
    words, lo, scale = stored
    codes = (words[:, None] >> _shifts(bits)) & np.uint32(2**bits - 1)
    codes = codes.reshape(-1, group_size).astype(jnp.float32)
    return (lo + scale * codes).reshape(shape).astype(dtype)


def _shifts(bits):
    return jnp.arange(0, 32, bits, dtype=jnp.uint32)[None]


def fused_encode(x, seed, *, bits, group_size=256):
    layout = layout_of(x.shape, group_size)
    groups = layout.split(x, -np.inf).astype(np.float32)
    lo, hi, content = summarize(groups, layout, x.dtype)
    metadata = group.metadata(lo, hi, bits, x.dtype)
    line = group.encoding_line(lo, metadata)
    key = noise.group_keys(seed, noise.own_bits(metadata, content))
    metadata, line, key = lax.optimization_barrier((metadata, line, key))
    tiles = Tiles(layout, bits, 1, separate(bits))
    fixed = functools.partial(_fixed_point, line=line, bits=bits)
    codes = _codes(groups, fixed, key, tiles)
    words = tiles.pack(codes)
    return Stored(words[0] if len(words) == 1 else jnp.concatenate(words, -1), metadata)


def _fixed_point(x, line, bits):
    half_zero, slope, base = (end[..., None] for end in line)
    t = (x * np.float32(0.5) - half_zero) * slope
    t = jnp.where(t > 0, t, np.float32(0))  # NaN too
    t = jnp.minimum(t, np.float32((2**bits - 1) * 65536))
    return jnp.round(t).astype(np.int32).astype(np.uint32) + base


def _codes(groups, fixed, key, tiles):
    """Codes for each tile; the two halves of a hash are noise for two tiles."""
    layout, half = tiles.layout, tiles.count // 2
    shape = (*(1 for _ in layout.lead), 1, tiles.width)
    column = lax.broadcasted_iota(np.uint32, shape, len(shape) - 1)

    def code(k, draw):
        tile = np.s_[..., k * tiles.width : (k + 1) * tiles.width]
        code = (fixed(groups[tile]) + draw) >> np.uint32(16)
        is_real = layout.is_real()[tile].astype(np.uint32)
        return code * is_real if layout.padding else code

    low, high = [], []
    for k in range(half):
        element = column + np.uint32(k * tiles.width)
        bits = noise.hash32(key[..., None] + element * noise.GOLDEN)
        low.append(code(k, bits & np.uint32(0xFFFF)))
        high.append(code(k + half, bits >> np.uint32(16)))
    return low + high

"""Floats as codes of 1 to 8 bits, as many for a sample as its ranges deserve.

The stored format and its contracts are in `reference`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxact_kernels import words as _words
from jaxact_kernels.planes import reference
from jaxact_kernels.planes.reference import Stored

__all__ = ["Stored", "decode", "encode", "stored_bytes"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")

# Jitted so that each shape is traced once, and so that eager calls run fused.
_encode = jax.jit(reference.encode, static_argnames=("bits", "group_size", "shards"))
_decode = jax.jit(reference.decode, static_argnames=("shape", "dtype", "group_size"))


def encode(
    x: jax.Array,
    seed: jax.Array,
    *,
    bits: float,
    group_size: int = 256,
    shards: int = 1,
) -> Stored:
    """Quantize `x` to `bits` bits an element on average, and pack it.

    The samples of a shard share `floor(bits * samples)` bits; those that span more get
    more, 1 to 8. Where the first axis is sharded over `shards` devices nothing is
    exchanged. With fewer shards, samples of several devices share their bits, and so
    words are gathered.

    Args:
        x: floating point, any shape; the first axis is samples. An array of fewer than
            two axes is one sample. Groups run along the last axis, see `layout_of`.
        seed: `uint32[]`, may be traced.
        bits: 1 to 8, any real number.
        group_size: most elements that share a scale; a positive multiple of 32.
        shards: equal parts of the samples that have bits of their own; 1 if they do not
            divide the samples.

    Returns:
        `Stored`, `stored_bytes(x.shape, ...)` bytes.

    Raises:
        ValueError: for another dtype, width, group size, number of shards or seed, when
            traced.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 512).reshape(2, 256) * jnp.array([[1.0], [9.0]])
        >>> encode(x, jnp.uint32(0), bits=2.5).bits
        Array([1, 4], dtype=uint8)
    """
    x = jnp.asarray(x)
    _check(bits, shards)
    _check_dtype(x.dtype, f"{x.dtype}{list(x.shape)}")
    seed = jnp.asarray(seed)
    if seed.dtype != np.uint32 or seed.shape:
        raise ValueError(
            f"got a seed {seed.dtype}{list(seed.shape)}; a seed is a uint32 scalar; "
            "pass jnp.uint32(number), or jax.random.bits(key) from a key"
        )
    return _encode(x, seed, bits=bits, group_size=group_size, shards=shards)


def decode(
    stored: Stored, *, shape: tuple[int, ...], dtype, group_size: int = 256
) -> jax.Array:
    """Return the array of `shape` and `dtype` that `encode` stored.

    Args:
        stored: what `encode` returned for an array of `shape` and the same group size.
        shape: shape of the array that was encoded.
        dtype: floating point; normally that of the array that was encoded. A narrower
            one may overflow.
        group_size: as encoded.

    Raises:
        ValueError: the stored arrays do not have the shapes these options imply.
    """
    shape, dtype = tuple(shape), jnp.dtype(dtype)
    _check_dtype(dtype, str(dtype))
    _check_stored(stored, shape, group_size)
    return _decode(stored, shape=shape, dtype=dtype, group_size=group_size)


def stored_bytes(
    shape: tuple[int, ...], *, bits: float, group_size: int = 256, shards: int = 1
) -> int:
    """Bytes of `Stored` for an array of `shape`: words, metadata, a byte a sample.

    >>> stored_bytes((8, 1024), bits=2.5)  # 2.632 bits an element
    2696
    """
    _check(bits, shards)
    layout = reference.planes_layout(tuple(shape), group_size)
    shards, num_planes = reference.budget(layout, bits, shards)
    num_groups = math.prod(layout.lead[1:]) * layout.num_groups
    plane = 4 * num_groups * _words.num_words(layout.group, 1)
    return shards * num_planes * plane + 4 * layout.total_groups + layout.lead[0]


def _check(bits: float, shards: int) -> None:
    is_real = isinstance(bits, int | float) and not isinstance(bits, bool)
    if not is_real or not 1 <= bits <= _words.MAX_BITS:
        raise ValueError(
            f"got bits={bits!r}; the average is a real number of bits from 1 to "
            f"{_words.MAX_BITS}; for more precision store the array as it is or cast it"
        )
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise ValueError(
            f"got shards={shards!r}; a positive number of shards is required; pass how "
            "many devices the first axis is sharded over, or 1"
        )


def _check_dtype(dtype: np.dtype, given: str) -> None:
    is_float8 = dtype.name.startswith("float8_") and dtype.name != "float8_e8m0fnu"
    if dtype.name not in _DTYPES and not is_float8:
        raise ValueError(
            f"got {given}; the planes format holds {', '.join(_DTYPES)} and signed "
            "float8; use jaxact_kernels.mask for booleans and keep other dtypes as "
            "they are"
        )


def _check_stored(stored: Stored, shape: tuple[int, ...], group_size: int) -> None:
    layout = reference.planes_layout(shape, group_size)
    groups = (*layout.lead, layout.num_groups)
    plane = (*groups[1:], _words.num_words(layout.group, 1))
    required = [("uint32", plane), ("uint32", groups), ("uint8", layout.lead[:1])]
    given = [(part.dtype.name, part.shape) for part in stored]
    given[0] = given[0][0], given[0][1][2:]  # after shards and their planes
    if given != required:
        raise ValueError(
            f"got stored arrays {given} (of words the axes after the second); "
            f"shape={shape} and group_size={group_size} require {required}; pass the "
            "options that encode was called with"
        )

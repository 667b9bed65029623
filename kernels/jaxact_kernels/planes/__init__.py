"""Floats as codes with 1 to 8 bits, more for samples that span wider ranges.

The stored format and its contracts are in `reference`.
"""

import math

import jax
import jax.numpy as jnp

from jaxact_kernels import checks as _checks, words as _words
from jaxact_kernels.planes import reference
from jaxact_kernels.planes.reference import Stored

__all__ = ["Stored", "decode", "encode", "stored_bytes"]

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

    A shard's samples share `floor(bits * samples)` bits; those that span more get more,
    1 to 8. Where the first axis is sharded over `shards` devices nothing is exchanged.
    With fewer shards, samples on several devices share their bits, and so words are
    gathered.

    Args:
        x: floating point, any shape; the first axis is samples. An array with fewer
            than two axes is one sample. Groups run along the last axis, see
            `layout_of`.
        seed: `uint32[]`, may be traced.
        bits: 1 to 8, any real number.
        group_size: most elements that share a scale; a positive multiple of 32.
        shards: equal parts into which samples are cut, each with its own bits; 1 if
            they do not divide the samples.

    Returns:
        `Stored`, `stored_bytes(x.shape, ...)` bytes.

    Raises:
        ValueError: for another dtype, width, group size, shard count or seed, when
            traced.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 512).reshape(2, 256) * jnp.array([[1.0], [9.0]])
        >>> encode(x, jnp.uint32(0), bits=2.5).bits
        Array([1, 4], dtype=uint8)
    """
    x = jnp.asarray(x)
    _check(bits, shards)
    _checks.check_float(x.dtype, x.shape, "planes")
    seed = _checks.checked_seed(seed)
    return _encode(x, seed, bits=bits, group_size=group_size, shards=shards)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    group_size: int = 256,
) -> jax.Array:
    """Return the array with `shape` and `dtype` that `encode` stored.

    Args:
        stored: the result of `encode` for an array with `shape`, by the same group
            size.
        shape: as encoded.
        dtype: floating point, normally as encoded. A narrower one may overflow.
        group_size: as encoded.

    Raises:
        ValueError: the stored arrays do not have the shapes these options imply.
    """
    shape, dtype = tuple(shape), jnp.dtype(dtype)
    _checks.check_float(dtype, shape, "planes")
    _check_stored(stored, shape, group_size)
    return _decode(stored, shape=shape, dtype=dtype, group_size=group_size)


def stored_bytes(
    shape: tuple[int, ...], *, bits: float, group_size: int = 256, shards: int = 1
) -> int:
    """Bytes that `encode` stores for `shape`: words, metadata, a byte a sample.

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
            f"{_words.MAX_BITS}; {_checks.MORE_PRECISION}"
        )
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise ValueError(
            f"got shards={shards!r}; a positive number of shards is required; pass how "
            "many devices the first axis is sharded over, or 1"
        )


def _check_stored(stored: Stored, shape: tuple[int, ...], group_size: int) -> None:
    layout = reference.planes_layout(shape, group_size)
    groups = (*layout.lead, layout.num_groups)
    plane = (*groups[1:], _words.num_words(layout.group, 1))
    # How many shards and planes there are depends on other options than these.
    planes = (*stored.words.shape[:2], *plane)
    required = [
        _checks.array_text("uint32", planes),
        _checks.array_text("uint32", groups),
        _checks.array_text("uint8", layout.lead[:1]),
    ]
    _checks.check_stored(stored, required, shape=shape, group_size=group_size)

"""Booleans at one bit each, without loss."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxact_kernels.mask import reference

__all__ = ["decode", "encode", "stored_bytes"]


def encode(x: jax.Array) -> jax.Array:
    """Pack booleans of any shape into `uint32[*lead, num_words]`.

    Raises:
        ValueError: `x` is not boolean.

    Example:
        >>> encode(jnp.arange(64) % 2 == 1)
        Array([         0, 4294967295], dtype=uint32)
    """
    x = jnp.asarray(x)
    if x.dtype != np.bool_:
        raise ValueError(
            f"got {x.dtype}{list(x.shape)}; a mask is boolean; compare first (x > 0), "
            "or use jaxact_kernels.affine for floats"
        )
    return reference.encode(x)


def decode(words: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Return the `bool[shape]` that `encode` packed.

    Raises:
        ValueError: `words` are not those of an array of `shape`.
    """
    shape = tuple(shape)
    required = reference.words_shape(shape)
    if words.dtype != np.uint32 or words.shape != required:
        raise ValueError(
            f"got words {words.dtype}{list(words.shape)}; a mask of shape {shape} "
            f"requires uint32{list(required)}; pass the shape that was encoded"
        )
    return reference.decode(words, shape=shape)


def stored_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the words for a mask of `shape`; 4 for each 32 elements of a row.

    >>> stored_bytes((8, 1024))
    1024
    """
    return reference.stored_bytes(tuple(shape))

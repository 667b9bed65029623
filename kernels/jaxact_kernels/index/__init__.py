"""Small non-negative integers at 1 to 8 bits each, without loss.

For example which element of a max-pooling window won. The stored format is in
`reference`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxact_kernels import words as _words
from jaxact_kernels.dispatch import run
from jaxact_kernels.index import reference
from jaxact_kernels.index._operations import Decode, Encode

__all__ = ["Decode", "Encode", "decode", "encode", "stored_bytes"]

_DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


def encode(
    x: jax.Array,
    *,
    bits: int,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Pack integers of any shape into `uint32[*lead, num_words]`.

    The caller guarantees that they lie in 0 .. 2**bits - 1, which cannot be checked
    when a program is traced. Of any other value the `bits` lowest bits are kept.

    Args:
        x: int8 to int32 or uint8 to uint32, any shape.
        bits: 1 to 8.
        is_fused: whether elementwise operations compute x, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: for another dtype or width, when traced.

    Example:
        >>> encode(jnp.arange(16) % 4, bits=2)
        Array([34952, 56797], dtype=uint32)
    """
    x = jnp.asarray(x)
    _check_bits(bits)
    _check_dtype(x.dtype, f"{x.dtype}{list(x.shape)}")
    operation = Encode(x.shape, x.dtype, bits, is_fused=is_fused)
    return run(operation, x, implementation=implementation)


def decode(
    words: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype,
    bits: int,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the array of `shape` and `dtype` that `encode` packed.

    Args:
        words: what `encode` returned for an array of `shape` and the same `bits`.
        shape: shape of the array that was encoded.
        dtype: int8 to int32 or uint8 to uint32. Codes that it cannot hold (8 bits in
            int8) wrap, so any int8 array comes back whole from 8 bits.
        bits: as encoded.
        is_fused: whether elementwise operations read the result, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: `words` do not have the shape that these options imply.
    """
    shape = tuple(shape)
    _check_bits(bits)
    _check_dtype(jnp.dtype(dtype), str(jnp.dtype(dtype)))
    required = reference.words_shape(shape, bits)
    if words.dtype != np.uint32 or words.shape != required:
        raise ValueError(
            f"got words {words.dtype}{list(words.shape)}; shape={shape} and "
            f"bits={bits} require uint32{list(required)}; pass the options that encode "
            "was called with"
        )
    operation = Decode(shape, jnp.dtype(dtype), bits, is_fused=is_fused)
    return run(operation, words, implementation=implementation)


def stored_bytes(shape: tuple[int, ...], *, bits: int) -> int:
    """Bytes of the words for an array of `shape`.

    >>> stored_bytes((8, 1024), bits=4)
    4096
    """
    _check_bits(bits)
    return reference.stored_bytes(tuple(shape), bits)


def _check_bits(bits: int) -> None:
    is_int = isinstance(bits, int) and not isinstance(bits, bool)
    if not is_int or not 1 <= bits <= _words.MAX_BITS:
        raise ValueError(
            f"got bits={bits!r}; an index has an integer number of bits from 1 to "
            f"{_words.MAX_BITS}; keep larger integers in an array of their own dtype"
        )


def _check_dtype(dtype: np.dtype, given: str) -> None:
    if dtype.name not in _DTYPES:
        raise ValueError(
            f"got {given}; the index format holds {', '.join(_DTYPES)}; use "
            "jaxact_kernels.mask for booleans, jaxact_kernels.affine for floats, or "
            "convert indices with x.astype(jnp.int32)"
        )

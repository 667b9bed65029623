"""Small non-negative integers at 1 to 8 bits each, without loss.

For example which element won in a max-pooling window. The stored format is in
`reference`.
"""

import jax
import jax.numpy as jnp

from jaxact_kernels import checks as _checks
from jaxact_kernels.dispatch import run
from jaxact_kernels.index import reference
from jaxact_kernels.index.operations import (
    Decode,
    Encode,
    check_index_bits as _check_bits,
)

__all__ = ["Decode", "Encode", "decode", "encode", "stored_bytes"]


def encode(
    x: jax.Array,
    *,
    bits: int,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Pack integers, in any shape, into `uint32[*lead, num_words]`.

    The caller guarantees that they lie in 0 .. 2**bits - 1, which cannot be checked
    when a program is traced. Any other value keeps its `bits` lowest bits.

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
    operation = Encode(x.shape, x.dtype, bits, is_fused=is_fused)
    return run(operation, x, implementation=implementation)


def decode(
    words: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    bits: int,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the array with `shape` and `dtype` that `encode` packed.

    Args:
        words: the result of `encode` for an array with `shape`, by the same `bits`.
        shape: as encoded.
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
    operation = Decode(shape, jnp.dtype(dtype), bits, is_fused=is_fused)
    required = _checks.array_text("uint32", reference.words_shape(shape, bits))
    _checks.check_stored([words], [required], shape=shape, bits=bits)
    return run(operation, words, implementation=implementation)


def stored_bytes(shape: tuple[int, ...], *, bits: int) -> int:
    """Bytes that `encode` stores for an array with `shape`.

    >>> stored_bytes((8, 1024), bits=4)
    4096
    """
    _check_bits(bits)
    return reference.stored_bytes(tuple(shape), bits)

"""Floats as codes with 1 to 8 bits, after a random rotation of each group.

The stored format and its contracts are in `reference`.
"""

import jax
import jax.numpy as jnp

from jaxact_kernels import checks as _checks
from jaxact_kernels.dispatch import run
from jaxact_kernels.rotated.group import HALF_BIT, MOST_PER_GROUP
from jaxact_kernels.rotated.operations import Decode, Encode
from jaxact_kernels.rotated.reference import Stored

__all__ = [
    "HALF_BIT",
    "MOST_PER_GROUP",
    "Decode",
    "Encode",
    "Stored",
    "decode",
    "encode",
    "stored_bytes",
]


def encode(
    x: jax.Array,
    seed: jax.Array,
    *,
    bits: float,
    group_size: int = 256,
    is_adaptive: bool = False,
    is_fused: bool = False,
    implementation: str | None = None,
) -> Stored:
    """Rotate the groups of `x`, quantize to `bits` bits an element and pack.

    The same `x`, `seed` and options give the same bits on however many devices. Under
    `vmap` groups are counted within each mapped array.

    Args:
        x: floating point, any shape. Groups run along the last axis, see `layout_of`.
        seed: `uint32[]`, may be traced. It is stored: decoding rotates back.
        bits: 1 to 8; or 0.5, with which half of the rotated elements have one bit.
        group_size: most elements that share a scale; a multiple of 32, at most 4096.
        is_adaptive: choose for each group between rotation, dither and stochastic
            rounding, by the error that is expected.
        is_fused: whether elementwise operations compute x, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Returns:
        `Stored`, `stored_bytes(x.shape, bits=bits, group_size=group_size)` bytes.

    Raises:
        ValueError: for another dtype, width, group size or seed, when traced.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 512).reshape(2, 256)
        >>> stored = encode(x, jnp.uint32(0), bits=2)
        >>> stored.words.shape, stored.metadata.shape
        ((2, 1, 16), (2, 1))
    """
    x, seed = jnp.asarray(x), _checks.checked_seed(seed)
    options = (bits, group_size, is_adaptive)
    operation = Encode(x.shape, x.dtype, *options, is_fused=is_fused)
    packed, metadata = run(operation, x, seed, implementation=implementation)
    return Stored(packed, metadata, seed)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    bits: float,
    group_size: int = 256,
    is_adaptive: bool = False,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the array with `shape` and `dtype` that `encode` stored.

    Args:
        stored: the result of `encode` for an array with `shape`, by the same options.
        shape: as encoded.
        dtype: floating point, normally as encoded.
        bits: as encoded.
        group_size: as encoded.
        is_adaptive: as encoded.
        is_fused: whether elementwise operations read the result, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: the stored arrays do not have the shapes these options imply.
    """
    options = (bits, group_size, is_adaptive)
    operation = Decode(tuple(shape), jnp.dtype(dtype), *options, is_fused=is_fused)
    operation.check_stored(stored)
    return run(operation, stored, implementation=implementation)


def stored_bytes(shape: tuple[int, ...], *, bits: float, group_size: int = 256) -> int:
    """Bytes that `encode` stores: words, 4 for each group, and 4 for the seed.

    >>> stored_bytes((8, 1024), bits=2)
    2180
    """
    operation = Encode(tuple(shape), jnp.dtype("float32"), bits, group_size)
    return 4 + operation.layout.total_groups * 4 * (operation.num_words + 1)

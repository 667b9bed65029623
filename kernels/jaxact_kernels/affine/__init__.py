"""Floats as codes with 1 to 8 bits, and a zero point and a scale per group.

The stored format and its contracts are in `reference`. `encode` and `decode` check the
seed and the stored arrays too; a codec, whose arrays are its own, runs `Encode` and
`Decode` by `dispatch.run`.
"""

import jax
import jax.numpy as jnp

from jaxact_kernels import checks as _checks, words as _words
from jaxact_kernels.affine.operations import Decode, Encode
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.dispatch import run
from jaxact_kernels.layout import layout_of

__all__ = ["Decode", "Encode", "Stored", "decode", "encode", "stored_bytes"]


def encode(
    x: jax.Array,
    seed: jax.Array,
    *,
    bits: int,
    group_size: int = 256,
    stochastic: bool = True,
    is_dithered: bool = False,
    is_fused: bool = False,
    implementation: str | None = None,
) -> Stored:
    """Quantize `x` to `bits` bits an element and pack it.

    The same `x`, `seed` and options give the same bits on however many devices. Under
    `vmap` groups are counted within each mapped array: equal groups in different ones
    share noise unless each array has its own seed.

    Args:
        x: floating point, any shape. Groups run along the last axis, see `layout_of`.
        seed: `uint32[]`, may be traced. Ignored by `stochastic=False`.
        bits: 1 to 8.
        group_size: most elements that share a scale; a positive multiple of 32.
        stochastic: round up with probability equal to the fraction, so that the
            decoded value is `x` on average; otherwise round to nearest.
        is_dithered: whether `decode` will take the noise off again. It then depends on
            each group's metadata alone, and groups with equal ones, in arrays that
            share a seed, have the same.
        is_fused: whether elementwise operations compute x, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Returns:
        `Stored`, `stored_bytes(x.shape, bits=bits, group_size=group_size)` bytes.

    Raises:
        ValueError: for another dtype, width, group size or seed, when traced.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 512).reshape(2, 256)
        >>> stored = encode(x, jnp.uint32(0), bits=4)
        >>> stored.words.shape, stored.metadata.shape
        ((2, 1, 32), (2, 1))
    """
    x = jnp.asarray(x)
    operation = Encode(
        x.shape,
        x.dtype,
        bits,
        group_size,
        stochastic,
        is_dithered=is_dithered,
        is_fused=is_fused,
    )
    seed = _checks.checked_seed(seed)
    return run(operation, x, seed, implementation=implementation)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    bits: int,
    group_size: int = 256,
    seed: jax.Array | None = None,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the array with `shape` and `dtype` that `encode` stored.

    Args:
        stored: the result of `encode` for an array with `shape`, by the same `bits`
            and `group_size`.
        shape: as encoded.
        dtype: floating point, normally as encoded. A narrower one may overflow.
        bits: as encoded.
        group_size: as encoded.
        seed: the one that `encode(..., is_dithered=True)` rounded with. The noise is
            then drawn again and taken off (subtractive dither): half the variance, and
            none of it depends on the value. None: the codes as they are.
        is_fused: whether elementwise operations read the result, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: the stored arrays do not have the shapes these options imply.
    """
    operation = Decode(
        tuple(shape),
        jnp.dtype(dtype),
        bits,
        group_size,
        is_dithered=seed is not None,
        is_fused=is_fused,
    )
    operation.check_arrays(stored)
    draw = () if seed is None else (_checks.checked_seed(seed),)
    return run(operation, stored, *draw, implementation=implementation)


def stored_bytes(shape: tuple[int, ...], *, bits: int, group_size: int = 256) -> int:
    """Bytes that `encode` stores for `shape`: words, and 4 for each group's metadata.

    >>> stored_bytes((8, 1024), bits=2)  # 2.125 bits an element
    2176
    """
    _checks.check_bits(bits, "a code")
    layout = layout_of(tuple(shape), group_size)
    return layout.total_groups * 4 * (_words.num_words(layout.group, bits) + 1)

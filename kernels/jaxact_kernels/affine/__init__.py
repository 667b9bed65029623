"""Floats as codes of 1 to 8 bits with a zero point and a scale per group.

The stored format and its contracts are in `reference`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxact_kernels import words as _words
from jaxact_kernels.affine._operations import Decode, Encode
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.dispatch import run
from jaxact_kernels.layout import layout_of

__all__ = ["Decode", "Encode", "Stored", "decode", "encode", "stored_bytes"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def encode(
    x: jax.Array,
    seed: jax.Array,
    *,
    bits: int,
    group_size: int = 256,
    stochastic: bool = True,
    is_fused: bool = False,
    implementation: str | None = None,
) -> Stored:
    """Quantize `x` to `bits` bits an element and pack it.

    The same `x`, `seed` and options give the same bits on any number of devices. Under
    `vmap` a group's index counts inside the lane; give lanes their own seeds if equal
    groups in different lanes must not share noise.

    Args:
        x: floating point, any shape. Groups run along the last axis, see `layout_of`.
        seed: `uint32[]`, may be traced. Ignored by `stochastic=False`.
        bits: 1 to 8.
        group_size: most elements that share a scale; a positive multiple of 32.
        stochastic: round up with probability equal to the fraction, so that the
            decoded value is `x` on average; otherwise round to nearest.
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
    _check_bits(bits)
    _check_dtype(x.dtype, f"{x.dtype}{list(x.shape)}")
    operation = Encode(
        x.shape, x.dtype, bits, group_size, stochastic, is_fused=is_fused
    )
    return run(operation, x, _as_seed(seed), implementation=implementation)


def decode(
    stored: Stored,
    *operands: jax.Array,
    shape: tuple[int, ...],
    dtype,
    bits: int,
    group_size: int = 256,
    then: Callable[..., jax.Array] | None = None,
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the array of `shape` and `dtype` that `encode` stored.

    With `then`, return `then(x, *operands)` instead: a kernel applies it to what it has
    just decoded, so that x itself is never in memory.

    Args:
        stored: what `encode` returned for an array of `shape`, the same `bits` and the
            same `group_size`.
        shape: shape of the array that was encoded.
        dtype: floating point; normally that of the array that was encoded. A narrower
            one may overflow.
        bits: as encoded.
        group_size: as encoded.
        *operands: further arguments of `then`, arrays of `shape`.
        then: an elementwise function, of no other arrays than these; its result has
            `shape`.
        is_fused: whether elementwise operations read the result, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: the stored arrays do not have the shapes these options imply.
    """
    shape = tuple(shape)
    _check_bits(bits)
    _check_dtype(jnp.dtype(dtype), str(jnp.dtype(dtype)))
    _check_stored(stored, shape, bits, group_size)
    operation = Decode(
        shape,
        jnp.dtype(dtype),
        bits,
        group_size,
        then,
        len(operands),
        is_fused=is_fused,
    )
    _check_then(operation, operands)
    return run(operation, *stored, *operands, implementation=implementation)


def stored_bytes(shape: tuple[int, ...], *, bits: int, group_size: int = 256) -> int:
    """Bytes of `Stored` for an array of `shape`: words and 4 for each group's metadata.

    >>> stored_bytes((8, 1024), bits=2)  # 2.125 bits an element
    2176
    """
    _check_bits(bits)
    layout = layout_of(tuple(shape), group_size)
    return layout.total_groups * 4 * (_words.num_words(layout.group, bits) + 1)


def _as_seed(seed) -> jax.Array:
    seed = jnp.asarray(seed)
    if seed.dtype != np.uint32 or seed.shape:
        raise ValueError(
            f"got a seed {seed.dtype}{list(seed.shape)}; a seed is a uint32 scalar; "
            "pass jnp.uint32(number), or jax.random.bits(key) from a key"
        )
    return seed


def _check_bits(bits: int) -> None:
    is_int = isinstance(bits, int) and not isinstance(bits, bool)
    if not is_int or not 1 <= bits <= _words.MAX_BITS:
        raise ValueError(
            f"got bits={bits!r}; a code has an integer number of bits from 1 to "
            f"{_words.MAX_BITS}; for more precision store the array as it is or cast it"
        )


def _check_dtype(dtype: np.dtype, given: str) -> None:
    is_float8 = dtype.name.startswith("float8_") and dtype.name != "float8_e8m0fnu"
    if dtype.name not in _DTYPES and not is_float8:
        raise ValueError(
            f"got {given}; the affine format holds {', '.join(_DTYPES)} and signed "
            "float8; use jaxact_kernels.mask for booleans and keep other dtypes as "
            "they are"
        )


def _check_then(operation: Decode, operands) -> None:
    then, shape = operation.then, operation.shape
    if then is None and operands:
        raise ValueError(f"got {len(operands)} operands; they are arguments of `then`")
    if any(operand.shape != shape for operand in operands):
        raise ValueError(
            f"got operands of shapes {[operand.shape for operand in operands]}; each "
            f"goes with the decoded elements, so it requires the shape {shape}; "
            "broadcast it first"
        )
    if then is None:
        return
    x = jax.ShapeDtypeStruct(shape, operation.dtype)
    jaxpr, out = jax.make_jaxpr(then, return_shape=True)(x, *operands)
    if jaxpr.consts:
        raise ValueError(
            f"`then` uses {len(jaxpr.consts)} arrays besides its arguments; a kernel "
            "reads only what it is given; pass them as operands"
        )
    if getattr(out, "shape", None) != shape:
        raise ValueError(
            f"`then` returned {out}; it is elementwise and requires one array of shape "
            f"{shape}; do the rest after decoding"
        )


def _check_stored(stored: Stored, shape, bits: int, group_size: int) -> None:
    layout = layout_of(shape, group_size)
    groups = (*layout.lead, layout.num_groups)
    size = _words.num_words(layout.group, bits)
    required = [("uint32", (*groups, size)), ("uint32", groups)]
    given = [(part.dtype.name, part.shape) for part in stored]
    if given != required:
        raise ValueError(
            f"got stored arrays {given}; shape={shape}, bits={bits} and "
            f"group_size={group_size} require {required}; pass the options that "
            "encode was called with"
        )

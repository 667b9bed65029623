"""Requests that a format cannot serve, refused in one wording.

Each message says which value came, which is required, and which to pass instead.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxact_kernels.words import MAX_BITS

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")

MORE_PRECISION = "for more precision store the array as it is or cast it"


def check_bits(bits: float, noun: str, instead: str = MORE_PRECISION) -> None:
    """Require an integer from 1 to 8; `noun` is the thing that takes these bits."""
    is_int = isinstance(bits, int) and not isinstance(bits, bool)
    if not is_int or not 1 <= bits <= MAX_BITS:
        raise ValueError(
            f"got bits={bits!r}; {noun} has an integer number of bits from 1 to "
            f"{MAX_BITS}; {instead}"
        )


def check_float(dtype: np.dtype, shape: tuple[int, ...], kind: str) -> None:
    """Require floating point with a sign, for the format `kind`."""
    is_float8 = dtype.name.startswith("float8_") and dtype.name != "float8_e8m0fnu"
    if dtype.name not in FLOATS and not is_float8:
        raise ValueError(
            f"got {dtype}{list(shape)}; the {kind} format holds {', '.join(FLOATS)} "
            "and signed float8; use jaxact_kernels.mask for booleans and keep other "
            "dtypes as they are"
        )


def declines_float(dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernels cannot read such elements; None where they can."""
    if np.dtype(dtype).name in ("float32", "bfloat16", "float16"):
        return None
    return f"the kernels read float32, bfloat16 and float16, not {dtype}"


def check_integer(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Require integers, for the index format."""
    if dtype.name not in INTEGERS:
        raise ValueError(
            f"got {dtype}{list(shape)}; the index format holds {', '.join(INTEGERS)}; "
            "use jaxact_kernels.mask for booleans, jaxact_kernels.affine for floats, "
            "or convert indices with x.astype(jnp.int32)"
        )


def checked_seed(seed: jax.typing.ArrayLike) -> jax.Array:
    """The seed as an array: a `uint32` scalar is required."""
    seed = jnp.asarray(seed)
    if seed.dtype != np.uint32 or seed.shape:
        raise ValueError(
            f"got a seed {seed.dtype}{list(seed.shape)}; a seed is a uint32 scalar; "
            "pass jnp.uint32(number), or jax.random.bits(key) from a key"
        )
    return seed


def check_stored(
    stored: Sequence[jax.Array], required: Sequence[str], **options: object
) -> None:
    """Require stored arrays to be those that decoding with these options reads.

    Args:
        stored: the arrays.
        required: dtype and shape for each, from `array_text`.
        **options: to name in the message.
    """
    descriptions = [array_text(part.dtype, part.shape) for part in stored]
    if descriptions != list(required):
        names = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(
            f"got stored arrays {', '.join(descriptions)}; {names} require "
            f"{', '.join(required)}; pass the options that encode was called with"
        )


def array_text(dtype: np.dtype | str, shape: Sequence[int]) -> str:
    """Describe an array in a message: `uint32[2, 3]`."""
    return f"{dtype}{list(shape)}"

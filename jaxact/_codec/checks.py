"""Checks of arguments, with one message each: given, required, write."""

import numbers
import operator
from collections.abc import Callable, Container
from typing import SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")


def checked_int(value: object, allowed: Container[int], message: str) -> int:
    """`value` as an int: any integer type is taken, bools and floats are refused.

    Raises:
      ValueError: with `message`; not an integer, or one that is not allowed.
    """
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:  # a NumPy or JAX value that is not an integer
            pass
    if number is None or number not in allowed:
        raise ValueError(message)
    return number


def checked_number(
    value: object, is_allowed: Callable[[float], bool], message: str
) -> float:
    """`value` as a float: any real number is taken, in an array without axes too.

    Raises:
      ValueError: with `message`; not a number, a bool, or one that is not allowed.
    """
    is_array = isinstance(value, np.ndarray | jax.Array) and value.shape == ()
    number = value.item() if is_array else value  # type: ignore[attr-defined]
    is_real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_real or not is_allowed(float(number)):  # type: ignore[arg-type]
        raise ValueError(message)
    return float(number)  # type: ignore[arg-type]


def checked_kind(value: object, kind: type[T], message: str) -> T:
    """`value`, which has to be of this class.

    Raises:
      TypeError: with `message`; it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(message)
    return value


def checked_key(argument: str, key: object) -> jax.Array:
    """A PRNG key; `argument` is the text before it in a message.

    Raises:
      TypeError: not one key.
    """
    if not isinstance(key, jax.Array):
        raise TypeError(
            f"{argument}{key!r}: a JAX PRNG key is required, such as jax.random.key(0)."
        )
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_one = key.shape == () if is_typed else key.dtype == jnp.uint32 and key.ndim == 1
    if not is_one:
        raise TypeError(
            f"{argument}{key.dtype}{list(key.shape)}: one JAX PRNG key is required, "
            "such as jax.random.key(0). For a key each, map the call with jax.vmap."
        )
    return key


def checked_bits(owner: str, value: object, advice: str = "") -> int:
    """The bits of an integer code, 1 to 8.

    Args:
      owner: names the class in the message.
      advice: ends it.
    """
    return checked_int(
        value,
        range(1, 9),
        f"{owner}(bits={value!r}): bits must be an integer from 1 to 8. For half a bit "
        "use Rotated(0.5), for a fraction on average PerSample(bits), to keep 16 bits "
        f"Cast(jnp.bfloat16), to keep all Exact().{advice}",
    )


def bits_text(bits: float) -> str:
    """Bits as labels have them: '1 bit', '0.5 bits'."""
    return "1 bit" if bits == 1 else f"{bits} bits"


def checked_group_size(owner: str, value: object) -> int:
    """The elements that share a scale; `owner` names the class in the message."""
    return checked_int(
        value,
        range(32, 1 << 20, 32),
        f"{owner}(group_size={value!r}): group_size must be a positive multiple of "
        "32, because groups fill whole 32-bit words. Use 256 unless a smaller error is "
        "worth 32 bits per group.",
    )


def checked_dtype(argument: str, value: DTypeLike | None) -> np.dtype:
    """`value` as a dtype; `argument` is the text before it in a message.

    Raises:
      TypeError: not the name of a dtype, nor one itself.
    """
    try:
        if value is None:  # float64 to NumPy
            raise TypeError
        dtype = jnp.dtype(value)
        if not hasattr(jnp, dtype.name):  # 'f16' is 16 bytes to NumPy, float128
            raise TypeError
        return dtype
    except TypeError:
        raise TypeError(
            f"{argument}{value!r}): a dtype is required: write jnp.bfloat16, another "
            "that jax.numpy has, or its name, 'bfloat16'."
        ) from None

"""Checks of arguments, with one message each: given, required, write."""

import operator
from collections.abc import Container
from typing import SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


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


def checked_bits(owner: str, value: object) -> int:
    """The bits of an integer code, 1 to 8; `owner` names the class in the message."""
    return checked_int(
        value,
        range(1, 9),
        f"{owner}(bits={value!r}): bits must be an integer from 1 to 8. For half a bit "
        "use Rotated(0.5), for a fraction on average PerSample(bits), to keep 16 bits "
        "Cast(jnp.bfloat16), to keep all Exact().",
    )


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
        return jnp.dtype(value)
    except TypeError:
        raise TypeError(
            f"{argument}{value!r}): a dtype is required: write jnp.bfloat16, another "
            "that jax.numpy has, or its name, 'bfloat16'."
        ) from None

"""Compressed functions and classes remember the one that they were made from.

Compressing one again starts from the original: the outer policy decides, and there is
one compression that a rounding key can reach.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

_ATTRIBUTE = "_jaxact_original"
KEY = "rounding_key"


@dataclasses.dataclass(frozen=True)
class Original:
    """An uncompressed function or class, and the options of its compression.

    Attributes:
      compressed: made from it. Wrappers and subclasses copy attributes, and are none.
    """

    target: Any
    compressed: object
    activations: tuple[str | int, ...] | None
    static_argnums: tuple[str | int, ...]


def remember(
    compressed: Any,
    target: object,
    activations: tuple[str | int, ...] | None,
    static_argnums: tuple[str | int, ...],
) -> None:
    """Note that `compressed` was made from `target`."""
    note = Original(target, compressed, activations, static_argnums)
    setattr(compressed, _ATTRIBUTE, note)


def original_of(target: object) -> Original | None:
    """The original of a compressed function or class, else None."""
    note = getattr(target, _ATTRIBUTE, None)
    is_own = isinstance(note, Original) and note.compressed is target
    return note if is_own else None


def refuse_key(f: Callable[..., object]) -> None:
    """Refuse a function with a parameter that the compressed one has for itself.

    Raises:
      ValueError: it has a parameter `rounding_key`.
    """
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return
    if KEY in parameters:
        name = getattr(f, "__qualname__", str(f))
        raise ValueError(
            f"compress({name}): it has a parameter {KEY}. A compressed function takes "
            f"this keyword for its rounding noise, so {name} would not get it. Give "
            "its parameter another name."
        )

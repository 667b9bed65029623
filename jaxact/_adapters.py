"""Find the Flax adapter for a target, without importing Flax before the user did."""

import importlib
from collections.abc import Sequence
from typing import Any

_HOMES = {"flax.linen": "jaxact.flax.linen", "flax.nnx": "jaxact.flax.nnx"}


def for_target(target: Any) -> Any | None:
    """The adapter module for a Flax module class or instance, else None."""
    return _for_class(target if isinstance(target, type) else type(target))


def for_arguments(args: Sequence[Any]) -> Any | None:
    """The adapter for a call with a Flax module among its arguments, else None."""
    return next(filter(None, map(for_target, args)), None)


def is_nnx(x: Any) -> bool:
    """Whether `x` is an NNX module."""
    adapter = for_target(x)
    return adapter is not None and adapter.__name__ == _HOMES["flax.nnx"]


def _for_class(cls: type) -> Any | None:
    for base in cls.__mro__:
        for home, adapter in _HOMES.items():
            if base.__name__ == "Module" and base.__module__.startswith(home):
                return importlib.import_module(adapter)
    return None

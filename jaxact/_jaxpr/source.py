"""The user's line that an equation comes from, and the code behind a callable."""

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from jax.extend import source_info_util

from jaxact._jaxpr.types import SourceInfo

# Packages whose lines say nothing to the user. `contextlib` runs the wrappers around
# Flax's methods.
LIBRARIES = frozenset(
    "jaxact jaxact_kernels jax jaxlib flax equinox haiku optax contextlib "
    "functools".split()
)
# More than any program calls functions within one another.
_ALL_FRAMES = 10_000


def source_line(info: SourceInfo) -> str:
    """'file.py:line (function)': the innermost line outside the libraries.

    Where all lines are theirs it is the innermost; '' where there is none.
    """
    innermost = source_info_util.summarize(info)
    if not is_in_library(innermost):  # as most are; to list the others takes longer
        return os.path.basename(innermost)
    frames = source_info_util.summarize(info, _ALL_FRAMES).splitlines()
    others = (frame for frame in reversed(frames) if not is_in_library(frame))
    return os.path.basename(next(others, innermost))


def is_in_library(place: str) -> bool:
    """Whether a file, or a line in it, is a library's."""
    return place.startswith(tuple(_folders()))


def _folders() -> list[str]:
    """Where the libraries that are imported are."""
    places: list[str] = []
    for name in LIBRARIES & set(sys.modules):
        module = sys.modules[name]
        folders = getattr(module, "__path__", None)
        if folders is None:
            places.append(getattr(module, "__file__", None) or name)
        else:
            places += (os.path.join(folder, "") for folder in folders)
    return places


def code_of(target: Callable[..., Any]) -> types.CodeType:
    """The code that a function runs, or that a class has as its `__call__`.

    Raises:
      AttributeError: it is not written in Python.
    """
    while isinstance(target, functools.partial):
        target = target.func
    for f in (target, target.__call__):
        code = getattr(inspect.unwrap(f), "__code__", None)
        if code is not None:
            return code
    raise AttributeError("__code__")

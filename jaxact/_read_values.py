"""The values that a function reads besides its arguments.

JAX keeps a function's trace and uses it again, so it does not see a value that changed
in between: a number in a closure, an entry in a dict of parameters. A compressed
function is also called op by op, where that would be a silently wrong gradient. Its
trace is used again only if all that it reads is known, is of a type that cannot change
in place, and is the same as before.
"""

import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Iterator

import jax
import numpy as np
from jax.core import Tracer

_CONSTANTS = (
    bool
    | int
    | float
    | complex
    | str
    | bytes
    | enum.Enum
    | np.generic
    | np.dtype
    | None
)
# Modules whose attributes are taken to stay the same.
_LIBRARIES = frozenset({"jax", "numpy", "math", "functools", "operator", "builtins"})


class _MayChangeError(Exception):
    """A value that may change in place."""


def read_values(*roots: object) -> tuple[object, ...] | None:
    """The constants and arrays among `roots`, and those that functions there read.

    None: they are not all known, or one may change in place (a list, a dict, an object,
    a tracer, NumPy's random numbers).
    """
    seen: set[int] = set()
    try:
        return tuple(value for root in roots for value in _values(root, seen))
    except _MayChangeError:
        return None


def are_same(a: tuple[object, ...] | None, b: tuple[object, ...] | None) -> bool:
    """Whether two results of `read_values` are the same values; None never is."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x is y or _equal_constants(x, y) for x, y in zip(a, b, strict=True))


def _equal_constants(x: object, y: object) -> bool:
    is_constant = isinstance(x, _CONSTANTS) and type(x) is type(y)
    # An enumeration's text need not be its own. 0.0 equals -0.0, but not as text.
    return is_constant and not isinstance(x, enum.Enum) and repr(x) == repr(y)


def _values(value: object, seen: set[int]) -> Iterator[object]:
    if isinstance(value, _CONSTANTS):
        yield value
    elif isinstance(value, jax.Array) and not isinstance(value, Tracer):
        yield value
    elif _is_of_a_library(value) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        yield value  # the next one of its parts may be another object
        for part in _parts(value):
            yield from _values(part, seen)


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):
        yield from _reads(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, tuple | frozenset):
        yield from value
    elif _is_frozen(value):
        yield from vars(value).values()
    elif isinstance(value, _JITTED):
        yield getattr(value, "__wrapped__", None)
    else:
        raise _MayChangeError


_JITTED = type(jax.jit(lambda: None))


def _is_frozen(value: object) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return dataclasses.is_dataclass(value) and getattr(parameters, "frozen", False)


def _reads(f: types.FunctionType) -> Iterator[object]:
    try:
        yield from (cell.cell_contents for cell in f.__closure__ or ())
    except ValueError:  # a variable that has no value yet
        raise _MayChangeError from None
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()
    names = set(_names(f.__code__))
    for name in sorted(names & f.__globals__.keys()):
        value = f.__globals__[name]
        if value is np and "random" in names:
            raise _MayChangeError
        yield value


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code and in functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_of_a_library(value: object) -> bool:
    """Whether a module, function or class belongs to JAX or another pure library."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = getattr(value, "__module__", None)
        if not isinstance(name, str) or not _is_by_name(value, name):
            return False
    return name.partition(".")[0] in _LIBRARIES and value is not np.random


def _is_by_name(value: object, module: str) -> bool:
    """Whether a module holds the value itself, not an instance or a wrapper."""
    name = getattr(value, "__qualname__", None)
    if isinstance(value, types.BuiltinFunctionType | type):
        return True
    return (
        isinstance(name, str) and getattr(sys.modules.get(module), name, None) is value
    )

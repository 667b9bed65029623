"""The values that a function reads besides its arguments.

JAX keeps a function's trace and uses it again, so it does not see a value that changed
in between: a number in a closure, an entry in a dict of parameters. A compressed
function is also called op by op, where that would be a silently wrong gradient. Its
trace is used again only if all that it reads is known, is of a type that cannot change
in place, and is the same as before.
"""

import dataclasses
import dis
import enum
import functools
import sys
import types
from collections.abc import Iterator

import jax
import numpy as np
from jax.core import Tracer

# Their subclasses may have attributes, and methods that read more.
_CONSTANTS = frozenset({bool, int, float, complex, str, bytes, type(None)})
# Modules whose attributes are taken to stay the same.
_LIBRARIES = frozenset({"jax", "numpy", "math", "functools", "operator", "builtins"})
# Functions through which anything can be read.
_READERS = frozenset(
    "__import__ breakpoint eval exec globals input locals open vars".split()
)
# Attributes that nobody writes in a frozen dataclass or a NamedTuple: nothing else is
# read there.
_GENERATED = frozenset(
    "__annotations__ __delattr__ __dict__ __doc__ __eq__ __ge__ __getnewargs__ "
    "__getstate__ __gt__ __hash__ __init__ __le__ __lt__ __match_args__ __module__ "
    "__new__ __qualname__ __replace__ __repr__ __setattr__ __setstate__ __slots__ "
    "__static_attributes__ __firstlineno__ __weakref__ __orig_bases__ "
    "__dataclass_fields__ __dataclass_params__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __classdictcell__ _asdict _field_defaults _fields _make "
    "_replace replace".split()
)


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
    # 0.0 equals -0.0, but not as text.
    return _is_constant(x) and type(x) is type(y) and repr(x) == repr(y)


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANTS or isinstance(value, np.generic | np.dtype)


def _values(value: object, seen: set[int]) -> Iterator[object]:
    if _is_constant(value):
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
        yield from getattr(value, "__dict__", {}).values()
        yield from written_in(type(value))
    elif isinstance(value, enum.Enum):
        yield value.value
        yield from written_in(type(value), enum.Enum)
    elif _is_frozen(value):
        yield from getattr(value, "__dict__", {}).values()
        yield from _slots(value)
        yield from written_in(type(value))
    elif isinstance(value, _JITTED):
        yield getattr(value, "__wrapped__", None)
    else:
        raise _MayChangeError


_JITTED = type(jax.jit(lambda: None))


def written_in(cls: type, base: type | None = None) -> Iterator[object]:
    """A class's methods and attributes that somebody wrote, but for JAX and NumPy.

    Args:
      base: an enumeration's, whose members are class attributes.
    """
    for owner in cls.__mro__:
        if owner in (base, object) or _is_of_a_library(owner):
            return
        for name, value in vars(owner).items():
            is_field = name in getattr(cls, "_fields", ())  # of a NamedTuple
            if name in _GENERATED or is_field or isinstance(value, _SLOT):
                continue
            if base is not None and (name.startswith("_") or isinstance(value, base)):
                continue
            yield _function_of(value)


def _slots(value: object) -> Iterator[object]:
    """The values that an instance holds beside its `__dict__`."""
    for owner in type(value).__mro__:
        names = vars(owner).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


_SLOT = types.MemberDescriptorType | types.GetSetDescriptorType


def _function_of(value: object) -> object:
    """The function behind a descriptor; any other value itself."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


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
    yield from vars(f).values()
    names = _names(f.__code__)
    if not names.isdisjoint(_READERS) or _imports(f.__code__):
        raise _MayChangeError
    for name in sorted(names & f.__globals__.keys()):
        value = f.__globals__[name]
        if value is np and "random" in names:
            raise _MayChangeError
        yield value


@functools.lru_cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The names in a function's code and in functions that are defined in it."""
    return frozenset(code.co_names).union(*map(_names, _codes_in(code)))


@functools.lru_cache
def _imports(code: types.CodeType) -> bool:
    """Whether it imports a module, other than a library, when it is called."""
    modules = (
        i.argval for i in dis.get_instructions(code) if "IMPORT_NAME" in i.opname
    )
    if any(name.partition(".")[0] not in _LIBRARIES for name in modules):
        return True
    return any(map(_imports, _codes_in(code)))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (c for c in code.co_consts if isinstance(c, types.CodeType))


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

"""Values as JSON, and back.

A frozen dataclass is an object with its fields, and its class's name as `class`: that
alone for a class of jaxact, and with its module for all others, as two libraries may
have codecs of one name. A tuple is a list, a dtype and an enum member their text. A
file holds no code: a function is saved only as a name in `jax.checkpoint_policies`.
"""

import dataclasses
import enum
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T", bound="Saved")
# Of the files: a number that grows when older versions could not read them.
FORMAT = 1
_CHECKPOINT_POLICY = "checkpoint_policy"
# How floats are written that JSON has no numbers for.
_NOT_FINITE: Mapping[Any, float] = {None: math.inf, "-inf": -math.inf, "nan": math.nan}
# The package whose classes need no module beside their names.
_OWN = __name__.partition(".")[0]


class Saved:
    """A frozen dataclass that can be written as JSON and read back.

    Attributes:
      derived: names of properties that are written too, for other readers.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for `json.dumps`.

        Infinity is None; -infinity and NaN are '-inf' and 'nan'.

        Raises:
          TypeError: it holds code, such as a rule's `where`, or a value without a form
            in JSON.
        """
        name = type(self).__name__
        return {"format": FORMAT, **_fields_of(self, f"{name}.to_dict", "")}

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """The value whose `to_dict` gave `data`.

        None in the place where a number belongs is infinity.

        Raises:
          ValueError: other data, or written in a later format.
        """
        if not isinstance(data, Mapping):
            raise ValueError(
                f"{cls.__name__}.from_dict(<{type(data).__name__}>): the dict that "
                "to_dict gave is required; from text: json.loads(text)."
            )
        given = data.get("format")
        if given != FORMAT:
            raise ValueError(
                f"{cls.__name__}.from_dict: data of format {FORMAT} is required, as "
                f"to_dict writes it; given format={given}."
            )
        value = _decode({k: v for k, v in data.items() if k != "format"})
        if not isinstance(value, cls):
            raise ValueError(
                f"{cls.__name__}.from_dict: the data is of the class "
                f"{type(value).__name__}: write {type(value).__name__}.from_dict."
            )
        return value


def _fields_of(value: Saved, call: str, place: str) -> dict[str, Any]:
    fields = {f.name: getattr(value, f.name) for f in _fields(type(value))}
    fields |= {name: getattr(value, name) for name in type(value).derived}
    prefix = f"{place}." if place else ""
    return {"class": _name_of(type(value))} | {
        name: _encode(field, call, prefix + name) for name, field in fields.items()
    }


def _encode(value: object, call: str, place: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if value == math.inf else str(value)
    if isinstance(value, np.dtype) or value in _key_types().values():
        return str(value)
    if isinstance(value, tuple):
        return [_encode(part, call, f"{place}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Saved) and dataclasses.is_dataclass(value):
        return _fields_of(value, call, place)
    for name in dir(jax.checkpoint_policies):
        if getattr(jax.checkpoint_policies, name) is value:
            return {"class": _CHECKPOINT_POLICY, "name": name}
    kind = "code" if callable(value) else f"a {type(value).__name__}, not JSON"
    raise TypeError(
        f"{call}: {place}={value!r} cannot be saved, because it is {kind}. Save the "
        f"rest without it, and set it after loading with dataclasses.replace."
    )


def dtype_named(text: str) -> np.dtype:
    """The dtype that is saved as this text."""
    return _key_types().get(text) or jnp.dtype(text)


@functools.cache
def _key_types() -> dict[str, np.dtype]:
    """The dtypes that the keys of JAX's generators have, which NumPy has not."""
    found = {}
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.eval_shape(functools.partial(jax.random.key, impl=name), 0)
        found[str(key.dtype)] = key.dtype
    return found


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(part) for part in data)
    if not isinstance(data, dict):
        return data
    name = data.get("class")
    if name == _CHECKPOINT_POLICY:
        return _checkpoint_policy(data.get("name"))
    return _construct(_kind(name), data)


def _name_of(kind: type[Saved]) -> str:
    """A class's name in files."""
    return kind.__name__ if _is_own(kind) else _full_name(kind)


def _full_name(kind: type[Saved]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_own(kind: type[Saved]) -> bool:
    return kind.__module__.partition(".")[0] == _OWN


def _kind(name: object) -> type[Saved]:
    """The class that a file means by a name.

    A user's class is found by its bare name too, as the first files had no more; so
    it is by its name in `__main__`, which every script calls its own module.

    Raises:
      ValueError: there is no such class, or several.
    """
    kinds = [
        kind
        for kind in _subclasses(Saved)
        if dataclasses.is_dataclass(kind) and not _is_replaced(kind)
    ]
    module, _, bare = str(name).rpartition(".")
    alike = [kind for kind in kinds if kind.__name__ == bare and not _is_own(kind)]
    found = [kind for kind in kinds if _name_of(kind) == name]
    if not found and module in ("", "__main__"):
        found = alike
    if len(found) == 1:
        return found[0]
    names = sorted({_full_name(kind) for kind in found or alike})
    write = " or ".join(f'"class": "{name}"' for name in names)
    if not found:
        others = f", or write {write} into the data" if names else ""
        raise ValueError(
            f"from_dict: {name!r} is no class that jaxact knows. Import the module "
            f"that defines it first, or update jaxact{others}."
        )
    if len(names) == 1:
        raise ValueError(
            f"from_dict: {name!r} fits {len(found)} classes that a function made. One "
            "is required: define the class at the top level of its module."
        )
    raise ValueError(
        f"from_dict: {name!r} fits {len(found)} classes. The name of one is required: "
        f"write {write} into the data."
    )


def _is_replaced(kind: type[Saved]) -> bool:
    """Whether its module has another value in its place by now.

    A notebook's cell that runs again, a module that is loaded again and
    `dataclass(slots=True)` leave a first class behind.
    """
    module = sys.modules.get(kind.__module__)
    try:
        return operator.attrgetter(kind.__qualname__)(module) is not kind
    except AttributeError:  # a function made it
        return False


def _construct(kind: type[Saved], data: dict[str, Any]) -> Saved:
    """A value from its fields; those that have a default may be missing."""
    fields = {f.name: f for f in _fields(kind)}
    unknown = set(data) - {"class", *fields, *kind.derived}
    missing = [
        name
        for name, f in fields.items()
        if name not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        raise ValueError(
            f"from_dict: a {kind.__name__} with the fields {', '.join(fields)} is "
            f"required; missing: {missing}, unknown: {sorted(unknown)}."
        )
    values = {name: _decode(data[name]) for name in fields if name in data}
    for name, value in values.items():
        if fields[name].type is float:
            values[name] = _NOT_FINITE.get(value, value)
    return kind(**values)


def _checkpoint_policy(name: object) -> Callable[..., Any]:
    if not isinstance(name, str) or name not in dir(jax.checkpoint_policies):
        raise ValueError(f"from_dict: jax.checkpoint_policies has no {name!r}.")
    return getattr(jax.checkpoint_policies, name)


def _fields(kind: type) -> list[dataclasses.Field[Any]]:
    """The fields that its constructor takes."""
    return [f for f in dataclasses.fields(kind) if f.init]


def _subclasses(kind: type[Saved]) -> Iterator[type[Saved]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)

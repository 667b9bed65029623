"""Values as JSON, and back.

A frozen dataclass is an object with its fields, and its class's name as `class`; a
tuple is a list, a dtype and an enum member their text. A file holds no code: a function
is saved only as a name in `jax.checkpoint_policies`.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

T = TypeVar("T", bound="Saved")
# Of the files: a number that grows when older versions could not read them.
FORMAT = 1
_CHECKPOINT_POLICY = "checkpoint_policy"


class Saved:
    """A frozen dataclass that can be written as JSON and read back.

    Attributes:
      derived: names of properties that are written too, for other readers.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for `json.dumps`.

        A number that is not finite is None.

        Raises:
          TypeError: it holds code, such as a rule's `where`.
        """
        name = type(self).__name__
        return {"format": FORMAT, **_fields_of(self, f"{name}.to_dict", "")}

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
        """The value whose `to_dict` gave `data`.

        None in the place of a number is infinity.

        Raises:
          ValueError: other data, or written in a later format.
        """
        given = data.get("format") if isinstance(data, Mapping) else None
        if given != FORMAT:
            raise ValueError(
                f"{cls.__name__}.from_dict: data of format {FORMAT} is required, as "
                f"to_dict writes it; given format={given}."
            )
        value = _decode({k: v for k, v in data.items() if k != "format"})
        if not isinstance(value, cls):
            raise ValueError(
                f"{cls.__name__}.from_dict: the data is that of a "
                f"{type(value).__name__}: write {type(value).__name__}.from_dict."
            )
        return value


def _fields_of(value: Saved, call: str, place: str) -> dict[str, Any]:
    fields = {f.name: getattr(value, f.name) for f in _fields(type(value))}
    fields |= {name: getattr(value, name) for name in type(value).derived}
    prefix = f"{place}." if place else ""
    return {"class": type(value).__name__} | {
        name: _encode(field, call, prefix + name) for name, field in fields.items()
    }


def _encode(value: object, call: str, place: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, tuple):
        return [_encode(part, call, f"{place}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Saved) and dataclasses.is_dataclass(value):
        return _fields_of(value, call, place)
    for name in dir(jax.checkpoint_policies):
        if getattr(jax.checkpoint_policies, name) is value:
            return {"class": _CHECKPOINT_POLICY, "name": name}
    raise TypeError(
        f"{call}: {place}={value!r} cannot be saved, because it is code. Save the rest "
        f"without it, and set it after loading with dataclasses.replace."
    )


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(part) for part in data)
    if not isinstance(data, dict):
        return data
    name = data.get("class")
    if name == _CHECKPOINT_POLICY:
        return _checkpoint_policy(data.get("name"))
    kinds = {kind.__name__: kind for kind in _subclasses(Saved)}
    if name not in kinds:
        raise ValueError(
            f"from_dict: {name!r} is no class that jaxact knows. Import the module "
            "that defines it first, or update jaxact."
        )
    return _construct(kinds[name], data)


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
        if value is None and fields[name].type is float:
            values[name] = math.inf
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

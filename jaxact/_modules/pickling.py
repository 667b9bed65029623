"""Pickle instances of a compressed class that its module does not hold by its name.

`small = compress(Block)` leaves Block at the name that both classes have, and pickle
stores a class as its name. Such an instance is stored as the recipe for its class.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxact._policy import Policy


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
    """How a class is made: `compress(target, policy, static_argnums)`."""

    cls: type
    compress: Callable[[type, Policy, Sequence[str | int]], type]
    target: type
    policy: Policy
    static_argnums: tuple[str | int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recipe":
        return self  # a copy of an instance has its class

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.compress, self.target, self.policy, self.static_argnums)
        return _recipe, options


def make_picklable(
    cls: type,
    compress: Callable[[Any, Policy, Sequence[str | int]], Any],
    target: type,
    policy: Policy,
    static_argnums: Sequence[str | int],
) -> None:
    """Let instances of `cls` be pickled, given how it was made from `target`."""
    recipe = _Recipe(cls, compress, target, policy, tuple(static_argnums))

    def reduce(self: object, protocol: int) -> Any:
        standard = super(cls, self).__reduce_ex__(max(protocol, 2))
        if type(self) is not cls or _by_name(cls) is cls:
            return standard
        _, _, *state = standard
        return _instance, (recipe,), *state

    setattr(cls, "__reduce_ex__", reduce)  # noqa: B010


def _by_name(cls: type) -> object:
    """The value that pickle would find under the class's name, if any."""
    value: object = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        value = getattr(value, name, None)
    return value


def _instance(recipe: _Recipe) -> object:
    return object.__new__(recipe.cls)


@functools.lru_cache  # instances that were pickled alike have one class
def _recipe(
    compress: Callable[[type, Policy, Sequence[str | int]], type],
    target: type,
    policy: Policy,
    static_argnums: tuple[str | int, ...],
) -> _Recipe:
    cls = compress(target, policy, static_argnums)
    return _Recipe(cls, compress, target, policy, static_argnums)

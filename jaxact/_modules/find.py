"""Find the Flax adapter for a target, without importing Flax before the user did."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxact._trace import is_array

_HOMES = {"flax.linen": "jaxact._modules.linen", "flax.nnx": "jaxact._modules.nnx"}


def for_target(target: Any) -> Any | None:
    """The adapter module for a Flax module class or instance, else None."""
    return _for_class(target if isinstance(target, type) else type(target))


def for_arguments(args: Sequence[Any]) -> Any | None:
    """The adapter for a call of a function or method that modules take part in.

    Linen: a method, whose first argument is a module with variables at hand. A module
    without is a plain value. NNX: any argument.
    """
    for place, value in enumerate(args):
        adapter = None if isinstance(value, type) else for_target(value)
        if adapter is None:
            continue
        if is_nnx(value) or (place == 0 and value.scope is not None):
            return adapter
    return None


def is_nnx(x: Any) -> bool:
    """Whether `x` is an NNX module."""
    adapter = for_target(x)
    return adapter is not None and adapter.__name__ == _HOMES["flax.nnx"]


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A call that NNX modules may take part in, as one of arrays alone.

    Attributes:
      modules: those of the call; empty if there are none, and `fn` the user's own.
      places: their positions in the user's call; -1 for a keyword.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    modules: tuple[Any, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def num_positional(self) -> int:
        """Positional arguments of the user's call."""
        return len(self.args) - (2 if self.modules else 0)

    @property
    def owners(self) -> list[int]:
        """For each array, the position in the user's call of what it belongs to.

        Of a module these are its parameters. -1: other state, and keyword arguments.
        """
        owned = [*enumerate(self.args), (-1, self.kwargs)]
        if self.modules:
            params, rest, *args = self.args
            # What modules share belongs to the first of them.
            parts = [(p, params[i]) for i, p in enumerate(self.places) if i in params]
            owned = [*parts, (-1, rest), *enumerate(args), (-1, self.kwargs)]
        return [n for n, tree in owned for x in jax.tree.leaves(tree) if is_array(x)]

    def result(self, out: Any) -> Any:
        """The result of the user's function, from that of `fn`."""
        return out[0] if self.modules else out

    def write_back(self, out: Any) -> Any:
        """The same; what the call changed goes to the modules."""
        if not self.modules:
            return out
        adapter: Any = for_target(self.modules[0])
        return adapter.write_back(self.modules, out)


def pure_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> PureCall:
    """`fn(*args, **kwargs)`, ready to be traced."""
    modules = [a for a in (*args, *kwargs.values()) if is_nnx(a)]
    if not modules:
        return PureCall(fn, args, kwargs)
    adapter: Any = for_target(modules[0])
    return adapter.purify(fn, args, kwargs)


def _for_class(cls: type) -> Any | None:
    for base in cls.__mro__:
        for home, adapter in _HOMES.items():
            if base.__name__ == "Module" and base.__module__.startswith(home):
                return importlib.import_module(adapter)
    return None

"""Find the Flax adapter for a target, without importing Flax before the user did."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

_HOMES = {"flax.linen": "jaxact.flax.linen", "flax.nnx": "jaxact.flax.nnx"}


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
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    modules: tuple[Any, ...] = ()

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
    return PureCall(*adapter.purify(fn, args, kwargs))


def _for_class(cls: type) -> Any | None:
    for base in cls.__mro__:
        for home, adapter in _HOMES.items():
            if base.__name__ == "Module" and base.__module__.startswith(home):
                return importlib.import_module(adapter)
    return None

"""Find the adapter for a value, without importing a library before the user did."""

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxact._modules.adapter import Adapter, StatefulAdapter

_HOMES = {"flax.linen": "jaxact._modules.linen", "flax.nnx": "jaxact._modules.nnx"}

if TYPE_CHECKING:  # each file has the interface's functions
    from jaxact._modules import linen, nnx

    _ADAPTERS: tuple[Adapter, StatefulAdapter] = linen, nnx


def for_target(target: object) -> Adapter | None:
    """The adapter for a module class or instance, else None."""
    return _for_class(target if isinstance(target, type) else type(target))


def for_arguments(args: Sequence[object]) -> Adapter | None:
    """The adapter for a call that modules take part in."""
    for value in args:
        for adapter in _imported():
            if adapter.takes_part(value):
                return adapter
    return None


def for_states(values: Iterable[object]) -> StatefulAdapter | None:
    """The adapter for the first value with such modules, else None."""
    return next(filter(None, map(for_state, values)), None)


def for_state(value: object) -> StatefulAdapter | None:
    """The adapter for modules that hold their arrays, in any pytree, else None."""
    for adapter in _imported():
        if isinstance(adapter, StatefulAdapter) and adapter.takes_part(value):
            return adapter
    return None


@contextlib.contextmanager
def modules_untouched() -> Iterator[None]:
    """A context for a trace, which fails if it changes modules from outside."""
    with contextlib.ExitStack() as stack:
        for adapter in _imported():
            stack.enter_context(adapter.untouched())
        yield


def _imported() -> Iterator[Adapter]:
    """The adapters for libraries that the user imported."""
    for home, name in _HOMES.items():
        if home in sys.modules:
            yield importlib.import_module(name)  # pyright: ignore


def _for_class(cls: type) -> Adapter | None:
    for base in cls.__mro__:
        for home, adapter in _HOMES.items():
            if base.__name__ == "Module" and base.__module__.startswith(home):
                return importlib.import_module(adapter)  # pyright: ignore
    return None

"""The interface that one file for each module library implements."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from jaxact._modules.original import refuse_key
from jaxact._policy import Policy

if TYPE_CHECKING:
    from jaxact._modules.pure import PureCall

T = TypeVar("T")
# The RNG stream that a module draws its rounding noise from, if it has one.
NOISE_STREAM = "jaxact"


class Adapter(Protocol):
    """The functions that each library's file has.

    `find.py` lets pyright compare the files with this list.
    """

    def compress(
        self, target: T, policy: Policy, static_argnums: Sequence[str | int]
    ) -> T:
        """A class with the same name, or an instance, whose `__call__` is compressed.

        Raises:
          TypeError: the class has no `__call__`, or an instance is given to a library
            that compresses classes alone.
        """
        ...

    def compress_method(
        self,
        f: Callable[..., object],
        policy: Policy,
        static_argnums: Sequence[str | int],
        activations: Sequence[str | int] | None = None,
    ) -> Callable[..., object]:
        """A method, or a function that takes modules, compressed.

        Its arguments are activations, all or those named; the modules' variables are
        parameters.
        """
        ...

    def takes_part(self, value: object) -> bool:
        """Whether a call with this argument, a module or a pytree, has such modules.

        It needs `compress_method`. Other modules are plain values.
        """
        ...

    def untouched(self) -> AbstractContextManager[None]:
        """A context for a trace, which fails if it changes modules from outside."""
        ...


@runtime_checkable
class StatefulAdapter(Adapter, Protocol):
    """For a library whose modules hold their arrays: they are taken out for a call."""

    def purify(
        self,
        f: Callable[..., object],
        args: Sequence[object],
        kwargs: dict[str, object],
    ) -> "PureCall":
        """The call `f(*args, **kwargs)` as one with arrays alone."""
        ...

    def jit(self, f: Callable[..., object]) -> Any:
        """`f` jitted, with the arrays that it changes in modules among its results."""
        ...

    def write_back(self, modules: Sequence[object], out: object) -> object:
        """f's result from its pure call's; changed arrays go to `modules`."""
        ...


def require_call(target: type) -> None:
    """Refuse a class without the method that `compress` replaces.

    Raises:
      TypeError: it has no `__call__`.
      ValueError: its `__call__` has a parameter `rounding_key`.
    """
    # Not `getattr`, which finds the metaclass's own, that makes instances.
    found = (vars(base).get("__call__") for base in target.__mro__)
    if not callable(next(filter(None, found), None)):
        raise TypeError(
            f"compress({target.__name__}): the class has no __call__. Compress the "
            "modules that it holds, or decorate its methods with @jaxact.compress."
        )
    refuse_key(target.__call__)

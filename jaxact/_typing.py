"""The targets and results of `compress`, for type checkers: nothing here runs."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

import jax

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


class Instance(Protocol):
    """An NNX module instance, told from a function by its own method."""

    def sow(self, variable_type: type | str, name: str, value: Any) -> bool: ...


M = TypeVar("M", bound=Instance)


class Compressed(Protocol[P, R]):
    """A compressed function or method: the signature it had, and a `rounding_key`."""

    __name__: str
    __wrapped__: Callable[P, R]

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(
        self, *args: Any, rounding_key: jax.Array | None, **kwargs: Any
    ) -> R: ...

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> Callable[..., R]: ...


class Compress(Protocol):
    """`compress` with its options given."""

    @overload
    def __call__(self, target: type[C]) -> type[C]: ...
    @overload
    def __call__(self, target: M) -> M: ...
    @overload
    def __call__(self, target: Callable[P, R]) -> Compressed[P, R]: ...

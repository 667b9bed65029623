"""A call that modules may take part in, as one with arrays alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp

from jaxact._arguments import arguments
from jaxact._flat import Flat
from jaxact._modules.as_argument import with_module
from jaxact._modules.find import for_state, for_states, for_target, modules_untouched
from jaxact._trace import Rebuild, is_array, trace


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A call with array arguments.

    Attributes:
      fn: the user's function; or one from (parameters, other state, *args, **kwargs)
        to the user's result and the state after.
      args, kwargs: for `fn`; each module is None in them.
      modules: that hold arrays, in the user's call; empty where `fn` is the user's.
      positions: of each module's argument in `args`; -1 for a keyword.
      num_called: how many of the positional arguments are the module that is called.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    modules: tuple[object, ...] = ()
    positions: tuple[int, ...] = ()
    num_called: int = 0

    @property
    def num_positional(self) -> int:
        """How many positional arguments the user's call has."""
        return len(self.args) - (2 if self.modules else 0) - self.num_called

    @property
    def owners(self) -> list[int]:
        """For each array, its argument's position in the user's call.

        A module owns its parameters. -1: other state, keyword arguments, and the module
        that is called.
        """
        owned = [*enumerate(self.args), (-1, self.kwargs)]
        if self.modules:
            params, state, *args = self.args
            # Shared parameters belong to their first module.
            parts = [
                (position, params[number])
                for number, position in enumerate(self.positions)
                if number in params
            ]
            owned = [*parts, (-1, state), *enumerate(args), (-1, self.kwargs)]
        return [
            max(n - self.num_called, -1)
            for n, tree in owned
            for x in jax.tree.leaves(tree)
            if is_array(x)
        ]

    def trace(self) -> tuple[Flat, list[jax.Array], Rebuild]:
        """The call as `jaxact._trace.trace` gives it; no argument is a parameter."""
        described = arguments(self.fn, self.args, self.kwargs, None, ())
        with modules_untouched():
            return trace(self.fn, self.args, self.kwargs, described)

    def differentiated(
        self, values: Sequence[jax.Array], argnums: int | Sequence[int] | None
    ) -> list[bool]:
        """Whether each value from `trace` is one to differentiate.

        Args:
          values: those closed over, then the arguments'.
          argnums: positions in the user's call. None: all float arrays.

        Raises:
          ValueError: argnums out of range.
        """
        is_float = [jnp.issubdtype(v.dtype, jnp.inexact) for v in values]
        if argnums is None:
            return is_float
        several = argnums if isinstance(argnums, Iterable) else (argnums,)
        chosen, num_args = tuple(several), self.num_positional
        is_whole = all(isinstance(n, SupportsIndex) for n in chosen)
        if not is_whole or not {*chosen} <= {*range(-num_args, num_args)}:
            raise ValueError(
                f"argnums={argnums!r}: positions of arguments are required, and the "
                f"call has {num_args} positional ones, numbered from 0. As by jax.grad,"
                " keyword arguments are not differentiated."
            )
        positions = {n % num_args for n in chosen}
        closed_over = [-1] * (len(values) - len(self.owners))
        owners = [*closed_over, *self.owners]
        return [f and n in positions for f, n in zip(is_float, owners, strict=True)]

    def result(self, out: Any) -> Any:
        """The user's function's result, from `fn`'s."""
        return out[0] if self.modules else out

    def write_back(self, out: Any) -> Any:
        """The same, after the arrays that the call changed went to its modules."""
        adapter = for_state(self.modules[0]) if self.modules else None
        return out if adapter is None else adapter.write_back(self.modules, out)


def pure_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    part: Callable[[Any], Any] | None = None,
) -> PureCall:
    """`fn(*args, **kwargs)`, ready to be traced; or the `part` that is wanted.

    Raises:
      TypeError: `fn` is no function of arrays.
    """
    _require_function(fn)
    fn, every = with_module(fn, args)
    if part is not None:
        fn = _with_part(fn, part)
    adapter = for_states((*every, *kwargs.values()))
    if adapter is None:
        return PureCall(fn, every, kwargs)
    call = adapter.purify(fn, every, kwargs)
    return dataclasses.replace(call, num_called=len(every) - len(args))


def _with_part(
    fn: Callable[..., Any], part: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def result(*args: Any, **kwargs: Any) -> Any:
        return part(fn(*args, **kwargs))

    return result


def first_of(result: Any, call: str) -> Any:
    """The first of (result, anything); `call` is the function's name in a message.

    Raises:
      TypeError: it is no pair.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"jaxact.{call}(has_aux=True): a function that returns (result, anything) "
            f"is required, and it returned a value of type {type(result).__name__}. "
            "Leave has_aux out."
        )
    return result[0]


def _require_function(fn: object) -> None:
    if isinstance(fn, type):
        raise TypeError(_is_a_class(fn))
    if not callable(fn):
        raise TypeError(
            f"jaxact: got a value of type {type(fn).__name__}; a function is required, "
            "such as the loss, and its arguments after it."
        )
    refuse_module(fn)


def refuse_module(fn: object) -> None:
    """Refuse a module's class, and a module that is called with variables.

    Raises:
      TypeError: it is one.
    """
    adapter = for_target(fn)
    if adapter is None:
        return
    if isinstance(fn, type):
        raise TypeError(_is_a_class(fn))
    if for_state(fn) is None and not adapter.takes_part(fn):
        raise TypeError(
            f"jaxact: got an instance of the Linen module {type(fn).__name__}; a "
            "function of arrays is required: give its `apply`, and the variables as "
            "the first argument."
        )


def _is_a_class(fn: type) -> str:
    return (
        f"jaxact: got the class {fn.__name__}; a function of arrays is required, such "
        "as the loss: lambda params, x: net.apply(params, x).sum()."
    )

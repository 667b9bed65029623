"""A policy for all compressed calls that are traced in a context.

The context is JAX's own (`jax.make_user_context`), so its value is part of the key of
every cache that JAX has for traces and programs, and each thread has its own. A call
reads it once, where it is traced: its derivative rule keeps the policy, whenever JAX
traces that.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import jax

from jaxact._decision import Decision
from jaxact._jaxpr.types import Jaxpr
from jaxact._policy import Policy, checked_policy
from jaxact._written_as import written_as

# Hears a call's path, with labels, its program, and the decisions about its residuals.
Observer: TypeAlias = Callable[[str, Jaxpr, Sequence[Decision]], None]
_F = TypeVar("_F", bound=Callable[..., Any])


class Override:
    """The value of a context; its hash is taken once, JAX asks for it at every call.

    Attributes:
      policy: in place of the calls' own.
      observer: hears the decisions of the calls that are differentiated. Contexts with
        two observers share no traces.
    """

    def __init__(self, policy: Policy, observer: Observer | None = None) -> None:
        self.policy = policy
        self.observer = observer
        self._hash = hash((policy, observer))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Override)
            and self._hash == other._hash
            and self.observer == other.observer
            and self.policy == other.policy
        )

    def __hash__(self) -> int:
        return self._hash


_context = jax.make_user_context(None)


def current_override() -> Override | None:
    """The innermost override here; None outside of all."""
    return _context.value


def overriding(override: Override) -> contextlib.AbstractContextManager[object]:
    """A context in which compressed calls are traced with `override`."""
    return _context(override)


def runs_later(f: object) -> bool:
    """Whether a call makes a generator or coroutine, whose body runs after it."""
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    functions = (f, type(f).__call__) if callable(f) else ()
    return any(is_kind(g) for is_kind in kinds for g in functions)


class _Using(threading.local):
    """A context to enter any number of times, and a decorator.

    Each thread has its own contexts to leave.
    """

    def __init__(self, policy: Policy) -> None:
        self._override = Override(policy)
        self._entered: list[contextlib.AbstractContextManager[object]] = []

    def __enter__(self) -> Policy:
        context = overriding(self._override)
        context.__enter__()
        self._entered.append(context)
        return self._override.policy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, f: _F) -> _F:
        if not callable(f):
            raise TypeError(
                f"jaxact.using(...)(<{type(f).__name__}>): a function is required: "
                "write using(policy)(step)(params)."
            )
        if runs_later(f):
            raise TypeError(
                f"jaxact.using(...)({f!r}): a generator or coroutine function runs "
                "after its call, outside of this context. Write `with "
                "jaxact.using(policy):` in it, around the compressed calls."
            )
        override = self._override

        @functools.wraps(f)
        def inside(*args: object, **kwargs: object) -> Any:
            with overriding(override):
                return f(*args, **kwargs)

        return inside  # type: ignore[return-value]


@written_as("using(policy)(step), or with using(policy): step(params)")
def using(policy: Policy) -> _Using:
    """A context in which compressed calls take this policy in place of their own.

    For a model whose code stays as it is: a plan, bits that were just measured, a
    comparison. It counts where a call is traced; a step that was jitted and traced
    outside is traced again inside, and JAX keeps both programs. Of contexts inside one
    another the innermost counts. A thread that is started inside is outside; all else
    that runs meanwhile is inside, such as other tasks of an event loop: no `await` or
    `yield` belongs in it.

    Rules choose by path, name or key, so one policy can treat every call differently;
    rules of the calls' own policies do not count.

    Also a decorator: `step = jaxact.using(policy)(step)`.

    Args:
      policy: for all calls.

    Raises:
      TypeError: `policy` is no Policy; it decorates a generator or coroutine function.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1)
      >>> w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
      >>> with jaxact.using(jaxact.Policy(bits=2)):
      ...     table = jaxact.residuals(layer, w, x)
      >>> [row.action.bits for row in table.rows]
      [2, 2]
    """
    _refuse_function(policy)
    return _Using(checked_policy("jaxact.using(", policy))


def _refuse_function(policy: object) -> None:
    """Refuse the function to decorate, in the place that its policy has.

    Raises:
      TypeError: it is one, jitted or not.
    """
    if inspect.isfunction(policy) or hasattr(policy, "__wrapped__"):
        name = getattr(policy, "__name__", "...")
        raise TypeError(
            f"jaxact.using({name}): a jaxact.Policy is required, then the function: "
            "write using(policy)(step), or with using(policy): step(params)."
        )

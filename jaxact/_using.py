"""A policy for all compressed calls that are traced in a context.

The context is JAX's own (`jax.make_user_context`), so its value is part of the key of
every cache that JAX has for traces and programs, and each thread has its own. A call
reads it once, where it is traced: its derivative rule keeps the policy, whenever JAX
traces that.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax

from jaxact._decision import Decision
from jaxact._policy import Policy

# Hears the decisions about a call's residuals.
Observer: TypeAlias = Callable[[Sequence[Decision]], None]


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


@contextlib.contextmanager
def using(policy: Policy) -> Iterator[Policy]:
    """A context in which compressed calls take this policy in place of their own.

    For a model whose code stays as it is: a plan, bits that were just measured, a
    comparison. It counts where a call is traced; a step that was jitted and traced
    outside is traced again inside, and JAX keeps both programs. Of contexts inside one
    another the innermost counts. A thread that is started inside is outside.

    Rules choose by path, name or key, so one policy can treat every call differently;
    rules of the calls' own policies do not count.

    Also a decorator: `step = jaxact.using(policy)(step)`.

    Args:
      policy: for all calls.

    Raises:
      TypeError: `policy` is no Policy.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1)
      >>> w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
      >>> with jaxact.using(jaxact.Policy(bits=2)):
      ...     table = jaxact.residuals(layer, w, x)
      >>> [row.action.bits for row in table.rows]
      [2, 2]
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            f"jaxact.using({policy!r}): a jaxact.Policy is required, such as "
            "jaxact.using(jaxact.Policy(bits=2)); of a plan write plan.policy."
        )
    with overriding(Override(policy)):
        yield policy

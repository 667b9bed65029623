"""Refuse a trace that leaves its values in a Linen module from outside.

Linen keeps variables in the module's scope, so a function that makes or changes them
through its closure leaves tracers there. They show up as parameters, or in an error
about another place.
"""

import contextlib
from collections.abc import Iterator

import flax.linen as nn
import jax
from flax.core import Scope
from jax.core import Tracer


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """A context for a trace.

    Raises:
      TypeError: it changed variables of the module that is being called.
    """
    scope = _current_scope()
    if scope is None:
        yield
        return
    before = _tracers(scope)  # kept, so that no other value gets their ids
    known = {id(x) for found in before.values() for x in found}
    yield
    changed = [
        name
        for name, found in _tracers(scope).items()
        if any(id(x) not in known for x in found)
    ]
    if changed:
        raise TypeError(
            "jaxact: a function makes or changes variables of a Linen module that is "
            f"none of its arguments, in {', '.join(changed)}. The module must be one: "
            "compress(lambda module, x: ...)(self, x)."
        )


def _tracers(scope: Scope) -> dict[str, list[Tracer]]:
    """Those in the mutable collections, by collection."""
    return {
        name: [x for x in jax.tree.leaves(tree) if isinstance(x, Tracer)]
        for name, tree in scope.mutable_variables().items()
    }


def _current_scope() -> Scope | None:
    """All variables that the innermost Linen call has, None outside of one."""
    # Linen has no public name for it.
    context = getattr(nn.module, "_context", None)
    stack = getattr(context, "module_stack", None) or [None]
    scope = getattr(stack[-1], "scope", None)
    return None if scope is None else scope.root

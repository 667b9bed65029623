"""Attributes that are no arrays, and that a call changes in its NNX modules.

A compressed call has copies. Variables go back to the caller's modules as arrays do; a
counter `self.calls += 1`, or a deleted attribute, by its name.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx

from jaxact._trace import is_array

# Where a module is in a tuple of them.
_Keys: TypeAlias = tuple[Any, ...]
# NNX's own, in a module's `__dict__`.
_OWN = "_pytree__"
_NOTHING = object()


class Change(NamedTuple):
    """An attribute after a call.

    Attributes:
      keys: its module's.
      value: its new one; empty where it was deleted.
    """

    keys: _Keys
    name: str
    value: tuple[object, ...]


class Attributes:
    """The modules' attributes before a call."""

    def __init__(self, modules: Sequence[object]) -> None:
        self._before = [
            (tuple(keys), node, dict(vars(node)))
            for keys, node in nnx.iter_graph(tuple(modules))
            if isinstance(node, nnx.Pytree)
        ]

    def changes(self) -> tuple[Change, ...]:
        """Those that are different now, but for variables and their values."""
        return tuple(self._changes())

    def _changes(self) -> Iterator[Change]:
        for keys, node, before in self._before:
            after = vars(node)
            for name in dict.fromkeys([*before, *after]):
                old, new = before.get(name, _NOTHING), after.get(name, _NOTHING)
                if old is new or name.startswith(_OWN):
                    continue
                if new is not _NOTHING and _is_static(new):
                    if not (type(old) is type(new) and old == new):
                        yield Change(keys, name, (new,))
                elif new is _NOTHING or (old is not _NOTHING and _is_static(old)):
                    # In place of None a variable comes back with the state.
                    yield Change(keys, name, ())


def write_attributes(modules: Sequence[object], changes: Sequence[Change]) -> None:
    """Change the modules' attributes as a call changed its copies'."""
    if not changes:
        return
    nodes = {tuple(keys): node for keys, node in nnx.iter_graph(tuple(modules))}
    for keys, name, value in changes:
        if value:
            setattr(nodes[keys], name, *value)
        else:
            delattr(nodes[keys], name)


def _is_static(value: object) -> bool:
    """Whether it holds no arrays, variables or modules."""
    held = (nnx.Pytree, nnx.Variable)
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, held))
    return not any(isinstance(x, held) or is_array(x) for x in leaves)

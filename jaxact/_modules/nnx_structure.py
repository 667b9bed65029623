"""Structure that a call changes in its NNX modules: submodules, ties, attributes.

A compressed call has copies of its modules. Where it changes more than arrays, such as
a submodule made in the first call or a counter `self.calls += 1`, the caller's modules
are built anew in place from the copies' graph definition, as NNX's transforms do it:
submodules and variables that were there before stay the objects they are.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
from flax import nnx

# Submodules in `modules`, each with its class, and all that is no array.
Structure: TypeAlias = nnx.GraphDef[tuple[object, ...]]
# NNX keeps a stack of the calls with this tag, so that one may be inside another.
_TAG = "jaxact"


@dataclasses.dataclass(frozen=True)
class _Before:
    """Stands for a value from before the call: it need not be one of its results.

    Attributes:
      number: its place among them.
    """

    number: int


class Split(NamedTuple):
    """Modules without the objects.

    Attributes:
      params: their parameters.
      state: their other variables and arrays.
    """

    structure: Structure
    params: nnx.State
    state: nnx.State


def split(modules: Sequence[object]) -> Split:
    """The modules taken apart, in graph mode: it holds for trees too."""
    return Split(*nnx.split(tuple(modules), nnx.Param, ..., graph=True))


class Copies:
    """Modules made from a `Split`, for one call.

    Attributes:
      modules: the copies.
    """

    def __init__(self, before: Split) -> None:
        self._before = before
        # Copied, so that a trace does not write to an outer one's variables.
        with nnx.merge_context(_TAG, inner=True) as context:
            self.modules: tuple[object, ...] = context.merge(*before)

    def split(self) -> tuple[nnx.State | None, nnx.State | None, Structure | None]:
        """Parameters, other state and structure; each None where it is as before."""
        before = self._before
        with nnx.split_context(_TAG) as context:
            after = Split(*context.split(self.modules, nnx.Param, ...))
        if _same_structure(before.structure.with_same_outer_index(), after.structure):
            params = None if _same(before.params, after.params) else after.params
            state = None if _same(before.state, after.state) else after.state
            return params, state, None
        refuse_references(after[1:])
        known = {id(x): _Before(i) for i, x in enumerate(jax.tree.leaves(before[1:]))}
        params, state = jax.tree.map(lambda x: known.get(id(x), x), after[1:])
        return params, state, after.structure


@contextlib.contextmanager
def copies(before: Split) -> Iterator[Copies]:
    """A context for a call with copies of modules."""
    with nnx.update_context(_TAG):
        yield Copies(before)


def write_structure(
    modules: Sequence[object],
    structure: Structure,
    params: nnx.State,
    state: nnx.State,
) -> None:
    """Change the modules in place as a call changed its copies.

    Raises:
      flax.errors.TraceContextError: a module belongs to an outer trace; all are as
        before.
    """
    with nnx.update_context(_TAG), _unchanged_by_errors(modules):
        with nnx.split_context(_TAG) as context:
            _, *before = context.split(tuple(modules), nnx.Param, ...)
        values = jax.tree.leaves(before)
        filled = jax.tree.map(
            lambda x: values[x.number] if isinstance(x, _Before) else x, (params, state)
        )
        with nnx.merge_context(_TAG, inner=False) as context:
            context.merge(structure, *filled)


@contextlib.contextmanager
def _unchanged_by_errors(modules: Sequence[object]) -> Iterator[None]:
    """A context that gives modules their attributes back, which NNX empties first."""
    nodes = [node for _, node in nnx.iter_graph(tuple(modules), graph=True)]
    before = [(n, dict(vars(n))) for n in nodes if isinstance(n, nnx.Pytree)]
    try:
        yield
    except Exception as error:
        for node, attributes in before:
            vars(node).clear()
            vars(node).update(attributes)
        error.add_note(
            "jaxact: the compressed call changes submodules or attributes of its "
            "modules, so all of them are required to belong to the trace of the call. "
            "Make submodules in __init__, or give the modules to nnx.grad or nnx.jit "
            "as arguments."
        )
        raise


def refuse_references(states: object) -> None:
    """Refuse variables whose value JAX changes in place.

    Raises:
      TypeError: there is one. Its copies in a trace would be the caller's.
    """
    is_variable = lambda x: isinstance(x, nnx.Variable)
    for v in jax.tree.leaves(states, is_leaf=is_variable):
        if is_variable(v) and (v.ref or v.hijax):
            kind = "ref" if v.ref else "hijax"
            raise TypeError(
                f"jaxact: a module has a variable of type {type(v).__name__} that is a "
                f"reference ({kind}=True); values of variables are required. Make the "
                f"module outside of nnx.var_defaults({kind}=True)."
            )


def _same_structure(a: Structure, b: Structure) -> bool:
    # One that is equal may be of another type: 1 and True.
    return a == b and all(
        type(getattr(x, "value", None)) is type(getattr(y, "value", None))
        for (_, x), (_, y) in zip(a.attributes, b.attributes, strict=True)
    )


def _same(a: object, b: object) -> bool:
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(x) == len(y) and all(i is j for i, j in zip(x, y, strict=True))

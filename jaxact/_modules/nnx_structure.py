"""Structure that a call changes in its NNX modules: submodules, ties, attributes.

A compressed call has copies of its modules. Where it changes more than arrays, such as
a submodule made in the first call or a counter `self.calls += 1`, the caller's modules
are built anew in place from the copies' graph definition, as NNX's transforms do it:
submodules and variables that were there before stay the objects they are.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
from flax import nnx

from jaxact._trace import Static

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


class Changed(NamedTuple):
    """Modules with another structure, and nothing about the others.

    Attributes:
      structure: a `Structure`, that of these modules together.
      params: their parameters; a `_Before` for one from before the call.
      state: the same for other variables and arrays.
    """

    structure: Static
    params: nnx.State
    state: nnx.State


class After(NamedTuple):
    """Modules after a call.

    Attributes:
      states: the parameters and other state that are not as before; none for modules
        with another structure.
      changed: these, if any.
    """

    states: list[list[nnx.State]]
    changed: Changed | None


class _Parts(NamedTuple):
    """A copy at one time.

    Attributes:
      states: its parameters and other state; NNX changes their variables in place.
      values: the arrays in each.
    """

    structure: Structure
    states: tuple[nnx.State, nnx.State]
    values: tuple[list[jax.Array], list[jax.Array]]

    @classmethod
    def of(cls, module: object) -> "_Parts":
        """The parts, as the module is now."""
        structure, params, state = _split_inside((module,))
        values = jax.tree.leaves(params), jax.tree.leaves(state)
        return cls(structure, (params, state), values)

    def differing_from(self, before: "_Parts") -> list[nnx.State]:
        """Parameters, other state or both: with an array that was not there."""
        compared = zip(self.states, self.values, before.values, strict=True)
        return [state for state, a, b in compared if not _same(a, b)]


class Copies:
    """Modules made from a `Split`, for one call.

    Attributes:
      modules: the copies.
    """

    def __init__(self, before: Split) -> None:
        # Copied, so that a trace does not write to an outer one's variables.
        with nnx.merge_context(_TAG, inner=True) as context:
            self.modules: tuple[object, ...] = context.merge(*before)
        self._leaves = jax.tree.leaves(before[1:])
        self._before = [_Parts.of(m) for m in self.modules]

    def after(self) -> After:
        """The modules after the call."""
        after = [_Parts.of(m) for m in self.modules]
        pairs = list(zip(self._before, after, strict=True))
        is_changed = [not _same_structure(a.structure, b.structure) for a, b in pairs]
        states = [
            [] if changed else b.differing_from(a)
            for changed, (a, b) in zip(is_changed, pairs, strict=True)
        ]
        if not any(is_changed):
            return After(states, None)
        chosen = tuple(itertools.compress(self.modules, is_changed))
        new = _split_inside(chosen)
        refuse_references(new[1:])
        known = {id(x): _Before(i) for i, x in enumerate(self._leaves)}
        params, state = jax.tree.map(lambda x: known.get(id(x), x), new[1:])
        return After(states, Changed(Static(new.structure), params, state))


def _split_inside(modules: tuple[object, ...]) -> Split:
    """Copies taken apart; their structure says which modules they are copies of."""
    context = nnx.current_update_context(_TAG)
    known = context.inner_ref_outer_index
    with nnx.split_context(_TAG) as split_context:
        found = Split(*split_context.split(modules, nnx.Param, ...))
    context.inner_ref_outer_index = known  # NNX forgets it after one
    return found


@contextlib.contextmanager
def copies(before: Split) -> Iterator[Copies]:
    """A context for a call with copies of modules."""
    with nnx.update_context(_TAG):
        yield Copies(before)


def write(modules: Sequence[object], after: After) -> None:
    """Change the modules in place as a call changed its copies.

    Raises:
      flax.errors.TraceContextError: a module belongs to an outer trace; all are as
        before.
    """
    if after.changed is not None:
        _write_structure(modules, after.changed)
    for module, states in zip(modules, after.states, strict=True):
        if states:  # a frozen module may belong to an outer trace
            nnx.update((module,), *states)


def _write_structure(modules: Sequence[object], changed: Changed) -> None:
    with nnx.update_context(_TAG), _unchanged_by_errors(modules):
        with nnx.split_context(_TAG) as context:
            _, *before = context.split(tuple(modules), nnx.Param, ...)
        values = jax.tree.leaves(before)
        filled = jax.tree.map(
            lambda x: values[x.number] if isinstance(x, _Before) else x,
            (changed.params, changed.state),
        )
        with nnx.merge_context(_TAG, inner=False) as context:
            context.merge(changed.structure.value, *filled)


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


def _same(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))

"""Maxima that are taken off scores before these are exponentials, which are summed.

A softmax written by hand, exp(s - max(s)) over its sum, has the same value whatever is
taken off: the gradient through its maximum is zero, wherever a checkpoint that computes
rounded scores again finds that. `jax.nn.softmax` stops the gradient there.
"""

from collections.abc import Mapping, Sequence

from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES
from jaxact._jaxpr.read import readers_of, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var

_Readers = Mapping[Var, Sequence[Eqn]]


def shifts_in(eqns: Sequence[Eqn], results: Sequence[Atom]) -> set[Var]:
    """The maxima among equations that shift exponentials and do nothing else.

    Args:
      results: values that leave them.
    """
    maxima = [e.outvars[0] for e in eqns if e.primitive.name == "reduce_max"]
    if not maxima:
        return set()
    readers, ends = readers_of(eqns), set(variables_in(results))
    return {v for v in maxima if _is_shift(v, readers, ends)}


def _is_shift(maximum: Var, readers: _Readers, ends: set[Var]) -> bool:
    is_found = False
    for v, eqn in _read_past_moves(maximum, readers):
        name = eqn.primitive.name
        if not ends.isdisjoint([v, *eqn.outvars]):
            return False
        if name == "sub" and eqn.invars[1] is v:
            if not _is_summed(eqn.outvars[0], readers):
                return False
            is_found = True
        elif name != "eq":  # asks where it is
            return False
    return is_found


def _is_summed(shifted: Var, readers: _Readers) -> bool:
    """Whether scores are read by exponentials alone, and a sum reads these."""
    found = list(_read_past_moves(shifted, readers))
    names = {
        e.primitive.name
        for _, eqn in found
        for _, e in _read_past_moves(eqn.outvars[0], readers)
    }
    return (
        all(eqn.primitive.name in EXPONENTIALS for _, eqn in found)
        and "reduce_sum" in names
    )


def _read_past_moves(v: Var, readers: _Readers) -> list[tuple[Var, Eqn]]:
    """The equations that read a value or its copies, and which of these."""
    found, todo = [], [v]
    while todo:
        x = todo.pop()
        for eqn in readers.get(x, ()):
            if eqn.primitive.name in MOVES:
                todo += eqn.outvars
            else:
                found.append((x, eqn))
    return found

"""The largest exponential in each row of a cross-entropy, which is stored apart."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.labels import LARGEST, Label
from jaxact._jaxpr.primitives import CASTS, COLLECTIVES, EXPONENTIALS, MOVES
from jaxact._jaxpr.read import readers_of, variables_in
from jaxact._jaxpr.rewrite import rename, with_outputs
from jaxact._jaxpr.types import Eqn, Renaming, Var
from jaxact._plan.apart import Apart
from jaxact._plan.forward import Forward

# Most bits that a row's index and its element take for each element in the row.
_MOST_BITS = 4
# From a row's sum to its logarithm: `jax.nn.logsumexp` takes the absolute value.
_ON_THE_WAY = MOVES | COLLECTIVES | {"abs"}


def with_largest_apart(forward: Forward) -> Forward:
    """A forward program that also finds the largest element of some residuals' rows.

    Where the logarithm of a row's sum is taken. Not in attention, which divides by it:
    nothing takes the largest one's part off its gradient.
    """
    residuals = set(variables_in(forward.residuals))
    readers = readers_of(forward.jaxpr.eqns)
    eqns: list[Eqn] = []
    exponentials: set[Var] = set()
    apart: dict[Var, Apart] = {}
    for eqn in forward.jaxpr.eqns:
        eqns.append(eqn)
        name = eqn.primitive.name
        is_masked = name == "select_n" and not exponentials.isdisjoint(
            variables_in(eqn.invars)
        )
        if name not in EXPONENTIALS and not is_masked:
            continue
        (v,) = eqn.outvars
        exponentials.add(v)
        axis = _axis(v, readers) if v in residuals else None
        if axis is not None:
            found, apart[v] = _apart(eqn, axis)
            eqns += found
    if not apart:
        return forward
    jaxpr = with_outputs(forward.jaxpr, eqns, forward.jaxpr.outvars)
    return dataclasses.replace(forward, jaxpr=jaxpr, apart=apart)


def _axis(v: Var, readers: Mapping[Var, Sequence[Eqn]]) -> int | None:
    """The axis along which the logarithm of a value's sum is taken, if rows are long.

    So long that an index and an element are little for each.
    """
    for total in _in_logarithms(v, readers):
        axis, *others = total.params["axes"]
        row = v.aval.shape[axis]
        size = _type_of_index(row).itemsize + v.aval.dtype.itemsize
        if not others and 8 * size <= _MOST_BITS * row:
            return int(axis)
    return None


def _type_of_index(row: int) -> "np.dtype[np.unsignedinteger]":
    return np.min_scalar_type(row)


def _in_logarithms(v: Var, readers: Mapping[Var, Sequence[Eqn]]) -> Iterator[Eqn]:
    """The sums over a value whose logarithm is taken."""
    todo: list[tuple[Var, Eqn | None]] = [(v, None)]
    while todo:
        x, total = todo.pop()
        for eqn in readers.get(x, ()):
            name = eqn.primitive.name
            if total is not None and name == "log":
                yield total
            elif total is None and name == "reduce_sum":
                todo.append((eqn.outvars[0], eqn))
            elif name in (CASTS if total is None else _ON_THE_WAY):
                todo += [(out, total) for out in eqn.outvars]


def _apart(exponential: Eqn, axis: int) -> tuple[list[Eqn], Apart]:
    """Equations that find the largest element in each row, and the map without it.

    They read exponentials, not scores: XLA would round scores that have more readers in
    other places, and a loss by bfloat16 scores would be another. So is the element, 1
    but where XLA computes a score again in another precision than the maximum.
    """
    (v,) = exponential.outvars
    dtype = _type_of_index(v.aval.shape[axis])

    def find(x: jax.Array) -> list[jax.Array]:
        with jax.named_scope(Label(LARGEST, 0).component):
            index = lax.argmax(x, axis, np.int32)
        found = [lax.convert_element_type(index, dtype), lax.reduce_max(x, [axis])]
        return [lax.expand_dims(row, [axis]) for row in found]

    with exponential.ctx.manager:
        jaxpr, _ = open_jaxpr(jax.make_jaxpr(find)(v.aval))
    names: Renaming = dict(zip(jaxpr.invars, [v], strict=True))
    source = exponential.source_info
    eqns = [
        eqn.replace(
            invars=[rename(x, names) for x in eqn.invars],
            source_info=source.replace(
                name_stack=source.name_stack + eqn.source_info.name_stack
            ),
            ctx=exponential.ctx,
        )
        for eqn in jaxpr.eqns
    ]
    index, largest = variables_in(jaxpr.outvars)
    return eqns, Apart(index, largest, axis)

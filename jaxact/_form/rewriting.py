"""Rewrite a program so that its derivative keeps little."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxact import _compat
from jaxact._call import Flat, Kind
from jaxact._flow import flow, read
from jaxact._form.cells import with_cells
from jaxact._form.classes import classify
from jaxact._form.pooling import with_pools
from jaxact._form.primitives import MOVES, is_float
from jaxact._program import input_facts, learn
from jaxact._surgery import flatten, jit_body

CUSTOM_RULE = "custom_vjp"  # scope of what a custom rule computes


def rewrite(flat: Flat) -> tuple[Flat, Callable[[Sequence[Any]], list[Any]]]:
    """The same function, with cells and pools, and its values from those of `flat`."""
    num_consts = len(flat.jaxpr.constvars)
    jaxpr, extra = flatten(flat.jaxpr, jit_body)
    wider = _with_constants(flat, jaxpr, num_consts, len(extra))
    facts = flow(jaxpr, input_facts(wider), learn)

    def depends(v: Any) -> bool:
        return read(facts, v) != 0

    classes = classify(
        jaxpr, _largest(jaxpr, depends), depends, set(filter(depends, wider.invars))
    )
    jaxpr = with_cells(with_pools(_scoped(jaxpr), depends), classes.is_exact, depends)

    def values(given: Sequence[Any]) -> list[Any]:
        return [*given[:num_consts], *extra, *given[num_consts:]]

    return dataclasses.replace(wider, jaxpr=jaxpr), values


def _with_constants(flat: Flat, jaxpr: Any, place: int, count: int) -> Flat:
    """`flat` with `count` more constants, which are parameters."""

    def insert(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
        return (*items[:place], *[item] * count, *items[place:])

    return Flat(
        jaxpr,
        insert(flat.kinds, Kind.PARAMETER),
        insert(flat.paths, "closed over"),
        insert(flat.owners, -1),
    )


def _largest(jaxpr: Any, depends: Callable[[Any], bool]) -> int:
    """Elements of the largest value that might be a residual."""
    computed = (
        v for e in jaxpr.eqns if e.primitive.name not in MOVES for v in e.outvars
    )
    values = (*jaxpr.invars, *computed)
    return max((v.aval.size for v in values if is_float(v) and depends(v)), default=0)


def _scoped(jaxpr: Any) -> Any:
    """Custom rules in a scope of their own, so that tables and labels can tell."""

    def scoped(eqn: Any) -> Any:
        if not eqn.primitive.name.startswith("custom_vjp_call"):
            return eqn
        source = eqn.source_info
        scope = source.name_stack.extend(CUSTOM_RULE)
        return eqn.replace(source_info=source.replace(name_stack=scope))

    return _compat.with_outputs(jaxpr, map(scoped, jaxpr.eqns), jaxpr.outvars)

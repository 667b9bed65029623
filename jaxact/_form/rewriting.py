"""Rewrite a program so that its derivative keeps little."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxact._form.affine_classes import classify
from jaxact._form.cells import with_cells
from jaxact._form.pooling import with_pools
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import is_float, is_literal
from jaxact._jaxpr.rewrite import flatten, jit_body, name_equation, rename, with_outputs
from jaxact._plan.facts import input_facts, learn
from jaxact._trace import Flat, Kind

CUSTOM_RULE = "custom_vjp"  # scope of what a custom rule computes
# Names of what a rule of its own is given and returns.
GIVEN, RETURNED = "jaxact: given to a rule", "jaxact: returned by a rule"
_OWN_RULES = ("custom_vjp_call", "checkpoint", "remat")


def rewrite(flat: Flat) -> tuple[Flat, Callable[[Sequence[Any]], list[Any]]]:
    """The same function, with cells and pools, and its values from those of `flat`."""
    num_consts = len(flat.jaxpr.constvars)
    jaxpr, extra = flatten(flat.jaxpr, jit_body)
    jaxpr = _tagged(jaxpr)
    wider = _with_constants(flat, jaxpr, num_consts, len(extra))
    facts = flow(jaxpr, input_facts(wider), learn)

    def depends(v: Any) -> bool:
        return fact_of(facts, v) != 0

    classes = classify(
        jaxpr, _largest(jaxpr, depends), depends, set(filter(depends, wider.invars))
    )
    jaxpr = with_cells(with_pools(jaxpr, depends), classes.is_exact, depends)

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


def _tagged(jaxpr: Any) -> Any:
    """Name what rules of their own are given and return, so that labels can tell.

    The backward pass of a `jax.checkpoint` or a `custom_vjp` may do anything with what
    it keeps; what such a rule returns is an ordinary value again.
    """
    eqns: list[Any] = []
    env: dict[Any, Any] = {}

    def tag(v: Any, eqn: Any, name: str) -> Any:
        eqns.append(name_equation(eqn, v, name))
        return eqns[-1].outvars[0]

    for eqn in jaxpr.eqns:
        inputs = [rename(v, env) for v in eqn.invars]
        is_rule = eqn.primitive.name.startswith(_OWN_RULES)
        if is_rule:
            inputs = [
                tag(v, eqn, GIVEN) if is_float(v) and not is_literal(v) else v
                for v in inputs
            ]
        source = eqn.source_info
        if eqn.primitive.name.startswith("custom_vjp_call"):
            scope = source.name_stack.extend(CUSTOM_RULE)
            source = source.replace(name_stack=scope)
        eqns.append(eqn.replace(invars=inputs, source_info=source))
        if is_rule:
            env |= {v: tag(v, eqn, RETURNED) for v in eqn.outvars if is_float(v)}
    outputs = [rename(v, env) for v in jaxpr.outvars]
    return with_outputs(jaxpr, eqns, outputs)

"""Rewrite a program so that its derivative keeps little."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from jaxact._flat import Flat, Kind
from jaxact._form.cells import changed_in, with_cells
from jaxact._form.centered import with_mixes
from jaxact._form.chooser import Chooser
from jaxact._form.classify import classify
from jaxact._form.pooling import with_pools
from jaxact._form.scaled_poles import sources_of_scaled_poles
from jaxact._form.softmax import with_softmaxes
from jaxact._jaxpr.flow import Facts, fact_of, facts_inside, flow
from jaxact._jaxpr.links import NO_LINKS, Links
from jaxact._jaxpr.once import run_once
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import is_float, is_of_platforms
from jaxact._jaxpr.rewrite import Body, flatten, jit_body, with_held_programs
from jaxact._jaxpr.types import Array, Eqn, Jaxpr, Predicate, Var
from jaxact._plan.facts import ACTIVATION, input_facts, is_activation, learn
from jaxact._plan.program import Program
from jaxact._policy import small_size

T = TypeVar("T")


def rewrite(
    flat: Flat, is_active: Sequence[bool]
) -> tuple[Flat, Callable[[Sequence[Array]], list[Any]]]:
    """The same function with cells and pools, and its values from those for `flat`.

    Args:
      is_active: whether each value for `flat` is differentiated.
    """
    num_consts = len(flat.jaxpr.constvars)
    given = zip((*flat.jaxpr.constvars, *flat.jaxpr.invars), is_active, strict=True)
    active = [v for v, is_active_one in given if is_active_one]
    jaxpr, constants = flatten(flat.jaxpr, run_once())
    flattened = _with_constants(flat, jaxpr, num_consts, len(constants))
    known = flow(jaxpr, input_facts(flattened), learn)
    facts = {v: ACTIVATION for v, fact in known.items() if fact}
    small = small_size(_sizes(jaxpr, lambda v: is_activation(facts, v)))
    links = flat.links(flat.invars, jaxpr.outvars)
    jaxpr = _with_forms(jaxpr, facts, small, links, active)

    def with_constants(values: Sequence[Array]) -> list[Any]:
        return [*values[:num_consts], *constants, *values[num_consts:]]

    return dataclasses.replace(flattened, jaxpr=jaxpr), with_constants


def _with_forms(
    jaxpr: Jaxpr,
    facts: Facts,
    small: int,
    links: Links,
    active: Collection[Var],
) -> Jaxpr:
    """`jaxpr` with cells, pools and softmaxes, also inside its equations.

    Args:
      facts: which variables are made from possible activations.
      small: the most elements of a small value.
      links: the program's.
      active: inputs that are differentiated.
    """
    depends = lambda v: is_activation(facts, v)
    program, inputs = Program(jaxpr, facts), set(filter(depends, jaxpr.invars))
    chooser = Chooser(program, classify(program, small, inputs))
    kept = sources_of_scaled_poles(chooser, changed_in(jaxpr, active))
    classes = classify(program, small, inputs, kept) if kept else chooser.classes
    pooled = Program(with_pools(jaxpr, depends), facts)
    mixed = with_mixes(with_softmaxes(pooled, links), depends)
    jaxpr = with_cells(mixed, classes, depends, active)

    def change(eqn: Eqn, inside: Jaxpr) -> Jaxpr:
        if not is_of_platforms(eqn):  # a call of its own
            return inside
        inside, _ = flatten(inside, _jit_without_constants)
        given = facts_inside(eqn, [fact_of(facts, v) for v in eqn.invars])
        floats = filter(is_float, (*inside.constvars, *inside.invars))
        return _with_forms(inside, flow(inside, given), small, NO_LINKS, [*floats])

    return with_held_programs(jaxpr, change)


def _with_constants(flat: Flat, jaxpr: Jaxpr, position: int, count: int) -> Flat:
    """`flat` with `count` more constants, which are parameters."""

    def insert(items: tuple[T, ...], item: T) -> tuple[T, ...]:
        return (*items[:position], *[item] * count, *items[position:])

    return dataclasses.replace(
        flat,
        jaxpr=jaxpr,
        kinds=insert(flat.kinds, Kind.PARAMETER),
        paths=insert(flat.paths, "closed over"),
        owners=insert(flat.owners, -1),
        carried=tuple((i + count * (i >= position), out) for i, out in flat.carried),
    )


def _jit_without_constants(eqn: Eqn) -> Body | None:
    """A jit's body that can be inlined where there is no place for constants."""
    body = jit_body(eqn)
    return None if body is None or body.constants else body


def _sizes(jaxpr: Jaxpr, depends: Predicate) -> list[int]:
    """Elements in each value that might be a residual."""
    computed = (
        v for e in jaxpr.eqns if e.primitive.name not in MOVES for v in e.outvars
    )
    values = (*jaxpr.invars, *computed)
    return [v.aval.size for v in values if is_float(v) and depends(v)]

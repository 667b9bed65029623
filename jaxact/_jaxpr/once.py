"""Programs inside equations that run once, whatever the data.

The branch of `lax.cond(True, ...)` and the step of a scan with one layer, beside plain
jits. XLA puts them in the equation's place and fuses them with their surroundings. So
does this: a branch that is packed apart would end in a product that is rounded by
itself, where XLA contracts a * b + c in the uncompressed program.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.labels import branch_component, with_labels
from jaxact._jaxpr.read import held_programs, is_literal
from jaxact._jaxpr.rewrite import (
    Body,
    body_of,
    jit_body,
    new_equation,
    new_variable,
    with_outputs,
)
from jaxact._jaxpr.types import Atom, Eqn, Var


def run_once() -> Callable[[Eqn], Body | None]:
    """A function for `flatten`, which calls it for one equation after the other.

    It gives the bodies of plain jits, of conditionals whose index is a literal, perhaps
    passed to a jit, converted or clamped, and of scans of length 1.
    """
    numbers: dict[Var, int] = {}

    def number_of(v: Atom) -> int | None:
        if not is_literal(v):
            return numbers.get(v)
        return int(v.val) if _is_index(v) or v.aval.dtype == bool else None

    def body(eqn: Eqn) -> Body | None:
        known, name = list(map(number_of, eqn.invars)), eqn.primitive.name
        if name in ("clamp", "convert_element_type"):  # the index of a `lax.switch`
            told = sorted(number for number in known if number is not None)
            is_index = len(told) == len(known) and _is_index(eqn.outvars[0])
            _note(eqn.outvars, [told[len(told) // 2] if is_index else None], numbers)
            return None
        found = jit_body(eqn)
        if name == "cond" and known[0] is not None:
            found = _branch(eqn, known[0])
        elif name == "scan" and eqn.params["length"] == 1:
            found = _step(eqn)
        if found is not None:
            _note(found.inputs, known, numbers)
        return found

    return body


def _is_index(v: Atom) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.signedinteger)


def _note(
    variables: Sequence[Var], values: Sequence[int | None], numbers: dict[Var, int]
) -> None:
    """Note values; a jitted function that is called again has the same variables."""
    for v, value in zip(variables, values, strict=True):
        if value is None:
            numbers.pop(v, None)
        else:
            numbers[v] = value


def _branch(eqn: Eqn, number: int) -> Body:
    """A conditional's branch as the body of a call with the same operands."""
    branch, consts = open_jaxpr(held_programs(eqn)[number])
    inputs = [new_variable(eqn.invars[0].aval), *branch.invars]
    body = body_of(with_labels(branch), consts, branch_component(number))
    return dataclasses.replace(body, inputs=inputs)


def _step(eqn: Eqn) -> Body:
    """The only step as the body of a call with the scan's operands and results."""
    step, consts = open_jaxpr(eqn.params["jaxpr"])
    num_consts, num_carry = scan_counts(eqn)
    first = num_consts + num_carry
    stacked = [new_variable(v.aval) for v in eqn.invars[first:]]
    taken = [
        new_equation(eqn, lax.squeeze_p, [xs], [x], {"dimensions": (0,)})
        for xs, x in zip(stacked, step.invars[first:], strict=True)
    ]
    ys = [new_variable(v.aval) for v in eqn.outvars[num_carry:]]
    put = [
        new_equation(eqn, lax.broadcast_in_dim_p, [x], [y], _in_first(y))
        for x, y in zip(step.outvars[num_carry:], ys, strict=True)
    ]
    outputs = [*step.outvars[:num_carry], *ys]
    whole = with_outputs(step, [*taken, *step.eqns, *put], outputs)
    body = body_of(with_labels(whole), consts)
    return dataclasses.replace(body, inputs=[*step.invars[:first], *stacked])


def _in_first(y: Var) -> dict[str, object]:
    """Parameters that put a value in the first place of an array of length 1."""
    axes = tuple(range(1, y.aval.ndim))
    return {"shape": y.aval.shape, "broadcast_dimensions": axes, "sharding": None}

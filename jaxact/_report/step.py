"""The residuals and the matrix products in the program of a whole training step."""

from collections.abc import Sequence

from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr
from jaxact._jaxpr.primitives import PRODUCTS
from jaxact._jaxpr.read import call_body, is_backward, programs_in, variables_in
from jaxact._jaxpr.rewrite import without_unused
from jaxact._jaxpr.types import ClosedJaxpr, Eqn, Jaxpr, Var
from jaxact._report.table import ResidualRow, ResidualTable
from jaxact._report.tabulate import checkpointed_rows, tabulate


def step_program(closed: ClosedJaxpr) -> Jaxpr:
    """A traced step without the equations that none of its results needs."""
    jaxpr, _ = open_jaxpr(closed)
    return without_unused(jaxpr)


def step_residuals(jaxpr: Jaxpr) -> ResidualTable:
    """The residuals of the gradients that a step takes.

    JAX names the equations of a gradient: `jvp` in forward, `transpose` in backward. A
    residual is computed by the first and read by the second. Those of a gradient that
    is taken in a loop, such as one of each microbatch, count once.
    """
    read: dict[Var, None] = {}
    made: set[Var] = set()
    rows: list[ResidualRow] = []
    referenced = 0
    backward: list[Eqn] = []
    recomputed: list[ResidualRow] = []
    for eqn in jaxpr.eqns:
        if is_backward(eqn):
            backward.append(eqn)
            read.update(dict.fromkeys(variables_in(eqn.invars)))
        elif "jvp(" in str(eqn.source_info.name_stack):
            made.update(eqn.outvars)
        else:
            for body in _bodies(eqn):
                inner = step_residuals(body)
                rows += inner.rows
                recomputed += inner.checkpointed
                referenced += inner.referenced_bytes
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    crossing = [v for v in read if v in made or v in inputs]
    if made:
        table = tabulate(jaxpr, crossing, [""] * len(jaxpr.invars))
        rows += table.rows
        referenced += table.referenced_bytes
    recomputed += checkpointed_rows(backward)
    return ResidualTable(tuple(rows), referenced, checkpointed=tuple(recomputed))


def count_products(jaxpr: Jaxpr) -> int:
    """How many matrix products and convolutions a program computes.

    The body of a scan counts as often as it runs, of a `cond` the largest branch, of a
    `while` one iteration.
    """
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            total += 1
            continue
        inside = [count_products(body) for body in _bodies(eqn)]
        each = max(inside, default=0) if name == "cond" else sum(inside)
        total += each * eqn.params.get("length", 1) if name == "scan" else each
    return total


def _bodies(eqn: Eqn) -> Sequence[Jaxpr]:
    """The programs that an equation evaluates."""
    body = call_body(eqn) or custom_vjp_body(eqn)
    return programs_in(eqn) if body is None else [open_jaxpr(body)[0]]

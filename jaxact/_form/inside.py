"""Values that are computed inside the programs that an equation holds.

A conditional's branches, the bodies of scans and `shard_map`s and a jit with shardings
are calls of their own, which plan for their residuals and mark these. The plan around
them reads them for its own values: an operand that comes near a pole inside, an output
that is a statistic there. The branches of `lax.platform_dependent` JAX differentiates
as they are; their residuals are outputs too, told apart by the values inside.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.flow import fact_of, facts_inside, flow, scan_facts
from jaxact._jaxpr.read import held_programs, is_literal
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Var
from jaxact._plan.facts import learn
from jaxact._plan.program import Program, found_once


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A program that an equation holds, with its calls inlined.

    Attributes:
      constants: those of a scan, which its compressed body reads where they are.
      inputs: for each variable that it is given, but for a scan's carry, the operand.
      outputs: for each variable that it returns the equation's output.
      carried: of a scan, the output of the step before that an input is.
    """

    program: Program
    constants: frozenset[Var]
    inputs: tuple[tuple[Var, Var], ...]
    outputs: tuple[tuple[Var, Var], ...]
    carried: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)


@found_once
def insides(program: Program) -> Sequence[Inside]:
    """The programs in the equations of a program, but for loops."""
    return [
        _inside(eqn, closed, facts_inside(eqn, _given(program, eqn)))
        for eqn in program.jaxpr.eqns
        for closed in held_programs(eqn)
    ]


@found_once
def scan_bodies(program: Program) -> Sequence[Inside]:
    """The bodies of a program's scans; of their outputs those that are inputs too."""
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    return [_scan_body(eqn, _given(program, eqn)) for eqn in scans]


def _given(program: Program, eqn: Eqn) -> list[int]:
    return [fact_of(program.facts, v) for v in eqn.invars]


def _scan_body(eqn: Eqn, given: Sequence[int]) -> Inside:
    facts, _ = scan_facts(eqn, given, learn)
    inside = _inside(eqn, eqn.params["jaxpr"], facts)
    body = inside.program.jaxpr
    num_consts, num_carry = scan_counts(eqn)
    carry = body.invars[num_consts : num_consts + num_carry]
    return dataclasses.replace(
        inside,
        constants=frozenset(body.invars[:num_consts]),
        inputs=tuple(pair for pair in inside.inputs if pair[0] not in carry),
        outputs=tuple(pair for pair in inside.outputs if pair[0] in body.invars),
        carried=dict(zip(carry, body.outvars, strict=False)),
    )


def _inside(eqn: Eqn, closed: ClosedJaxpr, given: Sequence[int]) -> Inside:
    jaxpr, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
    first = len(eqn.invars) - len(jaxpr.invars)  # 1 for a branch, after its number
    inputs = zip(jaxpr.invars, eqn.invars[first:], strict=True)
    outputs = zip(jaxpr.outvars, eqn.outvars, strict=True)
    return Inside(
        Program(jaxpr, flow(jaxpr, given, learn)),
        frozenset(),
        tuple((v, operand) for v, operand in inputs if not is_literal(operand)),
        tuple((v, output) for v, output in outputs if not is_literal(v)),
    )

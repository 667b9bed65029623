"""Values that are computed inside the programs that an equation holds.

A conditional's branches, the bodies of scans and `shard_map`s and a jit with shardings
are calls of their own, which plan for their residuals and mark these. The plan around
them reads them for its own values: an operand that comes near a pole inside, an output
that is a statistic there. The branches of `lax.platform_dependent` JAX differentiates
as they are; their residuals are outputs too, told apart by the values inside.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.flow import Facts, fact_of, facts_inside, flow, scan_facts
from jaxact._jaxpr.read import held_programs, is_literal
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from jaxact._plan.facts import learn


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A program that an equation holds, with its calls inlined.

    Attributes:
      facts: about the variables in it, see `facts.py`.
      constants: those of a scan, which its compressed body reads where they are.
      inputs: for each variable that it is given, but for a scan's carry, the operand.
      outputs: for each variable that it returns the equation's output.
      carried: of a scan, the output of the step before that an input is.
    """

    program: Jaxpr
    facts: Facts
    constants: frozenset[Var]
    inputs: tuple[tuple[Var, Var], ...]
    outputs: tuple[tuple[Var, Var], ...]
    carried: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)


def insides(jaxpr: Jaxpr, facts: Facts) -> Iterator[Inside]:
    """The programs in the equations of a program, but for loops."""
    for eqn in jaxpr.eqns:
        given = [fact_of(facts, v) for v in eqn.invars]
        for closed in held_programs(eqn):
            yield _inside(eqn, closed, facts_inside(eqn, given))


def scan_bodies(jaxpr: Jaxpr, facts: Facts) -> Iterator[Inside]:
    """The bodies of a program's scans; of their outputs those that are inputs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        given, _ = scan_facts(eqn, [fact_of(facts, v) for v in eqn.invars], learn)
        inside = _inside(eqn, eqn.params["jaxpr"], given)
        variables = inside.program.invars
        num_consts, num_carry = scan_counts(eqn)
        carry = variables[num_consts : num_consts + num_carry]
        yield dataclasses.replace(
            inside,
            constants=frozenset(variables[:num_consts]),
            inputs=tuple(pair for pair in inside.inputs if pair[0] not in carry),
            outputs=tuple(pair for pair in inside.outputs if pair[0] in variables),
            carried=dict(zip(carry, inside.program.outvars, strict=False)),
        )


def _inside(eqn: Eqn, closed: ClosedJaxpr, given: Sequence[int]) -> Inside:
    program, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
    first = len(eqn.invars) - len(program.invars)  # 1 for a branch, after its number
    inputs = zip(program.invars, eqn.invars[first:], strict=True)
    outputs = zip(program.outvars, eqn.outvars, strict=True)
    return Inside(
        program,
        flow(program, given, learn),
        frozenset(),
        tuple((v, operand) for v, operand in inputs if not is_literal(operand)),
        tuple((v, output) for v, output in outputs if not is_literal(v)),
    )

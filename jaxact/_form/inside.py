"""Values that are computed inside the programs that an equation holds.

JAX differentiates a conditional's branches, the body in a `shard_map` and a jit with
shardings as they are, so what these keep are their equation's outputs. An output is
told apart by the value that it is inside: the statistics that a norm in a branch has
stay exact as any other's.
"""

import dataclasses
from collections.abc import Iterator

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import Facts, fact_of, facts_inside, flow
from jaxact._jaxpr.read import held_programs, is_literal
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Jaxpr, Var
from jaxact._plan.facts import learn


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A program that an equation holds, with its calls inlined.

    Attributes:
      facts: about the variables in it, see `facts.py`.
      outputs: for each variable that it returns the equation's output.
    """

    program: Jaxpr
    facts: Facts
    outputs: tuple[tuple[Var, Var], ...]


def insides(jaxpr: Jaxpr, facts: Facts) -> Iterator[Inside]:
    """The programs in the equations of a program."""
    for eqn in jaxpr.eqns:
        given = [fact_of(facts, v) for v in eqn.invars]
        for closed in held_programs(eqn):
            program, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
            own = flow(program, facts_inside(eqn, given), learn)
            pairs = zip(program.outvars, eqn.outvars, strict=True)
            yield Inside(
                program,
                own,
                tuple((v, output) for v, output in pairs if not is_literal(v)),
            )

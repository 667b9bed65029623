"""Values that are computed inside the branches of a conditional.

JAX differentiates a branch as it is, so the residuals of a branch are outputs of its
conditional. An output is told apart by the value that it is in a branch: the statistics
of a norm inside `jax.lax.cond` stay exact as any other's.
"""

import dataclasses
from collections.abc import Iterator

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Jaxpr, Predicate, Var


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A branch, with its calls inlined.

    Attributes:
      is_activation: whether a variable in it is made from more than parameters.
      outputs: for each variable that it returns the conditional's output.
    """

    program: Jaxpr
    is_activation: Predicate
    outputs: tuple[tuple[Var, Var], ...]


def branches_in(jaxpr: Jaxpr, is_activation: Predicate) -> Iterator[Branch]:
    """The branches of all conditionals in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "cond":
            continue
        given = [int(not is_literal(v) and is_activation(v)) for v in eqn.invars[1:]]
        for closed in eqn.params["branches"]:
            program, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
            facts = flow(program, given)
            pairs = zip(program.outvars, eqn.outvars, strict=True)
            yield Branch(
                program,
                lambda v, facts=facts: bool(fact_of(facts, v)),
                tuple((v, output) for v, output in pairs if not is_literal(v)),
            )

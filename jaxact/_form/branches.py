"""Values that are computed inside the branches of a conditional.

JAX differentiates a branch as it is, so the residuals of a branch are outputs of its
conditional. An output is told apart by the value that it is in a branch: the statistics
of a norm inside `jax.lax.cond` stay exact as any other's.
"""

from collections.abc import Callable, Iterator

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Eqn, Jaxpr, Predicate, Var

# Variables of a program, given those that are made from more than parameters.
Search = Callable[[Jaxpr, Predicate], set[Var]]


def outputs_in_branches(
    jaxpr: Jaxpr, is_activation: Predicate, search: Search
) -> set[Var]:
    """Outputs of conditionals that `search` finds in a branch."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "cond":
            continue
        for branch, is_active in _branches(eqn, is_activation):
            inside = search(branch, is_active)
            for v, result in zip(eqn.outvars, branch.outvars, strict=True):
                if not is_literal(result) and result in inside:
                    found.add(v)
    return found


def _branches(eqn: Eqn, is_activation: Predicate) -> Iterator[tuple[Jaxpr, Predicate]]:
    """Each branch with calls inlined, and which of its variables are activations."""
    given = [not is_literal(v) and is_activation(v) for v in eqn.invars[1:]]
    for closed in eqn.params["branches"]:
        branch, _ = flatten(open_jaxpr(closed)[0], inlinable_body)
        facts = flow(branch, [int(is_active) for is_active in given])
        yield branch, lambda v, facts=facts: bool(fact_of(facts, v))

"""Store each residual of `jax.vjp` for itself.

This is what a `jax.checkpoint` policy asks for, whose saved values are the residuals,
and what `default=Exact()` means. What is not saved is recomputed from what is, so the
rounding of a stored residual biases the gradient where that is not linear.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jaxact._codec import Exact, Recompute
from jaxact._decision import Decision, Reason, Remark
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.primitives import VIEWS
from jaxact._jaxpr.read import variables_in
from jaxact._plan.facts import ACTIVATION, STORED, input_facts, learn
from jaxact._plan.forward import Forward
from jaxact._plan.plan import (
    Plan,
    Replay,
    is_coded,
    is_on_host,
)
from jaxact._policy import Policy
from jaxact._residual import Provenance
from jaxact._trace import Flat


def plan_each(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> Plan:
    """Decide for every residual of `forward`."""
    jaxpr = forward.jaxpr
    facts = flow(jaxpr, [0, *input_facts(flat)], learn)
    leaves = dict.fromkeys(variables_in(forward.residuals))
    sizes = [v.aval.size for v in leaves if fact_of(facts, v) & ACTIVATION]
    largest = max(sizes, default=0)
    provenance = Provenance(jaxpr, ["seed", *flat.paths], prefix)
    producers = provenance.producers(jaxpr)
    inputs = set(jaxpr.invars) | set(jaxpr.constvars)
    decisions: dict[Any, Decision] = {}

    def decide(v: Any) -> None:
        if v in decisions:
            return
        what = provenance.of(v)
        decisions[v] = decision = _decide(v, what, facts, inputs, policy, largest)
        if isinstance(decision.action, Recompute):
            needs = _sources(v, producers, leaves)
            if isinstance(needs, Reason):
                decisions[v] = Decision(
                    decision.residual, Exact(), needs, decision.rule
                )
                return
            for source in needs:
                decide(source)

    for v in leaves:
        decide(v)
    again = {v: d for v, d in decisions.items() if isinstance(d.action, Recompute)}
    coded = {
        v: d
        for v, d in decisions.items()
        if v not in again and is_coded(v, d.action, fact_of(facts, v), inputs)
    }
    asked = any(d.reason is not Reason.OF_PARAMETERS for d in again.values())
    if policy.recompute is not None or asked:
        coded = {v: d.biased(Remark.RECOMPUTED_FROM) for v, d in coded.items()}
    return Plan(
        forward,
        coded,
        tuple(v for v in decisions if v not in coded and v not in again),
        _slice(jaxpr, list(again), producers, decisions.keys() - again.keys()),
        tuple(decisions.values()),
        policy,
    )


def _decide(
    v: Any, what: Any, facts: Any, inputs: set[Any], policy: Policy, largest: int
) -> Decision:
    known = fact_of(facts, v)
    if known & STORED:
        return Decision(what, Exact(), Reason.STORED_INSIDE)
    if is_on_host(v):
        return Decision(what, Exact(), Reason.ON_HOST)
    if not known & ACTIVATION:
        if v in inputs:
            reason = Reason.NOT_AN_ACTIVATION if known else Reason.REFERENCED
            return Decision(what, Exact(), reason)
        if what.dtype == jnp.bool_:
            return policy.decide(what, largest=largest)
        action = Recompute() if what.primitive in VIEWS else Exact()
        return Decision(what, action, Reason.OF_PARAMETERS)
    return policy.decide(what, largest=largest)


def _sources(v: Any, producers: Any, leaves: Collection[Any]) -> list[Any] | Reason:
    """Nearest inputs and residuals to recompute `v` from, or why there are none."""
    todo, seen, found = [v], {v}, []
    while todo:
        eqn = producers.get(todo.pop())
        if eqn is None:
            return Reason.ARGUMENT
        if eqn.effects:
            return Reason.SIDE_EFFECT
        for x in variables_in(eqn.invars):
            if x not in seen:
                seen.add(x)
                (found if x in leaves or x not in producers else todo).append(x)
    return found


def _slice(
    jaxpr: Any, wanted: Sequence[Any], producers: Any, given: set[Any]
) -> tuple[Replay, ...]:
    """The equations that compute `wanted` from `given`, in program order."""
    todo, seen, needed = list(wanted), set(wanted), set()
    while todo:
        eqn = producers[todo.pop()]
        needed.add(id(eqn))
        for x in variables_in(eqn.invars):
            if x not in seen and x not in given:
                seen.add(x)
                todo.append(x)
    return tuple(Replay(eqn) for eqn in jaxpr.eqns if id(eqn) in needed)

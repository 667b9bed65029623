"""Store each residual of `jax.vjp` by itself.

A `jax.checkpoint` policy asks for this, whose saved values are the residuals, and so
does `default=Exact()`. Values that are not saved are recomputed from those that are, so
rounding a stored residual biases the gradient where that is not linear.
"""

import dataclasses
from collections.abc import Collection, Set as AbstractSet

from jaxact._codec import Bias, Exact, Recompute
from jaxact._decision import Decision, Reason, Remark
from jaxact._flat import Flat
from jaxact._jaxpr.primitives import VIEWS
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.types import Var
from jaxact._plan.forward import Forward
from jaxact._plan.reading import (
    Reading,
    decide_unrounded,
    finish,
    keep_instead,
    obstacle,
    read_forward,
)
from jaxact._plan.storage import Replay, StoragePlan
from jaxact._plan.uses import find_uses
from jaxact._policy import Policy


def plan_each_residual(
    forward: Forward, flat: Flat, policy: Policy, prefix: str
) -> StoragePlan:
    """Decide for every residual in `forward`."""
    reading = read_forward(forward, flat, policy, prefix)
    decisions = _decide_all(reading, _recomputed_from(reading))
    recomputed = [v for v, d in decisions.items() if isinstance(d.action, Recompute)]
    stored = decisions.keys() - set(recomputed)
    decisions |= _labelled(reading, decisions, stored)
    # Views of parameters are recomputed without anyone asking for it, and exactly.
    if any(decisions[v].reason is not Reason.OF_PARAMETERS for v in recomputed):
        decisions |= {v: decisions[v].biased(Remark.RECOMPUTED_FROM) for v in stored}
    return finish(reading, decisions, _replay(reading, recomputed, stored))


def _recomputed_from(reading: Reading) -> set[Var]:
    """The residuals that the backward program computes something nonlinear from."""
    bits = {v: 1 << number for number, v in enumerate(reading.leaves)}
    uses = find_uses(reading.forward, bits)
    return {v for v, bit in bits.items() if (uses.nonlinear | uses.divided) & bit}


def _labelled(
    reading: Reading, decisions: dict[Var, Decision], stored: AbstractSet[Var]
) -> dict[Var, Decision]:
    """The decisions about stored residuals, with the bias that their use leaves."""
    rounded = [v for v in stored if decisions[v].bias is not Bias.EXACT]
    roundings = {v: 1 << number for number, v in enumerate(rounded)}
    uses = find_uses(reading.forward, roundings)
    labelled = {}
    for v, bit in roundings.items():
        decision = decisions[v]
        unbounded = [reason for reason, bits in uses.unbounded.items() if bits & bit]
        if unbounded and decision.rule is None:
            labelled[v] = Decision(decision.residual, Exact(), unbounded[0])
        elif (uses.nonlinear | uses.divided) & bit:
            labelled[v] = decision.biased(Remark.RECOMPUTED_FROM)
        elif uses.repeated & bit:
            labelled[v] = decision.repeated()
    return labelled


def _decide_all(
    reading: Reading, recomputed_from: AbstractSet[Var]
) -> dict[Var, Decision]:
    """A decision for every residual, and for each that others are recomputed from."""
    leaves = set(reading.leaves)
    decisions: dict[Var, Decision] = {}

    def decide(v: Var) -> None:
        if v in decisions:
            return
        decisions[v] = decision = _decide(reading, v, v in recomputed_from)
        if isinstance(decision.action, Recompute):
            sources = _sources(reading, v, leaves)
            if isinstance(sources, Reason):
                decisions[v] = keep_instead(decision, sources)
                return
            for source in sources:
                decide(source)

    for v in reading.leaves:
        decide(v)
    return decisions


def _decide(reading: Reading, v: Var, is_recomputed_from: bool) -> Decision:
    residual = dataclasses.replace(
        reading.provenance.of(v), is_recomputed_from=is_recomputed_from
    )
    decision = decide_unrounded(reading, v, residual)
    if decision is None:
        return reading.decide(residual)
    if decision.reason is Reason.OF_PARAMETERS and residual.primitive in VIEWS:
        return dataclasses.replace(decision, action=Recompute())
    return decision


def _sources(reading: Reading, v: Var, leaves: Collection[Var]) -> list[Var] | Reason:
    """Nearest inputs and residuals to recompute `v` from, or why there are none."""
    todo, seen, sources = [v], {v}, []
    while todo:
        x = todo.pop()
        reason = obstacle(reading, x)
        if reason is not None:
            return reason
        for u in variables_in(reading.program.producers[x].invars):
            if u not in seen:
                seen.add(u)
                is_source = u in leaves or u not in reading.program.producers
                (sources if is_source else todo).append(u)
    return sources


def _replay(
    reading: Reading, recomputed: Collection[Var], stored: AbstractSet[Var]
) -> list[Replay]:
    """The equations that compute `recomputed` from `stored`, in program order."""
    todo, seen, needed = list(recomputed), set(recomputed), set()
    while todo:
        eqn = reading.program.producers[todo.pop()]
        needed.add(id(eqn))
        for x in variables_in(eqn.invars):
            if x not in seen and x not in stored:
                seen.add(x)
                todo.append(x)
    eqns = reading.forward.jaxpr.eqns
    return [Replay(eqn) for eqn in eqns if id(eqn) in needed]

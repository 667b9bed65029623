"""Values whose rounding a program magnifies, so that they stay exact."""

import functools

from jaxact._decision import Reason
from jaxact._form.affine_classes import Classes, classify
from jaxact._form.branches import outputs_in_branches
from jaxact._form.poles import bases_near_poles
from jaxact._form.short_norms import bases_in_short_norms
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Jaxpr, Predicate, Producers, Var


def ill_conditioned(
    jaxpr: Jaxpr, classes: Classes, producers: Producers, is_activation: Predicate
) -> dict[Var, Reason]:
    """Bases near a pole or in a norm over a few values, also inside of branches.

    Args:
      is_activation: whether a variable is made from more than parameters.
    """
    reasons = dict.fromkeys(bases_near_poles(jaxpr, classes), Reason.NEAR_POLE)
    short = bases_in_short_norms(jaxpr, classes, producers)
    reasons |= dict.fromkeys(short, Reason.SHORT_NORM)
    for reason in (Reason.NEAR_POLE, Reason.SHORT_NORM):
        search = functools.partial(_results_for, reason)
        inside = outputs_in_branches(jaxpr, is_activation, search)
        reasons |= dict.fromkeys(inside, reason)
    return reasons


def _results_for(reason: Reason, branch: Jaxpr, is_activation: Predicate) -> set[Var]:
    """A branch's results that are known once the values that `reason` is about are."""
    inputs = {v for v in branch.invars if is_activation(v)}
    classes = classify(branch, 0, is_activation, inputs)
    producers = {v: eqn for eqn in branch.eqns for v in eqn.outvars}
    reasons = ill_conditioned(branch, classes, producers, is_activation)
    kept = {v for v, own in reasons.items() if own is reason}
    if not kept:
        return set()
    known = classify(branch, 0, is_activation, inputs, kept)
    results = [v for v in branch.outvars if not is_literal(v)]
    return {v for v in results if known.is_exact(v) and not classes.is_exact(v)}

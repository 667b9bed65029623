"""Values whose rounding a program magnifies, so that they stay exact."""

from collections.abc import Sequence

from jaxact._decision import Reason
from jaxact._form.affine_classes import classify
from jaxact._form.chooser import Chooser
from jaxact._form.factors import bases_of_factors
from jaxact._form.inside import Inside, insides
from jaxact._form.poles import bases_near_poles, sources_of
from jaxact._form.short_norms import bases_in_short_norms
from jaxact._form.unlike_rows import bases_in_unlike_rows
from jaxact._jaxpr.flow import Facts, fact_of
from jaxact._jaxpr.types import Atom, Var


def ill_conditioned(
    chooser: Chooser, facts: Facts, needed: Sequence[Atom]
) -> dict[Var, Reason]:
    """Bases near a pole, in short norms, from factors, with unlike rows; also inside.

    Args:
      facts: which variables are made from more than parameters.
      needed: values that the backward pass reads.
    """
    jaxpr, classes, producers = chooser.jaxpr, chooser.classes, chooser.producers
    reasons = dict.fromkeys(bases_near_poles(jaxpr, classes), Reason.NEAR_POLE)
    short = bases_in_short_norms(jaxpr, classes, producers)
    reasons |= dict.fromkeys(short, Reason.SHORT_NORM)
    factors = bases_of_factors(jaxpr, classes, producers)
    reasons |= dict.fromkeys(factors, Reason.SOLVED_WITH)
    unlike = bases_in_unlike_rows(chooser, needed, reasons)
    reasons |= dict.fromkeys(unlike, Reason.UNLIKE_ROWS)
    for inside in insides(jaxpr, facts):
        reasons |= _outputs(inside)
    return reasons


def _outputs(inside: Inside) -> dict[Var, Reason]:
    """An equation's outputs that are known once such values inside it are."""
    program, facts = inside.program, inside.facts
    inputs = {v for v in program.invars if fact_of(facts, v)}
    classes = classify(program, 0, facts, inputs)
    producers = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    found = ill_conditioned(
        Chooser(program, classes, producers), facts, program.outvars
    )
    reasons: dict[Var, Reason] = {}
    for reason in dict.fromkeys(found.values()):
        kept = {v for v, own in found.items() if own is reason}
        if reason is Reason.NEAR_POLE:
            kept = kept.union(*(sources_of(v, classes, producers) for v in kept))
        known = classify(program, 0, facts, inputs, kept)
        for v, output in inside.outputs:
            if known.is_exact(v) and not classes.is_exact(v):
                reasons[output] = reason
    return reasons

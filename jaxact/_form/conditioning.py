"""Values whose rounding a program magnifies, so that they stay exact."""

from collections.abc import Collection, Sequence, Set

from jaxact._codec import Exact
from jaxact._decision import Reason
from jaxact._form.carried_divisors import bases_in_carried_divisors
from jaxact._form.chooser import Chooser
from jaxact._form.classes import Classes
from jaxact._form.classify import classify
from jaxact._form.complements import bases_in_complements
from jaxact._form.factors import bases_of_factors
from jaxact._form.inside import Inside, insides, scan_bodies
from jaxact._form.poles import (
    bases_near_poles,
    bases_returned,
    sources_behind,
    sources_of,
)
from jaxact._form.returned import unclipped
from jaxact._form.sample_slopes import bases_of_sample_slopes
from jaxact._form.short_norms import bases_in_short_norms
from jaxact._form.unlike_rows import bases_in_unlike_rows
from jaxact._form.weighted_scores import bases_of_weighted_scores
from jaxact._form.windows import bases_in_windows
from jaxact._jaxpr.flow import fact_of
from jaxact._jaxpr.links import Links
from jaxact._jaxpr.primitives import TRANSPARENT
from jaxact._jaxpr.types import Atom, Var
from jaxact._plan.mark import mark_p
from jaxact._plan.program import Program


def ill_conditioned(
    chooser: Chooser, needed: Sequence[Atom], links: Links
) -> dict[Var, Reason]:
    """Bases that stay exact because the program magnifies their rounding, and why.

    Also those that a program inside does so with.

    Args:
      needed: values that the backward pass reads.
      links: the program's.
    """
    program, classes = chooser.program, chooser.classes
    near_poles = bases_near_poles(chooser, links.carried)
    reasons: dict[Var, Reason] = {}
    for reason, bases in (  # a later one is told
        (Reason.RETURNED, bases_returned(chooser, links.results)),
        (Reason.NEAR_POLE, near_poles),
        (Reason.NEAR_POLE, bases_of_sample_slopes(chooser, near_poles)),
        (Reason.SHORT_NORM, bases_in_short_norms(chooser)),
        (Reason.COMPLEMENT, bases_in_complements(chooser)),
        (Reason.SOLVED_WITH, bases_of_factors(chooser)),
        (Reason.WEIGHTED, bases_of_weighted_scores(chooser, needed)),
        (Reason.UNLIKE_ROWS, bases_in_windows(chooser)),
        (Reason.DIVIDED_BY, bases_in_carried_divisors(chooser, links.carried)),
    ):
        reasons |= dict.fromkeys(bases, reason)
    unlike = bases_in_unlike_rows(chooser, needed, reasons)
    reasons |= dict.fromkeys(unlike, Reason.UNLIKE_ROWS)
    read = set(chooser.bases(needed))
    leaving = unclipped(links.results, program.producers)
    for inside in insides(program):
        own, found = _found_inside(inside, leaving)
        reasons |= _operands(inside, found, classes, read)
        reasons |= _outputs(inside, found, own)
    for body in scan_bodies(program):
        own, found = _found_inside(body, ())  # its own plan knows those
        known = _inputs_behind(body, found, own)
        carry = {output: known[v] for v, output in body.outputs if v in known}
        reasons |= _operands(body, known, classes, read) | carry
    return reasons


def kept_inside(chooser: Chooser) -> dict[Var, Reason]:
    """Bases behind operands that plans inside keep exact, and have marked.

    Nothing is stored for them outside, but slopes before them have to be exact, too.
    """
    reasons: dict[Var, Reason] = {}
    program, outer = chooser.program, chooser.classes
    for inside in (*insides(program), *scan_bodies(program)):
        operands, producers = dict(inside.inputs), inside.program.producers
        for eqn in inside.program.jaxpr.eqns:
            if eqn.primitive is not mark_p:
                continue
            decision, (v, *_) = eqn.params["decision"], eqn.invars
            while v in producers and producers[v].primitive.name in TRANSPARENT:
                v = producers[v].invars[producers[v].outvars.index(v)]
            base = outer.base.get(operands[v]) if v in operands else None
            if base is not None and isinstance(decision.action, Exact):
                reasons[base] = decision.reason
    return reasons


def _found_inside(
    inside: Inside, leaving: Collection[Var]
) -> tuple[Chooser, dict[Var, Reason]]:
    """The classes in a program inside, and such bases there.

    Args:
      leaving: outputs of the equation that leave the call.
    """
    program = inside.program
    own = Chooser(program, classify(program, 0, _inputs(program)))
    results = [v for v, output in inside.outputs if output in leaving]
    found = ill_conditioned(own, program.jaxpr.outvars, Links(inside.carried, results))
    return own, found | kept_inside(own)


def _inputs(program: Program) -> set[Var]:
    return {v for v in program.jaxpr.invars if fact_of(program.facts, v)}


def _operands(
    inside: Inside, found: dict[Var, Reason], outer: Classes, read: Set[Var]
) -> dict[Var, Reason]:
    """Bases behind an equation's operands that are such values inside it.

    Args:
      read: bases that the backward pass reads.
    """
    bases = {v: outer.base.get(operand) for v, operand in inside.inputs}
    return {
        base: found[v]
        for v, base in bases.items()
        if v in found and base is not None and base in read
    }


def _inputs_behind(
    body: Inside, found: dict[Var, Reason], own: Chooser
) -> dict[Var, Reason]:
    """Inputs that a scan's body takes for exact, to have `found` exactly.

    One that is found itself, or that meets nothing but constants on the way there: to
    the body's own plan a state plus an encoder's output depends on the state alone. All
    others it stores itself.
    """
    inputs = _inputs(body.program)
    known: dict[Var, Reason] = {}
    for v, reason in found.items():
        sources = sources_behind(v, own)
        others = sources - body.constants
        if v in inputs or (others < sources <= inputs and len(others) <= 1):
            known |= dict.fromkeys(sources, reason)
    return known


def _outputs(
    inside: Inside, found: dict[Var, Reason], own: Chooser
) -> dict[Var, Reason]:
    """An equation's outputs that are known once such values inside it are."""
    program, classes = inside.program, own.classes
    reasons: dict[Var, Reason] = {}
    for reason in dict.fromkeys(found.values()):
        kept = {v for v, its in found.items() if its is reason}
        if reason is Reason.NEAR_POLE:
            kept = kept.union(*(sources_of(v, own) for v in kept))
        known = classify(program, 0, _inputs(program), kept)
        for v, output in inside.outputs:
            if known.is_exact(v) and not classes.is_exact(v):
                reasons[output] = reason
    return reasons

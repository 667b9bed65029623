"""Values above zero that a call returns: probabilities, deviations, rates.

A loss outside takes their logarithm, or divides by them, and the slope meets their own
again: with -log(p[label]) of a classifier that returns its softmax, a gradient at 8
bits had 0.8 times its own size in noise, and at 4 bits 5 times.
"""

from collections.abc import Mapping, Sequence

from jaxact._form.intervals import Interval, interval_of, intervals_in
from jaxact._form.pole_arguments import MARGIN, adds_few, is_mixture, is_scaling
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import equations_behind, variables_in
from jaxact._jaxpr.types import Eqn, Producers, Var
from jaxact._plan.program import Program

_CLIPS = frozenset("max min clamp".split())


def values_returned(program: Program, results: Sequence[Var]) -> set[Var]:
    """Values that results above zero are made from, scaled and added."""
    if not results:
        return set()
    intervals, producers = intervals_in(program), program.producers
    found: set[Var] = set()

    def is_followed(eqn: Eqn) -> bool:
        name, operands = eqn.primitive.name, variables_in(eqn.invars)
        if name == "reduce_sum":
            return adds_few(eqn) and _is_above_zero(operands[0], intervals)
        # A gate of a ReLU is part of an activation.
        makers = (producers.get(x) for x in operands if name == "mul")
        is_gate = any(e is not None and e.primitive.name == "max" for e in makers)
        return (is_scaling(eqn) and not is_gate) or is_mixture(eqn, intervals)

    for v in unclipped(results, producers):
        if _is_above_zero(v, intervals):
            made = equations_behind(v, producers, is_followed)
            found = found.union([v], *(variables_in(eqn.invars) for eqn in made))
    return found


def unclipped(results: Sequence[Var], producers: Producers) -> list[Var]:
    """The values that are clipped between numbers, as probabilities are, or moved."""
    return [_unclipped(v, producers) for v in results]


def _unclipped(v: Var, producers: Producers) -> Var:
    while (eqn := producers.get(v)) and eqn.primitive.name in _CLIPS | MOVES:
        operands = variables_in(eqn.invars)
        if len(operands) != 1:
            break
        (v,) = operands
    return v


def _is_above_zero(v: Var, intervals: Mapping[Var, Interval]) -> bool:
    """Whether it is known to be, and may come near."""
    lo, hi = interval_of(v, intervals)
    return 0 <= lo < MARGIN and hi > 0

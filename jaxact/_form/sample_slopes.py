"""Slopes of a gamma sample in the distribution's shape a, before a pole.

A logarithmic sample's grow as 1 / a^2, and those of the smallest samples are the
largest. A Dirichlet's or a beta's sample multiplies each with itself: rounded in
groups, the small slopes that are left had noise of 0.6 gradients at 8 bits for a > 0.1,
and 7 for softplus(z). Others' fall to 0 with the sample, which Student's t divides by:
0.4 gradients for a > 0.25.
"""

from collections.abc import Collection, Set

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import is_log_gamma
from jaxact._jaxpr.read import is_float, variables_in
from jaxact._jaxpr.types import Var


def bases_of_sample_slopes(chooser: Chooser, near_poles: Set[Var]) -> set[Var]:
    """Bases that are made from a sample and its distribution's shape alone.

    Args:
      near_poles: bases that come near one.
    """
    classes, found = chooser.classes, set[Var]()
    for eqn in chooser.jaxpr.eqns:
        is_draw = eqn.primitive.name == "random_gamma"
        if is_log_gamma(eqn) or (is_draw and eqn.outvars[0] in near_poles):
            sources = variables_in([eqn.invars[1], eqn.outvars[0]])
            found |= _made_from_all(chooser, sources)
    return {classes.whole_base(v) for v in found if not classes.is_exact(v)}


def _made_from_all(chooser: Chooser, sources: Collection[Var]) -> set[Var]:
    """Floating values that have all `sources` behind them and no inexact other."""
    behind, is_exact = {v: {v} for v in sources}, chooser.classes.is_exact
    for eqn in chooser.jaxpr.eqns:
        inputs = [v for v in variables_in(eqn.invars) if not is_exact(v)]
        known = [behind[v] for v in variables_in(eqn.invars) if v in behind]
        if known and all(v in behind for v in inputs):
            for v in eqn.outvars:
                behind.setdefault(v, set().union(*known))
    return {v for v, own in behind.items() if len(own) > 1 and is_float(v)}

"""Sources that stay exact so that a cell keeps apart what a pole's function multiplies.

In h * sqrt(1 - exp(-2 a)), a = sigmoid(x @ A) * softplus(l), the input of a real-gated
linear recurrent unit (De et al. 2024, arXiv:2402.19427), the slope in softplus(l) is
large where that is small, and meets softplus's own slope, which is small there, after a
sum over rows: rounded, it erred by 0.6 gradients at 8 bits. With x @ A exact it is a
multiple of h, which has no such noise.
"""

from collections.abc import Collection

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import arguments_near_poles
from jaxact._form.poles import sources_behind, sources_of
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import (
    equations_behind,
    is_cheap,
    is_elementwise,
    variables_in,
)
from jaxact._jaxpr.types import Predicate, Producers, Var


def sources_of_scaled_poles(chooser: Chooser, changed: Collection[Var]) -> set[Var]:
    """The sources of arguments near a pole whose function multiplies other values.

    Where a slope in such an argument meets another factor after a sum.

    Args:
      changed: variables that need a gradient.
    """
    is_changed = lambda u: u in changed
    found: set[Var] = set()
    for v in arguments_near_poles(chooser.program).bounded:
        is_exact = chooser.classes.is_exact(v)
        if is_exact or not has_function_of_fewer(v, chooser.producers, is_changed):
            continue
        sources = sources_of(v, chooser)
        if _is_multiplied(v, sources, chooser):
            found |= sources
    return found


def has_function_of_fewer(v: Var, producers: Producers, is_counted: Predicate) -> bool:
    """Whether `v` is made from a function of fewer values, which has its own slope."""
    fewer = {
        u
        for eqn in equations_behind(v, producers, is_cheap)
        for u in variables_in(eqn.invars)
        if u.aval.size < v.aval.size and u in producers and is_counted(u)
    }
    return any(producers[u].primitive.name not in MOVES for u in fewer)


def _is_multiplied(v: Var, sources: set[Var], chooser: Chooser) -> bool:
    """Whether an elementwise function of `v` multiplies a value with more sources."""
    functions, is_exact = {v}, chooser.classes.is_exact
    for eqn in chooser.jaxpr.eqns:
        inputs = [u for u in variables_in(eqn.invars) if not is_exact(u)]
        if functions.isdisjoint(inputs) or not is_elementwise(eqn):
            continue
        others = [u for u in inputs if u not in functions]
        if all(sources_behind(u, chooser) <= sources for u in others):
            functions.update(eqn.outvars)
        elif eqn.primitive.name == "mul":
            return True
    return False

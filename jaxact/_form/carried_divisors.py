"""States of a loop that its steps divide by products with themselves.

Sinkhorn's scaling vectors u = a / (K @ v) and v = a / (K.T @ u); a particle filter's
weights w p(x) / sum(w p(x)). A small element is as important there as a large one: the
next step's K, or likelihood, is large where it is small. Rounded among larger ones, the
noise was 3 gradients at 8 bits for both. So the states and the divisors stay exact.
They are small beside the matrix, or the particles.

A state that is divided by its own sum alone, as Sinkhorn's matrix, is stored over that.
"""

from collections.abc import Mapping

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import pole_in
from jaxact._jaxpr.primitives import BARRIERS, SELECTIONS, SUMS
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.types import Atom, Eqn, Producers, Var

_PRODUCTS = frozenset(["mul", "dot_general"])
# Results that are small where an operand is.
_SCALED = (
    SUMS | SELECTIONS | _PRODUCTS | frozenset("div integer_pow max reduce_sum".split())
)


def bases_in_carried_divisors(
    chooser: Chooser, carried: Mapping[Var, Atom]
) -> set[Var]:
    """Bases of such states, and of the divisors.

    Args:
      carried: in a scan's body, the output of the step before that an input is.
    """
    classes, producers, found = chooser.classes, chooser.producers, set[Var]()
    for eqn in chooser.jaxpr.eqns if carried else ():
        divisor, _ = pole_in(eqn)
        if eqn.primitive.name not in ("div", "integer_pow") or divisor is None:
            continue
        behind = _behind(divisor, producers, carried)
        if behind.isdisjoint(eqn.outvars):
            continue
        states = {
            v
            for v in behind.intersection(carried)
            if not _behind(v, producers, carried).isdisjoint(eqn.outvars)
        }
        if any(_is_product(producers[v]) for v in behind & producers.keys()):
            found |= {divisor, *states}
    return {classes.whole_base(v) for v in found if not classes.is_exact(v)}


def _behind(value: Var, producers: Producers, carried: Mapping[Var, Atom]) -> set[Var]:
    """Values that one is made from by scaling and adding, in earlier steps too."""
    todo, seen = [value], {value}
    while todo:
        v = todo.pop()
        eqn = producers.get(v)
        inputs = variables_in([carried[v]]) if v in carried else []
        if eqn is not None and eqn.primitive.name in BARRIERS:
            inputs = variables_in([eqn.invars[eqn.outvars.index(v)]])
        elif eqn is not None and eqn.primitive.name in _SCALED:
            inputs = variables_in(eqn.invars)
        new = [u for u in inputs if u not in seen]
        todo += new
        seen.update(new)
    return seen


def _is_product(eqn: Eqn) -> bool:
    """Whether it multiplies two arrays."""
    arrays = [v for v in variables_in(eqn.invars) if v.aval.size > 1]
    return eqn.primitive.name in _PRODUCTS and len(arrays) > 1

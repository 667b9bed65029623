"""Norms over a few values: BatchNorm with four rows, a unit vector with two elements.

A norm's gradient is what remains of the cotangent beside the normalized value's own
direction. With few values little remains, and where they lie close together the inverse
deviation is large, and so is the noise. The values that such a norm is taken from stay
exact. So do those in deviations over a graph's neighbours (Corso et al. 2020,
arXiv:2004.05718), as some nodes have one: the noise was 0.2 gradients at 8 bits.
"""

from collections.abc import Sequence

from jaxact._form.chooser import Chooser
from jaxact._jaxpr.primitives import REDUCTIONS, SCATTERS
from jaxact._jaxpr.read import is_literal, is_square, keeps_elements, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Producers, Var

# Error of one draw over the gradient, for BatchNorm of a product at 8 bits: 2600 over 2
# values, 0.05 over 3, 0.02 over 4, 0.011 over 5 and 0.009 over 8 to 32.
FEW = 4
# In the mean over segments, many of which are shorter.
_FEW_IN_SEGMENTS = 4 * FEW
_ROOTS = frozenset(["sqrt", "rsqrt", "pow"])


def bases_in_short_norms(chooser: Chooser) -> set[Var]:
    """Bases that a root of a sum over a few values is computed from."""
    summed: dict[Var, set[Atom]] = {}
    bases: set[Var] = set()
    for eqn in chooser.jaxpr.eqns:
        operands = {x for v in variables_in(eqn.invars) for x in summed.get(v, ())}
        if _is_short(eqn):
            operands.add(eqn.invars[0])
        elif _adds_squares(eqn, chooser.producers):
            operands.add(eqn.invars[-1])
        elif not keeps_elements(eqn):
            continue
        if operands:
            summed.update((v, operands) for v in eqn.outvars)
        if eqn.primitive.name in _ROOTS:
            for x in operands:
                bases |= bases_behind(x, chooser)
    return bases


def _is_short(eqn: Eqn) -> bool:
    """Whether each result is reduced from a few elements."""
    if eqn.primitive.name not in REDUCTIONS or is_literal(eqn.invars[0]):
        return False
    size, results = eqn.invars[0].aval.size, eqn.outvars[0].aval.size
    return results < size <= FEW * results


def _adds_squares(eqn: Eqn, producers: Producers) -> bool:
    """Whether it adds squares by segments, a few to each in the mean.

    Not sums that are squared: a vector's length has few values by itself.
    """
    if eqn.primitive.name not in SCATTERS or is_literal(eqn.invars[-1]):
        return False
    squares = producers.get(eqn.invars[-1])
    size = eqn.outvars[0].aval.size
    return (
        squares is not None
        and is_square(squares)
        and squares.outvars[0].aval.size <= _FEW_IN_SEGMENTS * size
    )


def bases_behind(x: Atom, chooser: Chooser) -> set[Var]:
    """The base of a value, and of those that it is a square or a power of."""

    def operands(eqn: Eqn) -> Sequence[Var]:
        inputs = variables_in(eqn.invars)
        # More than one: a residual join, where other values begin.
        is_function = keeps_elements(eqn) and len(chooser.bases(inputs)) == 1
        return inputs if is_function else ()

    return chooser.bases_behind(x, operands)

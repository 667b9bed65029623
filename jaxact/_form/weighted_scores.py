"""Scores that are weighted by their own exponentials: a distribution's entropy.

The slope of -sum(p log p) in a score z is p times its distance from the mean of all.
Where a few weights are large, scores differ most beside the smallest: both roundings,
by the range of a row, are multiplied with the other's range. At 8 bits the entropy of
64 scores with deviation 3 had 0.06 gradients of noise, a discrete actor's loss (soft
actor-critic, Christodoulou 2019, arXiv:1910.07207, eq. 13) 0.05, and 17 times as much
at 4 bits. Exact, the scores are stored alone: their exponentials are computed again.
"""

from collections.abc import Iterable

from jaxact._form.chooser import Chooser
from jaxact._jaxpr.primitives import EXPONENTIALS, MATMULS, MOVES, SUMS
from jaxact._jaxpr.read import (
    contracts,
    equations_behind,
    is_literal,
    keeps_elements,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Var

# From an exponential to a weight.
_WEIGHTING = MOVES | {"mul", "div"}


def bases_of_weighted_scores(chooser: Chooser, needed: Iterable[Atom]) -> set[Var]:
    """Bases of scores that meet their own exponentials in a product.

    And of all that is added to them there, another distribution's logarithms, if the
    backward pass reads the sum: not where a teacher's weights are constants.

    Args:
      needed: values that the backward pass reads.
    """
    if not chooser.classes.exponentials:
        return set()
    weights = _weights(chooser)
    read = _read(chooser, needed)
    found: set[Var] = set()
    for eqn in chooser.jaxpr.eqns:
        operands = variables_in(eqn.invars)
        scores = {weights[v] for v in operands if v in weights}
        is_product = eqn.primitive.name in MATMULS and contracts(eqn)
        if not scores or not (is_product or eqn.primitive.name == "mul"):
            continue
        for v in (v for v in operands if v not in weights):
            terms = _terms(v, chooser)
            is_read = terms <= scores or chooser.classes.base[v] in read
            if is_read and not scores.isdisjoint(terms):
                found |= scores | terms
    return found


def _read(chooser: Chooser, needed: Iterable[Atom]) -> set[Var]:
    """Bases that the backward pass reads, also by way of a local derivative.

    That of exp(a) (a - b) in a has the difference in it.
    """
    bases = chooser.bases(needed)
    behind = (
        v
        for base in bases
        for eqn in equations_behind(base, chooser.producers, keeps_elements)
        for v in variables_in(eqn.invars)
        if not chooser.classes.is_exact(v)
    )
    return {*bases, *(chooser.classes.base[v] for v in behind)}


def _weights(chooser: Chooser) -> dict[Var, Var]:
    """The base of the scores of each value that is a distribution over a row."""
    jaxpr, classes = chooser.jaxpr, chooser.classes
    readers = chooser.program.readers
    weights: dict[Var, Var] = {}
    constant: set[Atom] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = [v for v in eqn.invars if not classes.is_exact(v)]
        if operands and (name == "stop_gradient" or constant.issuperset(operands)):
            constant.update(eqn.outvars)
        elif len(operands) == len(eqn.outvars) == 1:
            (v,), (out,) = operands, eqn.outvars
            if name in EXPONENTIALS:
                names = {e.primitive.name for e in readers.get(out, ())}
                if "reduce_sum" in names or _is_shifted(v, chooser):
                    weights[out] = classes.base[v]
            elif name in _WEIGHTING and v in weights and v is eqn.invars[0]:
                weights[out] = weights[v]
    return weights


def _is_shifted(v: Atom, chooser: Chooser) -> bool:
    """Whether a statistic is added or taken off: the logarithm of a row's sum.

    Or those of rows and columns, and the sum is scaled: optimal transport.
    """
    eqn = chooser.producers.get(v)
    if eqn is None:
        return False
    if eqn.primitive.name in ("mul", "div") and is_literal(eqn.invars[1]):
        return _is_shifted(eqn.invars[0], chooser)
    operands = variables_in(eqn.invars) if eqn.primitive.name in ("add", "sub") else []
    return any(map(chooser.classes.is_exact, operands))


def _terms(v: Atom, chooser: Chooser) -> set[Var]:
    """The bases that a value is a sum of."""
    terms = lambda eqn: eqn.invars if eqn.primitive.name in SUMS else ()
    return chooser.bases_behind(v, terms)

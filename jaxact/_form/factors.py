"""Values that a matrix's factors make, and the matrix where it is multiplied with them.

The derivative of a factorization divides by differences between singular values, and
that of a pseudo-inverse p has p p' da' - (p p' da') a p, which is zero for an a of full
rank. Rounded apart, the factors and values made from them leave errors that this
magnifies: at 8 bits the gradient of `svd` had 2 times and that of `pinv` 18 times its
own size in noise. Exact they cancel as they do without rounding.
"""

from jaxact._form.chooser import Chooser
from jaxact._form.poles import sources_behind
from jaxact._jaxpr.primitives import CHEAP, FACTORIZATIONS, MATMULS
from jaxact._jaxpr.read import names_inside, variables_in
from jaxact._jaxpr.types import Eqn, Var


def bases_of_factors(chooser: Chooser) -> set[Var]:
    """Bases in which a value is affine that comes from one factorization alone."""
    classes = chooser.classes
    behind: list[set[Var]] = []  # each factorized matrix
    made: dict[Var, int] = {}  # by which factorization
    matrices: set[Var] = set()
    for eqn in chooser.jaxpr.eqns:
        operands = variables_in(eqn.invars)
        if _factorizes(eqn):
            made.update(dict.fromkeys(eqn.outvars, len(behind)))
            behind.append(sources_behind(eqn.invars[0], chooser))
        elif eqn.primitive.name in CHEAP | MATMULS:
            numbers = {made[v] for v in operands if v in made}
            if len(numbers) != 1:
                continue
            (number,) = numbers
            others = [v for v in operands if v not in made and not classes.is_exact(v)]
            if all(sources_behind(v, chooser) <= behind[number] for v in others):
                made.update(dict.fromkeys(eqn.outvars, number))
                matrices.update(others)
    values = [v for v in (*made, *matrices) if not classes.is_exact(v)]
    return {classes.whole_base(v) for v in values}


def _factorizes(eqn: Eqn) -> bool:
    if eqn.primitive.name == "custom_jvp_call":
        return not FACTORIZATIONS.isdisjoint(names_inside(eqn))
    return eqn.primitive.name in FACTORIZATIONS

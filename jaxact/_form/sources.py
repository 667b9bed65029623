"""Sources that stay exact in place of an argument near a pole.

Where another value to store is computed from them alone, the pole magnifies its noise:
the slope 1 / b meets another one that vanishes with b, and where a mask is zero, its
neighbours' noise is all that is left. With the sources exact, both are, and
cost nothing. One derivative for log(softplus(x @ w) + 1e-3) meets no other factor: it
goes to a matrix product alone.

Where others are in it too, as q in q / (p + 1e-8), the derivative of q log(p + 1e-8), p
is exact and that has the noise of its largest elements, 1e8 of q's, which softmax
multiplies with p again (1e3 gradients at 8 bits). With q exact too it has none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import (
    SMALL_NEAR_POLES,
    arguments_near_poles,
    pole_in,
)
from jaxact._form.poles import sources_behind, sources_of
from jaxact._jaxpr.primitives import CHEAP, MATMULS, SELECTIONS
from jaxact._jaxpr.read import (
    equations_behind,
    is_literal,
    programs_in,
    variables_in,
)
from jaxact._jaxpr.types import Eqn, Var
from jaxact._plan.forward import Forward

_PRODUCTS = frozenset("mul div select_n".split())


def sources_near_poles(
    forward: Forward, chooser: Chooser, leaves: Sequence[Var], arguments: Iterable[Var]
) -> set[Var]:
    """Bases that are better exact than arguments or slopes computed from them.

    Args:
      leaves: the residuals.
      arguments: bases near a pole, which stay exact.
    """
    classes, producers = chooser.classes, chooser.producers
    stored = chooser.choose(leaves)
    kept, _ = chooser.derive(leaves, stored)
    magnified = set(chooser.bases(_multiplied_with_others(forward)))
    slopes = _near_poles(forward, chooser, magnified.intersection(stored))
    found: set[Var] = set()
    for v in arguments:
        sources = sources_of(v, classes, producers)
        noisy = stored if v in kept else magnified
        if any(sources_behind(x, classes, producers) <= sources for x in noisy):
            found |= sources
    for v in slopes:  # from a network's output, or its parts: a mixture's deviations
        whole = sources_of(v, classes, producers)
        found |= whole or sources_of(v, classes, producers, CHEAP - SELECTIONS)
    return found


def _near_poles(
    forward: Forward, chooser: Chooser, slopes: Collection[Var]
) -> list[Var]:
    """Those among `slopes` that exact arguments make large: q / (p + 1e-8)."""
    if not slopes:
        return []
    near = arguments_near_poles(forward.jaxpr)
    exact = chooser.classes.spared.intersection([*near.bounded, *near.others])
    return [
        v
        for v in slopes
        if any(
            pole_in(eqn)[0] in exact and eqn.primitive.name not in SMALL_NEAR_POLES
            for eqn in equations_behind(v, chooser.producers, _is_cheap)
        )
    ]


def _is_cheap(eqn: Eqn) -> bool:
    return eqn.primitive.name in CHEAP


def _multiplied_with_others(forward: Forward) -> list[Var]:
    """Residuals that a cotangent is multiplied with among others, or may be.

    With no sum between, such as a matrix product has.
    """
    readers: dict[Var, list[Eqn]] = {}
    makers: dict[Var, list[Eqn]] = {}
    for eqn in forward.used_backward:
        for v in variables_in(eqn.invars):
            readers.setdefault(v, []).append(eqn)
        makers.update(dict.fromkeys(eqn.outvars, [eqn]))

    def is_multiplied(residual: Var) -> bool:
        products = readers.get(residual, ())
        after = [v for eqn in products for v in eqn.outvars]
        before = [v for eqn in products for v in variables_in(eqn.invars)]
        return _meets_product(after, readers, True) or _meets_product(
            before, makers, False
        )

    pairs = zip(forward.residuals, forward.backward.residuals, strict=True)
    return [
        v
        for v, own in pairs
        if not (is_literal(v) or is_literal(own)) and is_multiplied(own)
    ]


def _meets_product(
    variables: Sequence[Var], equations: Mapping[Var, Sequence[Eqn]], is_after: bool
) -> bool:
    """Whether values meet a product or a mask before a matrix product.

    Args:
      equations: that read each variable, or that make it.
    """
    todo, seen = list(variables), set(variables)
    while todo:
        for eqn in equations.get(todo.pop(), ()):
            name, inputs = eqn.primitive.name, variables_in(eqn.invars)
            arrays = [v for v in inputs if v.aval.size > 1]
            if programs_in(eqn) or (name in _PRODUCTS and len(arrays) > 1):
                return True
            new = [] if name in MATMULS else eqn.outvars if is_after else inputs
            todo += [v for v in new if v not in seen]
            seen.update(new)
    return False

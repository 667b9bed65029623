"""Products that residuals meet in the backward program before a matrix product."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxact._jaxpr.primitives import MATMULS
from jaxact._jaxpr.read import contracts, is_literal, programs_in, variables_in
from jaxact._jaxpr.types import Eqn, Var
from jaxact._plan.reading import Reading

_PRODUCTS = frozenset("mul div select_n".split())


@dataclass(frozen=True, eq=False)
class Products:
    """Where a cotangent is multiplied with a residual, and with another factor too.

    With no sum between, such as a matrix product has.
    """

    reading: Reading

    def with_others(self) -> list[Var]:
        """Residuals for which another factor comes before or after, or a mask."""
        return [
            v
            for v, own in self._residuals()
            if self._meets_before(own) or self._meets_after(own)
        ]

    def after_others(self) -> list[Var]:
        """Residuals that a cotangent is multiplied with after another factor.

        Each element alone: no product that sums, as a matrix product does.
        """
        return [v for v, own in self._residuals() if self._meets_before(own, True)]

    def _residuals(self) -> Iterator[tuple[Var, Var]]:
        """The residuals, in the forward and in the backward program."""
        forward = self.reading.forward
        pairs = zip(forward.residuals, forward.backward.residuals, strict=True)
        for v, own in pairs:
            if not (is_literal(v) or is_literal(own)):
                yield v, own

    @functools.cached_property
    def _readers(self) -> dict[Var, list[Eqn]]:
        readers: dict[Var, list[Eqn]] = {}
        for eqn in self.reading.forward.used_backward:
            for v in variables_in(eqn.invars):
                readers.setdefault(v, []).append(eqn)
        return readers

    @functools.cached_property
    def _makers(self) -> dict[Var, list[Eqn]]:
        equations = self.reading.forward.used_backward
        return {v: [eqn] for eqn in equations for v in eqn.outvars}

    def _meets_before(self, own: Var, is_alone: bool = False) -> bool:
        products = self._readers.get(own, ())
        if is_alone:
            products = [eqn for eqn in products if not _sums(eqn)]
        inputs = [v for eqn in products for v in variables_in(eqn.invars)]
        return _meets_product(inputs, self._makers, False)

    def _meets_after(self, own: Var) -> bool:
        outputs = [v for eqn in self._readers.get(own, ()) for v in eqn.outvars]
        return _meets_product(outputs, self._readers, True)


def _sums(eqn: Eqn) -> bool:
    return eqn.primitive.name in MATMULS and contracts(eqn)


def _meets_product(
    variables: Sequence[Var],
    equations: Mapping[Var, Sequence[Eqn]],
    is_after: bool,
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

"""Products that residuals meet in the backward program before a matrix product."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxact._jaxpr.primitives import MATMULS
from jaxact._jaxpr.read import (
    contracts,
    programs_in,
    readers_of,
    variables_in,
)
from jaxact._jaxpr.types import Eqn, Var
from jaxact._plan.reading import Reading

_Test: TypeAlias = Callable[[Eqn], bool]
_MULTIPLYING = frozenset("mul div select_n".split())


@dataclass(frozen=True, eq=False)
class BackwardProducts:
    """Where a cotangent is multiplied with a residual, and with another factor too.

    With no sum between, such as a matrix product has.
    """

    reading: Reading

    def with_others(self) -> list[Var]:
        """Residuals for which another factor comes before or after, or a mask.

        After a program inside a factor may come in the program around it.
        """
        return [
            v
            for v, own in self.reading.forward.residual_pairs
            if self._is_before(self._readers.get(own, ()), _is_product)
            or self._is_after(self._readers.get(own, ()), _is_product)
            or (self.reading.is_inside and self._leaves(own))
        ]

    def _leaves(self, own: Var) -> bool:
        """Whether a gradient of as many elements is a multiple of it."""
        found = variables_in(self.reading.forward.backward.gradients)
        ends = {v for v in found if v.aval.size == own.aval.size}
        is_end = lambda eqn: not ends.isdisjoint(eqn.outvars)
        return _is_met([own], self._readers, is_end, True)

    def after(self, sources: Collection[Var], among: Collection[Var]) -> list[Var]:
        """Residuals for which a factor that is computed from `sources` comes before.

        Each element alone: no product that sums, as a matrix product does. And not all
        elements of a group alike, as a number for each index along axis 0 does.

        Args:
          among: the residuals to look at.
        """
        forward = self.reading.forward
        computed = _computed_from(sources, forward.jaxpr.eqns)
        owns = {own for v, own in self.reading.forward.residual_pairs if v in computed}
        factors = _computed_from(owns, forward.used_backward)

        def follows(v: Var, own: Var) -> bool:
            alike = v.aval.shape[0] if len(v.aval.shape) > 1 else 1
            products = [eqn for eqn in self._readers.get(own, ()) if not _sums(eqn)]
            return self._is_before(
                products,
                lambda eqn: (
                    _is_product(eqn, alike)
                    and not factors.isdisjoint(variables_in(eqn.invars))
                ),
            )

        return [
            v
            for v, own in self.reading.forward.residual_pairs
            if v in among and follows(v, own)
        ]

    @functools.cached_property
    def _readers(self) -> dict[Var, list[Eqn]]:
        return readers_of(self.reading.forward.used_backward)

    @functools.cached_property
    def _makers(self) -> dict[Var, list[Eqn]]:
        equations = self.reading.forward.used_backward
        return {v: [eqn] for eqn in equations for v in eqn.outvars}

    def _is_before(self, eqns: Sequence[Eqn], is_found: _Test) -> bool:
        inputs = [v for eqn in eqns for v in variables_in(eqn.invars)]
        return _is_met(inputs, self._makers, is_found, False)

    def _is_after(self, eqns: Sequence[Eqn], is_found: _Test) -> bool:
        outputs = [v for eqn in eqns for v in eqn.outvars]
        return _is_met(outputs, self._readers, is_found, True)


def _computed_from(sources: Collection[Var], equations: Sequence[Eqn]) -> set[Var]:
    """Variables with any of these sources, and the sources."""
    found = set(sources)
    for eqn in equations:
        if not found.isdisjoint(variables_in(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _sums(eqn: Eqn) -> bool:
    return eqn.primitive.name in MATMULS and contracts(eqn)


def _is_product(eqn: Eqn, alike: int = 1) -> bool:
    """Whether it multiplies arrays, or selects by one, or may do.

    Args:
      alike: arrays with no more elements do not count.
    """
    arrays = [v for v in variables_in(eqn.invars) if v.aval.size > alike]
    is_product = eqn.primitive.name in _MULTIPLYING and len(arrays) > 1
    return is_product or bool(programs_in(eqn))


def _is_met(
    variables: Sequence[Var],
    equations: Mapping[Var, Sequence[Eqn]],
    is_found: _Test,
    is_after: bool,
) -> bool:
    """Whether values meet such an equation before a matrix product.

    Args:
      equations: that read each variable, or that make it.
    """
    todo, seen = list(variables), set(variables)
    while todo:
        for eqn in equations.get(todo.pop(), ()):
            if is_found(eqn):
                return True
            is_end = eqn.primitive.name in MATMULS
            new = eqn.outvars if is_after else variables_in(eqn.invars)
            new = [v for v in new if v not in seen and not is_end]
            todo += new
            seen.update(new)
    return False

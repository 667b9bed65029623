"""Values of which only the elements that a mask keeps are needed.

A decay exp(g_i - g_j) is e^45 above the diagonal, where a mask sets it to zero: in one
group with such elements all others are lost (8 gradients at 8 bits, in a gated linear
attention). Masked, it is what the forward pass goes on with, and what the derivative
needs: the cotangent is masked too.
"""

import dataclasses
from collections.abc import Sequence

from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.rewrite import new_equation, new_variable, rename, with_outputs
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.forward import Forward


@dataclasses.dataclass(frozen=True, eq=False)
class Masks:
    """Variables in a program that are known to have no elements but 0 and 1.

    Attributes:
      zeros: with zeros alone.
      numbers: made from bools, or by a selection from zeros and ones.
    """

    zeros: set[Var] = dataclasses.field(default_factory=set)
    numbers: set[Var] = dataclasses.field(default_factory=set)

    def note(self, eqn: Eqn) -> None:
        """Learn about an equation's result from its operands."""
        name, inputs = eqn.primitive.name, eqn.invars
        if name in MOVES:
            is_zero, is_number = self._is_zero(inputs[0]), self._is_number(inputs[0])
        else:
            is_zero = False
            is_number = name == "select_n" and all(map(self._is_number, inputs[1:]))
        if is_zero:
            self.zeros.update(eqn.outvars)
        if is_number:
            self.numbers.update(eqn.outvars)

    def masked_by(self, eqn: Eqn) -> Var | None:
        """The operand that is zero in the result where a mask is; None without one."""
        inputs = eqn.invars
        if eqn.primitive.name == "select_n" and len(inputs) == 3:
            pairs, masks = (inputs[1:], inputs[:0:-1]), self._is_zero
        elif eqn.primitive.name == "mul" and not any(map(is_literal, inputs)):
            pairs, masks = (inputs, inputs[::-1]), self._is_number
        else:
            return None
        shape = eqn.outvars[0].aval.shape
        for x, other in pairs:
            if masks(other) and not is_literal(x) and x.aval.shape == shape:
                return x
        return None

    def _is_zero(self, x: Atom) -> bool:
        return not x.val if is_literal(x) else x in self.zeros

    def _is_number(self, x: Atom) -> bool:
        if is_literal(x):
            return x.val in (0, 1)
        return x.aval.dtype == bool or x in self.numbers


def with_masked(forward: Forward) -> Forward:
    """A forward program with masked exponentials, where backward needs no others.

    Wherever one is multiplied with a cotangent that the mask sets to zero as well.
    """
    eqns, masked = list(forward.jaxpr.eqns), dict[Var, Atom]()
    maskings, exponentials = _maskings(eqns), _exponentials(eqns)
    for v, masks in _masks_of_residuals(forward).items():
        alike = [
            (x, eqn)
            for mask in masks
            for x, eqn in maskings.get(mask, ())
            if (x.aval.shape, x.aval.dtype) == (v.aval.shape, v.aval.dtype)
        ]
        if v not in exponentials or not alike:
            continue
        x, eqn = next((pair for pair in alike if pair[0] is v), alike[0])
        if x is not v:
            inputs = [v if u is x else u for u in eqn.invars]
            out = new_variable(v.aval)
            eqn = new_equation(eqn, eqn.primitive, inputs, [out], eqn.params)
            eqns.append(eqn)
        masked[v] = eqn.outvars[0]
    outputs = forward.jaxpr.outvars[: forward.num_outputs]
    residuals = [rename(v, masked) for v in forward.residuals]
    jaxpr = with_outputs(forward.jaxpr, eqns, [*outputs, *residuals])
    return dataclasses.replace(forward, jaxpr=jaxpr)


def _exponentials(eqns: Sequence[Eqn]) -> set[Var]:
    return {v for e in eqns if e.primitive.name in EXPONENTIALS for v in e.outvars}


def _maskings(eqns: Sequence[Eqn]) -> dict[Var, list[tuple[Var, Eqn]]]:
    """For each mask the operands that it sets to zero, and the equations that do."""
    masks, found = Masks(), dict[Var, list[tuple[Var, Eqn]]]()
    for eqn in eqns:
        masks.note(eqn)
        x = masks.masked_by(eqn)
        mask = None if x is None else _mask_of(eqn, x)
        if x is not None and mask is not None:
            found.setdefault(mask, []).append((x, eqn))
    return found


def _mask_of(eqn: Eqn, operand: Var) -> Var | None:
    """What an equation masks its operand with."""
    others = variables_in(eqn.invars[:1] if eqn.primitive.name == "select_n" else ())
    if eqn.primitive.name == "mul":
        others = [v for v in variables_in(eqn.invars) if v is not operand]
    return others[0] if others else None


def _masks_of_residuals(forward: Forward) -> dict[Var, set[Var]]:
    """Masks of all cotangents that a residual is multiplied with, if that is all."""
    backward, masks = forward.backward, Masks()
    residuals = {
        own: v
        for v, own in zip(forward.residuals, backward.residuals, strict=True)
        if not is_literal(v) and not is_literal(own)
    }
    zero_by: dict[Var, set[Var]] = {}  # values that a variable is zero with
    met: dict[Var, list[set[Var]]] = {}
    for eqn in backward.eqns:
        masks.note(eqn)
        inputs = variables_in(eqn.invars)
        is_product = eqn.primitive.name == "mul"
        x = masks.masked_by(eqn)
        by: set[Var] = set()
        if is_product or eqn.primitive.name in ("neg", "convert_element_type"):
            by = set().union(*(zero_by.get(v, ()) for v in inputs))
        if is_product:
            by |= {residuals[v] for v in inputs if v in residuals}
        elif x is not None and eqn.invars[0] in residuals:
            by = {residuals[inputs[0]]} | zero_by.get(x, set())
        zero_by.update(dict.fromkeys(eqn.outvars, by))
        for v in inputs:
            if v in residuals:
                others = [zero_by.get(u, set()) for u in inputs if u is not v]
                met.setdefault(residuals[v], []).append(
                    others[0] if is_product and others else set()
                )
    return {v: set.intersection(*known) for v, known in met.items()}

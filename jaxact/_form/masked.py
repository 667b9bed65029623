"""Values of which only the elements that a mask keeps are needed.

A decay exp(g_i - g_j) is e^45 above the diagonal, where a mask sets it to zero: in one
group with such elements all others are lost (8 gradients at 8 bits, in a gated linear
attention). Masked, it is what the forward pass goes on with, and what the derivative
needs: the cotangent is masked too.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.rewrite import new_equation, new_variable, rename, with_outputs
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.forward import Forward

# Where an array is zero: where a mask has this value.
Zeros: TypeAlias = tuple[Var, bool]


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

    def masking(self, eqn: Eqn) -> tuple[Var, Zeros] | None:
        """The operand that the result has zeros in place of, and where; or None."""
        name, inputs = eqn.primitive.name, eqn.invars
        pairs: list[tuple[Atom, Atom, bool]] = []
        if name == "select_n" and len(inputs) == 3:
            mask, where_false, where_true = inputs
            if self._is_zero(where_true):
                pairs.append((where_false, mask, True))
            if self._is_zero(where_false):
                pairs.append((where_true, mask, False))
        elif name == "mul":
            numbers = [x for x in inputs if self._is_number(x)]
            pairs = [(x, n, False) for x in inputs for n in numbers if x is not n]
        for x, mask, value in pairs:
            # A number that a mask spreads has a sum for its cotangent.
            is_alike = x.aval.shape == eqn.outvars[0].aval.shape
            if is_alike and not is_literal(x) and not is_literal(mask):
                return x, (mask, value)
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
    maskings = _maskings(eqns)
    exponentials = _exponentials(eqns).intersection(variables_in(forward.residuals))
    if not maskings or not exponentials:
        return forward
    for v, zeros in _zeros_of_cotangents(forward).items():
        if v not in exponentials:
            continue
        alike = [
            (x, eqn)
            for where in zeros
            for x, eqn in maskings.get(where, ())
            if (x.aval.shape, x.aval.dtype) == (v.aval.shape, v.aval.dtype)
        ]
        if not alike:
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


def _maskings(eqns: Sequence[Eqn]) -> dict[Zeros, list[tuple[Var, Eqn]]]:
    """Operands that are set to zero, and the equations that do it, by where."""
    masks, found = Masks(), dict[Zeros, list[tuple[Var, Eqn]]]()
    for eqn in eqns:
        masks.note(eqn)
        masking = masks.masking(eqn)
        if masking is not None:
            x, where = masking
            found.setdefault(where, []).append((x, eqn))
    return found


def _zeros_of_cotangents(forward: Forward) -> dict[Var, set[Zeros]]:
    """For residuals that are only multiplied: where all their cotangents are zero.

    A product with a residual is zero where that is; a selection, by its mask; a sum,
    where both terms are: `jax.nn.softmax(x, where=mask)` adds two slopes.
    """
    masks = Masks()
    residuals = {own: v for v, own in forward.residual_pairs}
    zeros: dict[Var, set[Zeros]] = {}
    met: dict[Var, list[set[Zeros]]] = {}
    for eqn in forward.backward.eqns:
        masks.note(eqn)
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        masking = masks.masking(eqn)
        own: set[Zeros] = set()
        if name in ("mul", "neg", "convert_element_type"):
            own = own.union(*(zeros.get(v, ()) for v in inputs))
        elif name == "div":
            own = own.union(*(zeros.get(v, ()) for v in variables_in(eqn.invars[:1])))
        elif name in ("add", "add_any", "sub"):
            terms = [
                set() if is_literal(v) else zeros.get(v, set()) for v in eqn.invars
            ]
            own = set.intersection(*terms)
        if name == "mul":
            own |= {(residuals[v], False) for v in inputs if v in residuals}
        elif masking is not None:
            x, (mask, value) = masking
            own = own.union(zeros.get(x, ()))
            if mask in residuals:
                own.add((residuals[mask], value))
        zeros.update(dict.fromkeys(eqn.outvars, own))
        for v in residuals.keys() & set(inputs):
            others = [zeros.get(u, set()) for u in inputs if u is not v]
            is_factor = name == "mul" and len(others) == 1
            met.setdefault(residuals[v], []).append(others[0] if is_factor else set())
    return {v: set.intersection(*known) for v, known in met.items()}

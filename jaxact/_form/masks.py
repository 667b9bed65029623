"""Masks in a program, and the equations that set elements to zero with them."""

import dataclasses
from typing import TypeAlias

from jax.dtypes import float0

from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Atom, Eqn, Literal, Var

# Where an array is zero: where a mask has this value.
Zeros: TypeAlias = tuple[Var, bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Masks:
    """Variables in a program that are known to have no elements but 0 and 1.

    Attributes:
      with_gates: know `gate & False`, the zeros in slopes. Where bases are chosen a
        slope is none of the masked values, which are stored apart.
      zeros: with zeros alone.
      numbers: made from bools, or by a selection from zeros and ones.
      same: for a mask made from another, that one, and its value where this is true.
      integers: for a mask as integers, the mask.
    """

    with_gates: bool = False
    zeros: set[Var] = dataclasses.field(default_factory=set)
    numbers: set[Var] = dataclasses.field(default_factory=set)
    same: dict[Var, Zeros] = dataclasses.field(default_factory=dict)
    integers: dict[Var, Var] = dataclasses.field(default_factory=dict)

    def note(self, eqn: Eqn) -> None:
        """Learn about an equation's result from its operands."""
        name, inputs = eqn.primitive.name, eqn.invars
        if inputs and eqn.outvars and not is_literal(inputs[0]):
            self._note_copy(eqn, inputs[0])
        if name in MOVES:
            is_zero, is_number = self._is_zero(inputs[0]), self._is_number(inputs[0])
        else:
            is_and = self.with_gates and name == "and"
            is_zero = is_and and any(map(self._is_zero, inputs))
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
                return x, self.where(mask, value)
        return None

    def where(self, mask: Var, value: bool) -> Zeros:
        """Where `mask` has the value, by a mask that is not made from another."""
        while mask in self.same:
            mask, its_value = self.same[mask]
            value = value == its_value
        return mask, value

    def _note_copy(self, eqn: Eqn, x: Var) -> None:
        """A mask's inverse, or `mask.astype(int) == 1`, as in a selection's slopes."""
        name, out = eqn.primitive.name, eqn.outvars[0]
        if name == "not" and x.aval.dtype == bool:
            self.same[out] = x, False
        elif name == "convert_element_type" and x.aval.dtype == bool:
            self.integers[out] = x
        elif name == "eq" and x in self.integers and is_literal(eqn.invars[1]):
            if eqn.invars[1].val in (0, 1):
                self.same[out] = self.integers[x], bool(eqn.invars[1].val)

    def _is_zero(self, x: Atom) -> bool:
        return _is_in((0,), x) if is_literal(x) else x in self.zeros

    def _is_number(self, x: Atom) -> bool:
        if is_literal(x):
            return _is_in((0, 1), x)
        return x.aval.dtype == bool or x in self.numbers


def _is_in(numbers: tuple[int, ...], x: Literal) -> bool:
    """Whether it is one of these: an integer's tangent, of no type, is none."""
    return x.aval.dtype != float0 and x.val in numbers

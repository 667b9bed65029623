"""Exact-affine classes: which values are known once another one is.

A value is *exact* if the backward pass can have it to the last bit: parameters, row and
channel statistics, masks, integers, and cheap functions from those. Any other value
belongs to its *base*'s class: it is A * base + C with exact A and C, so a base
that is rounded without bias gives every member without bias. A value that is not
affine in a single one is a base itself.
"""

import dataclasses
from collections.abc import Collection, Mapping

from jaxact._form.masks import Masks
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var

# Most bits for an element that backward keeps to have a value exactly, or from another
# one: a value that costs more is worth a codec.
MOST_BITS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """The bases in a program.

    Attributes:
      statistics: which stay exact whatever their size.
      base: for each inexact variable; exact ones have none.
      needed: for each exact variable, those that backward has to keep to have it.
      cost: for each exact variable, their bytes.
      cheap: exact variables that cost less evaluated again than kept.
      parts: bases that are affine in another one, but smaller or only with a mask for
        each element: better stored themselves, unless that one is stored anyway.
      sides: for each max or min that is affine by an exact bit: the mask and whether
        it is true where the first operand wins.
      softmaxes: for each softmax's output its exponential, after which it is called.
      names: for each base, the `checkpoint_name` equations of values affine in it.
      spared: bases that are kept exactly, and cheap functions from them.
      masks: the masks that are known without any of these.
      exponentials: in the program.
      inverses: whose divisor, or another argument with a pole, is spared.
      random: values that no floating input is behind.
      widths: the bits for an element, of integers that a bit field holds.
      multiplied: bases that are stored in place of products with spared ones, and sums
        that are made from these.
    """

    statistics: Collection[Var] = ()
    base: dict[Atom, Var] = dataclasses.field(default_factory=dict)
    needed: dict[Var, frozenset[Var]] = dataclasses.field(default_factory=dict)
    cost: dict[Var, float] = dataclasses.field(default_factory=dict)
    cheap: set[Var] = dataclasses.field(default_factory=set)
    parts: dict[Var, Var] = dataclasses.field(default_factory=dict)
    sides: dict[Var, tuple[Var, bool]] = dataclasses.field(default_factory=dict)
    softmaxes: dict[Var, Var] = dataclasses.field(default_factory=dict)
    names: dict[Var, list[Eqn]] = dataclasses.field(default_factory=dict)
    spared: set[Var] = dataclasses.field(default_factory=set)
    masks: Masks = dataclasses.field(default_factory=Masks)
    exponentials: set[Var] = dataclasses.field(default_factory=set)
    inverses: set[Var] = dataclasses.field(default_factory=set)
    random: set[Var] = dataclasses.field(default_factory=set)
    widths: Mapping[Var, int] = dataclasses.field(default_factory=dict)
    multiplied: set[Var] = dataclasses.field(default_factory=set)

    def is_exact(self, v: Atom) -> bool:
        return is_literal(v) or v not in self.base

    def exact_operands(self, eqn: Eqn) -> list[Var]:
        return [x for x in variables_in(eqn.invars) if self.is_exact(x)]

    def whole_base(self, v: Var) -> Var:
        """The base that others are parts of: exponentials, for `where(q > 0, q, 1)`."""
        base = self.base[v]
        while base in self.parts:
            base = self.parts[base]
        return base

    def with_exact(self, variables: set[Var]) -> "Classes":
        """The same, but the backward pass has `variables` exactly."""
        base = {v: b for v, b in self.base.items() if v not in variables}
        return dataclasses.replace(self, base=base)

    def with_kept(self, variables: set[Var]) -> "Classes":
        """The same, but `variables` are not evaluated again."""
        return dataclasses.replace(self, cheap=self.cheap - variables)

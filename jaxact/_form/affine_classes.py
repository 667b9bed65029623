"""Exact-affine classes: which values are known once another one is.

A value is *exact* if the backward pass can have it to the last bit: parameters, row and
channel statistics, masks, integers, and what cheap equations make of those. Any other
value belongs to the class of its *base*: it is A * base + C with exact A and C, so a
base that is rounded without bias gives every member without bias. What is no affine
image of one value is a base itself.

`max(x, c)` is affine in x given one exact bit per element: which side won.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from jaxact._form.derivative import DERIVATIVE_OF
from jaxact._jaxpr.primitives import CHEAP, COMPARISONS, REDUCTIONS, SELECTIONS, SUMS
from jaxact._jaxpr.read import is_float, is_literal, literal_key, variables_in
from jaxact._policy import SMALL_FRACTION

# The result of a reduction is a statistic (a row's sum, maximum, deviation) where it is
# at least this many times smaller than the largest residual: exact, it costs at most
# 8 bits for each element of that; quantized, it ruins the gradient.
STATISTIC_FRACTION = 4

# Where max or min takes its first operand: the comparison, and the side it is true on.
_SIDES = {
    "max": {"gt": True, "ge": True, "lt": False, "le": False},
    "min": {"gt": False, "ge": False, "lt": True, "le": True},
}


@dataclasses.dataclass
class Classes:
    """Bases of the values of a program.

    Attributes:
      base: of each inexact variable; exact ones have none.
      cost: bytes to keep for the backward pass for having an exact variable there.
      again: exact variables that are cheaper evaluated again than kept.
      parts: bases that are affine in another one, but smaller or only with a mask for
        each element: better stored themselves, unless that one is stored anyway.
      sides: for each max or min that is affine by an exact bit: the mask and whether
        it is true where the first operand wins.
      names: `checkpoint_name`s of a base and of what is affine in it.
    """

    base: dict[Any, Any] = dataclasses.field(default_factory=dict)
    cost: dict[Any, float] = dataclasses.field(default_factory=dict)
    again: set[Any] = dataclasses.field(default_factory=set)
    parts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    sides: dict[Any, tuple[Any, bool]] = dataclasses.field(default_factory=dict)
    names: dict[Any, list[str]] = dataclasses.field(default_factory=dict)

    def is_exact(self, v: Any) -> bool:
        return is_literal(v) or v not in self.base

    def set_exact(self, v: Any) -> None:
        self.base.pop(v, None)


def classify(
    jaxpr: Any, largest: int, is_activation: Callable[[Any], bool], inexact: set[Any]
) -> Classes:
    """Find the class of every variable of `jaxpr`.

    Args:
      largest: elements of the largest residual, which tells what a statistic is.
      is_activation: whether a variable is made of more than parameters.
      inexact: inputs that the backward pass can have only as they are stored.
    """
    found = Classes()
    comparisons = _comparisons(jaxpr)
    for v in (*jaxpr.constvars, *jaxpr.invars):
        found.cost[v] = 0.0
        if v in inexact and not _is_small(v, largest):
            found.base[v] = v
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            base = _base(eqn, v, found, comparisons, largest)
            if base is None and not _settle(eqn, v, found, is_activation, largest):
                base = v
            if base is not None:
                found.base[v] = base
        if eqn.primitive.name == "name" and not is_literal(eqn.invars[0]):
            source = eqn.invars[0]
            known = found.names.setdefault(found.base.get(source, source), [])
            known.append(eqn.params["name"].removeprefix(DERIVATIVE_OF))
    return found


def _base(
    eqn: Any, v: Any, found: Classes, comparisons: dict[Any, Any], largest: int
) -> Any | None:
    """The base of an output; None where it is exact."""
    if not is_float(v) or _is_small(v, largest):
        return None
    name, size = eqn.primitive.name, v.aval.size
    if name in REDUCTIONS and size * STATISTIC_FRACTION <= largest:
        return None
    inexact = [i for i, x in enumerate(eqn.invars) if not found.is_exact(x)]
    bases = {found.base[eqn.invars[i]] for i in inexact}
    if not bases:
        return None
    base = next(iter(bases))
    if len(bases) > 1:
        return v
    masked = name in _SIDES and len(inexact) == 1
    if masked:
        side = _side(eqn, comparisons)
        if side is None:
            return v
        found.sides[v] = side
    affine = (
        masked
        or name in SUMS
        or (name == "mul" and len(inexact) == 1)
        or (name == "div" and inexact == [0])
        or (name in SELECTIONS and inexact == [0])
    )
    if not affine:
        return v
    smaller = name in SELECTIONS and size < eqn.invars[0].aval.size
    if masked or smaller or _needs_masks(eqn, size, found):
        found.parts[v] = base
        return v
    return base


def _needs_masks(eqn: Any, size: int, found: Classes) -> bool:
    """Whether the exact operands cost a bit or more for each element."""
    exact = [x for x in variables_in(eqn.invars) if found.is_exact(x)]
    return 8 * sum(found.cost[x] for x in exact) >= size


def _settle(
    eqn: Any, v: Any, found: Classes, is_activation: Callable[[Any], bool], largest: int
) -> bool:
    """Note what an exact output costs; False if it is better stored as a base."""
    keep = v.aval.size / 8
    if v.aval.dtype != bool:
        keep *= 8 * getattr(v.aval.dtype, "itemsize", 4)
    sources = set(variables_in(eqn.invars))
    exact = all(map(found.is_exact, sources))
    again = exact and eqn.primitive.name in CHEAP and not eqn.effects
    cost = sum(found.cost[x] for x in sources) if again else keep
    is_large = is_float(v) and not _is_small(v, largest)
    if is_large and is_activation(v):
        is_statistic = eqn.primitive.name in REDUCTIONS
        # Costlier than a byte for each element: worth a codec.
        if min(cost, keep) > v.aval.size and not is_statistic:
            return False
    found.cost[v] = min(cost, keep)
    if again and cost <= keep:
        found.again.add(v)
    return True


def _is_small(v: Any, largest: int) -> bool:
    return v.aval.size * SMALL_FRACTION <= largest


def _comparisons(jaxpr: Any) -> dict[Hashable, Any]:
    """Masks by name and operands of the comparison."""
    return {
        (eqn.primitive.name, *map(literal_key, eqn.invars)): eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name in COMPARISONS
    }


def _side(eqn: Any, masks: dict[Hashable, Any]) -> tuple[Any, bool] | None:
    """A mask that tells which operand of max or min won."""
    first, second = map(literal_key, eqn.invars)
    for name, on_first in _SIDES[eqn.primitive.name].items():
        if (name, first, second) in masks:
            return masks[name, first, second], on_first
        if (name, second, first) in masks:
            return masks[name, second, first], not on_first
    out = eqn.outvars[0]
    for x, on_first in ((first, True), (second, False)):
        for pair in ((x, out), (out, x)):
            if ("eq", *pair) in masks:
                return masks["eq", *pair], on_first
    return None

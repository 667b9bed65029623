"""Masks that say where a value in memory is above a number.

A ReLU keeps where its input is positive, and that is where its output is: the output
is in memory for the next product, and the input is not. A kernel packs the mask from
the output, and no array of booleans is written. XLA made that array in the kernel that
takes the extremes of the next residual; for a block of ResNet-50 this took an H200
1.39 ms. Or it packed the mask itself, from what the ReLU is computed from: 0.32 ms. The
output alone takes 0.03 ms to read.
"""

from collections.abc import Collection
from dataclasses import dataclass

import jax

from jaxact._codec import Bitmask
from jaxact._jaxpr.read import is_float, is_literal
from jaxact._jaxpr.types import Eqn, Jaxpr, Var


@dataclass(frozen=True)
class Comparison:
    """A mask as `source > above`.

    Attributes:
      source: a variable with the mask's shape.
      above: a number, which the source's dtype has.
    """

    source: Var
    above: float

    def encode(self, source: jax.Array) -> jax.Array:
        """The mask as `Bitmask` stores it, given the source's value."""
        return Bitmask().encode_above(source, self.above)


def comparisons(
    jaxpr: Jaxpr, masks: Collection[Var], in_memory: Collection[Var]
) -> dict[Var, Comparison]:
    """The masks that are comparisons of values in memory.

    Args:
      jaxpr: the program that makes them.
      masks: that are to be packed.
      in_memory: variables.
    """
    rectified: dict[tuple[Var, float], Var] = {}
    compared: dict[Var, tuple[Var, float]] = {}
    for eqn in jaxpr.eqns:
        if (operands := _with_number(eqn, "gt")) is not None:
            compared[eqn.outvars[0]] = operands
        if (operands := _with_number(eqn, "max")) is not None:
            if eqn.outvars[0] in in_memory:
                rectified[operands] = eqn.outvars[0]
    found: dict[Var, Comparison] = {}
    for v in masks:
        if v not in compared:
            continue
        x, number = compared[v]
        # max(x, c) > c where x > c; both are false for NaN.
        source = x if x in in_memory else rectified.get((x, number))
        if source is not None:
            found[v] = Comparison(source, number)
    return found


def _with_number(eqn: Eqn, name: str) -> tuple[Var, float] | None:
    """The operands of this equation between a float array and a number; else None."""
    if eqn.primitive.name != name:
        return None
    x, number = eqn.invars
    if is_literal(x) or not is_literal(number) or number.aval.shape or not is_float(x):
        return None
    return x, float(number.val)

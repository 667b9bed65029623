"""The base in which an equation's output is affine, and whether that is stored for it.

`max(x, c)` is affine in x given one exact bit per element: which side won.
"""

from collections.abc import Hashable

from jaxact._form.classes import MOST_BITS, Classes
from jaxact._form.intervals import interval_of, intervals_in
from jaxact._jaxpr.primitives import (
    COMPARISONS,
    EXPONENTIALS,
    MOVES,
    SELECTIONS,
    SUMS,
)
from jaxact._jaxpr.read import (
    equations_behind,
    is_float,
    literal_key,
    loses_precision,
    variables_in,
)
from jaxact._jaxpr.types import Eqn, Var
from jaxact._plan.program import Program, found_once

# Where max or min takes its first operand: the comparison, and the side it is true on.
_SIDES = {
    "max": {"gt": True, "ge": True, "lt": False, "le": False},
    "min": {"gt": False, "ge": False, "lt": True, "le": True},
}


def base_of(
    eqn: Eqn, v: Var, classes: Classes, program: Program, small_size: int
) -> Var | None:
    """An output's base; None where it is exact.

    Notes in `classes` the mask of a max or min, and a base that has a part.
    """
    # A ReLU's or dropout's mask, an embedding's indices.
    if not is_float(v) or v.aval.size <= small_size:
        return None
    # A LayerNorm's mean and deviation, a softmax's maximum and sum.
    if v in classes.statistics:
        return None
    inexact = [i for i, x in enumerate(eqn.invars) if not classes.is_exact(x)]
    bases = {classes.base[eqn.invars[i]] for i in inexact}
    # A cast weight, a norm's deviation broadcast along its rows.
    if not bases:
        return None
    # A GLU's product, a residual join's sum; a softmax, whose derivative needs no more.
    if len(bases) > 1 or v in classes.softmaxes:
        if eqn.primitive.name in SUMS and bases <= classes.multiplied:
            classes.multiplied.add(v)
        return v
    (base,) = bases
    side = _side(eqn, program) if len(inexact) == 1 else None
    if side is not None:
        classes.sides[v] = side
    elif not _is_affine(eqn, inexact):
        return v
    bits = _bits_needed(eqn, v.aval.size, classes)
    if bits > MOST_BITS and _has_random_factor(eqn, classes):
        return v
    if (
        side is not None
        or bits >= 1
        or _is_smaller(eqn, inexact[0], classes)
        or (
            base not in classes.multiplied
            and _is_scaled_by_spared(eqn, classes, program)
        )
    ):
        # Stored themselves, ReLU and dropout need no mask, and queries, keys and values
        # get groups of their own.
        classes.parts[v] = base
        return v
    return base


def _is_affine(eqn: Eqn, inexact: list[int]) -> bool:
    """Whether the output is affine in its inexact operands, which have one base.

    Not a matrix product, a convolution, exp(scores), a GELU, a cast to float8.
    """
    name = eqn.primitive.name
    return not loses_precision(eqn) and (
        name in SUMS  # x - mean and a norm's bias
        or (name == "mul" and len(inexact) == 1)  # its inverse deviation, its gain
        or (name == "div" and inexact == [0])  # an exponential by sums of some
        or (name in SELECTIONS and inexact == [0])  # a fused product's keys
    )


def _is_smaller(eqn: Eqn, position: int, classes: Classes) -> bool:
    """Whether the operand there has elements that the output has not.

    Those that a slice cuts off are not stored. Nor are those that a mask sets to zero,
    which may be larger than all that it keeps. A mask given as an array of floats is
    told by nothing but a product with an exponential.
    """
    name, operand = eqn.primitive.name, eqn.invars[position]
    if name in SELECTIONS and eqn.outvars[0].aval.size < operand.aval.size:
        return True
    if classes.masks.masking(eqn) is not None:
        return True
    is_product = name == "mul" and bool(classes.exact_operands(eqn))
    return is_product and operand in classes.exponentials


def _bits_needed(eqn: Eqn, size: int, classes: Classes) -> float:
    """Bits that the exact operands cost for each element: dropout's is one.

    Statistics of short rows do too. A sum with one, such as x - mean, is better stored
    itself. A product is not: its rows, of which one group holds many, may have scales
    that the operand's have not (x / (s^2 + 1) with the rows' sums s, before a norm: at
    8 bits an error of 4 gradients).
    """
    exact = classes.exact_operands(eqn)
    if eqn.primitive.name not in SUMS:
        exact = [x for x in exact if _has_each(x, size, classes)]
    return 8 * sum(classes.cost[x] for x in exact) / size


def _has_random_factor(eqn: Eqn, classes: Classes) -> bool:
    """Whether exact operands are made from integers: a sample's noise, from its bits.

    A segment's sums are not, through which a segment softmax is stored.
    """
    needed = {v for x in classes.exact_operands(eqn) for v in classes.needed[x]}
    return not any(map(is_float, needed))


def _is_scaled_by_spared(eqn: Eqn, classes: Classes, program: Program) -> bool:
    """Whether an exact operand is a factor for each element, known from spared bases.

    A product with exp(d), which may be large where the product is small, has less noise
    if it is rounded itself, and it needs no d. Not random numbers times 1 / p, the
    slope of log(p), which is large where p is small, and meets p again.
    """
    inputs = variables_in(eqn.invars)
    is_random = any(x in classes.random and x in classes.base for x in inputs)
    if is_random and not classes.inverses.isdisjoint(inputs):
        return False
    return eqn.primitive.name not in SUMS and any(
        x in classes.spared and not _is_masked_exponential(x, program) for x in inputs
    )


def _is_masked_exponential(v: Var, program: Program) -> bool:
    """Whether it is exp(where(mask, d, -inf)) or where(mask, exp(d), 0).

    A mask keeps decays, at most 1, and its operand's noise decays with them. In a
    gated delta rule (Yang et al. 2024, arXiv:2412.06464) that leaves e^-10 from one
    step to the next, the product's own noise, as large as its diagonal's, was 34
    gradients at 8 bits in the rates.
    """
    is_passed = lambda eqn: eqn.primitive.name in MOVES | EXPONENTIALS | {"select_n"}
    eqns = list(equations_behind(v, program.producers, is_passed))
    has_exponential = any(eqn.primitive.name in EXPONENTIALS for eqn in eqns)
    return has_exponential and any(_sets_number(eqn, program) for eqn in eqns)


def _sets_number(eqn: Eqn, program: Program) -> bool:
    """Whether it selects a number in some places: not a leaky ReLU."""
    intervals = intervals_in(program)
    cases = eqn.invars[1:] if eqn.primitive.name == "select_n" else []
    return any(lo == hi for lo, hi in (interval_of(x, intervals) for x in cases))


def _has_each(x: Var, size: int, classes: Classes) -> bool:
    """Whether backward keeps a value for each of so many elements to have `x`."""
    return any(v.aval.size >= size for v in classes.needed[x])


@found_once
def _comparisons(program: Program) -> dict[Hashable, Var]:
    """Masks by comparison: its name and operands."""
    return {
        (eqn.primitive.name, *map(literal_key, eqn.invars)): eqn.outvars[0]
        for eqn in program.jaxpr.eqns
        if eqn.primitive.name in COMPARISONS
    }


def _side(eqn: Eqn, program: Program) -> tuple[Var, bool] | None:
    """Where max or min has a mask that tells which operand won: the mask and its side.

    The side is true where the first operand wins if the mask is.
    """
    if eqn.primitive.name not in _SIDES:
        return None
    masks = _comparisons(program)
    first, second = map(literal_key, eqn.invars)
    # x > 0, which `jax.nn.relu` keeps for its derivative.
    for name, on_first in _SIDES[eqn.primitive.name].items():
        if (name, first, second) in masks:
            return masks[name, first, second], on_first
        if (name, second, first) in masks:
            return masks[name, second, first], not on_first
    # x == max(x, y), which `jnp.maximum` keeps for its derivative.
    out = eqn.outvars[0]
    for x, on_first in ((first, True), (second, False)):
        for pair in ((x, out), (out, x)):
            if ("eq", *pair) in masks:
                return masks["eq", *pair], on_first
    return None

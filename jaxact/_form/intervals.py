"""Intervals that hold a program's values, whatever its inputs are.

Interval arithmetic over single equations (Moore, Interval Analysis, 1966), enough to
tell 1 + exp(-x) from a divisor that may vanish. Rounding errors of the forward pass
are not included: a bound is compared with a margin that is far wider.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact._form.maxima import is_at_most
from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr, scan_counts
from jaxact._jaxpr.primitives import (
    COMPARISONS,
    EXTREMES,
    JOINS,
    MOVES,
    RUNNING_EXTREMES,
    SCATTERS,
    SELECTIONS,
    TRANSPARENT,
)
from jaxact._jaxpr.read import (
    call_body,
    is_float,
    is_literal,
    is_square,
    loses_precision,
)
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Producers, Var
from jaxact._plan.program import Program, found_once

Interval: TypeAlias = tuple[float, float]
_Function: TypeAlias = Callable[..., Interval]

REALS: Interval = (-math.inf, math.inf)
# Results that lie in an interval whatever the operands are.
_RANGES: dict[str, Interval] = {
    "logistic": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "erfc": (0.0, 2.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
}
_ORDERINGS = COMPARISONS - {"eq", "ne"}
# Elements of the first operand.
_CHOSEN = EXTREMES | RUNNING_EXTREMES | {"sort", "top_k"}


def find_intervals(
    jaxpr: Jaxpr, inputs: Sequence[Interval] = ()
) -> dict[Var, Interval]:
    """An interval for each computed variable that has one shorter than the reals.

    Args:
      inputs: intervals of the program's, if anything is known of them.
    """
    intervals: dict[Var, Interval] = dict(zip(jaxpr.invars, inputs, strict=False))
    producers: Producers = {}
    for eqn in jaxpr.eqns:
        producers.update(dict.fromkeys(eqn.outvars, eqn))
        intervals.update(_from_inside(eqn, intervals))
        # The others that sort and top_k have are indices.
        parts = eqn.outvars if eqn.primitive.name in SELECTIONS else eqn.outvars[:1]
        if not parts:  # an effect
            continue
        if parts == eqn.outvars or eqn.primitive.name in _CHOSEN:
            operands = [interval_of(v, intervals) for v in eqn.invars]
            if eqn.primitive.name == "select_n":
                operands = _selected(eqn, operands, producers, intervals)
            interval = _result(eqn, operands)
            if _is_up_to_zero(eqn, producers):
                interval = _both(interval, (-math.inf, 0.0))
            if _is_share(eqn, operands, producers):
                interval = _both(interval, (0.0, 1.0))
            interval = _in_dtype(interval, eqn, operands)
            if interval != REALS:
                intervals.update(dict.fromkeys(parts, interval))
    return intervals


@found_once
def intervals_in(program: Program) -> dict[Var, Interval]:
    """The intervals in a program whose inputs may be any numbers."""
    return find_intervals(program.jaxpr)


def interval_of(v: Atom, intervals: Mapping[Var, Interval]) -> Interval:
    """The interval of a variable or a literal."""
    if is_literal(v):
        values = np.asarray(v.val)
        is_number = values.dtype.kind in "biuf" or values.dtype.name == "bfloat16"
        value = float(values) if is_number and values.ndim == 0 else math.nan
        return REALS if math.isnan(value) else (value, value)
    return intervals.get(v, (0.0, 1.0) if v.aval.dtype == bool else REALS)


def _result(eqn: Eqn, operands: Sequence[Interval]) -> Interval:
    name = eqn.primitive.name
    if name in _RANGES:
        return _RANGES[name]
    if name == "random_gamma" and not eqn.params["log_space"]:
        return 0.0, math.inf
    if loses_precision(eqn):  # it may round 15 to 16
        return _sum_of_products(operands[:1])
    if name in MOVES | SELECTIONS | _CHOSEN:
        return operands[0]
    if name in ("argmax", "argmin"):
        shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
        return 0, math.prod(shape[axis] for axis in axes) - 1
    if name in JOINS:
        return _hull(*operands)
    if name == "ne" and eqn.invars[0] is eqn.invars[1]:
        return 0.0, 0.0  # of no number, which nothing bounds: `jnp.logaddexp`
    if name == "select_n":
        is_first = operands[0] == (0.0, 0.0)
        return operands[1] if is_first else _hull(*operands[1:])
    if is_square(eqn):
        return _power(operands[0], 2)
    if name == "integer_pow" and eqn.params["y"] > 0:
        return _power(operands[0], eqn.params["y"])
    if name in ("reduce_sum", "reduce_window_sum", "cumsum", "dot_general"):
        return _sum_of_products(operands)
    if name in SCATTERS:  # of updates, to an array
        return _scattered(name, operands[0], operands[-1])
    function = _FUNCTIONS.get(name)
    return REALS if function is None else function(*operands)


def _from_inside(eqn: Eqn, intervals: Mapping[Var, Interval]) -> dict[Var, Interval]:
    """Of results from functions with rules, stacks from scans, copies from barriers."""
    given, own = [interval_of(v, intervals) for v in eqn.invars], []
    body, first = call_body(eqn) or custom_vjp_body(eqn), 0
    if eqn.primitive.name == "scan":
        body, first, given = eqn.params["jaxpr"], scan_counts(eqn)[1], []
    if eqn.primitive.name in TRANSPARENT and not loses_precision(eqn):
        own = given
    elif body is not None:
        program, _ = open_jaxpr(body)
        inside = find_intervals(program, given)
        own = [interval_of(v, inside) for v in program.outvars[first:]]
    pairs = zip(eqn.outvars[first:], own, strict=False)
    return {v: interval for v, interval in pairs if interval != REALS}


def _in_dtype(interval: Interval, eqn: Eqn, operands: Sequence[Interval]) -> Interval:
    """What holds an equation's results, given what holds them as real numbers.

    Integers lose the fraction of a quotient, and those beyond the dtype's range wrap
    around. They are packed into the bits that hold their interval, which has no margin.
    So nothing is told of those that are rounded floats, quotients by what may be zero,
    or from a gather that may fill in its least or its largest number.
    """
    dtype, params = eqn.outvars[0].aval.dtype, eqn.params
    if dtype == jnp.bool_ and interval != (0.0, 0.0):  # any other number is true
        return 0.0, 1.0
    if not jnp.issubdtype(dtype, jnp.integer):
        return interval
    is_cast = eqn.primitive.name == "convert_element_type" and is_float(eqn.invars[0])
    is_quotient = eqn.primitive.name == "div"
    if is_cast or (is_quotient and operands[1][0] <= 0 <= operands[1][1]):
        return REALS
    if params.get("mode") is lax.GatherScatterMode.FILL_OR_DROP:
        return REALS
    limits = jnp.iinfo(dtype)
    lo, hi = interval
    if lo < limits.min or hi > limits.max:
        return REALS
    return math.floor(lo), math.ceil(hi)


def _is_up_to_zero(eqn: Eqn, producers: Producers) -> bool:
    """Whether it subtracts a maximum: x - max(x)."""
    if eqn.primitive.name != "sub":
        return False
    x, y = eqn.invars
    return is_at_most(x, y, producers)


def _is_share(eqn: Eqn, operands: Sequence[Interval], producers: Producers) -> bool:
    """Whether it divides elements by a sum that they are in: a softmax."""
    if eqn.primitive.name != "div" or operands[0][0] < 0:
        return False
    part, whole = eqn.invars
    return is_at_most(part, whole, producers, "reduce_sum")


def _selected(
    eqn: Eqn,
    operands: Sequence[Interval],
    producers: Producers,
    intervals: Mapping[Var, Interval],
) -> list[Interval]:
    """Operands where they are selected: x in where(x > 0, x, expm1(x)), of an ELU."""
    test, *cases = eqn.invars
    comparison = None if is_literal(test) else producers.get(test)
    if comparison is None or len(cases) != 2:
        return [*operands]
    if comparison.primitive.name not in _ORDERINGS:
        return [*operands]
    x, bound = comparison.invars
    lo, hi = interval_of(bound, intervals)
    is_greater = comparison.primitive.name in ("gt", "ge")
    ends = [(-math.inf, hi), (lo, math.inf)]  # where it is false, and true
    if not is_greater:
        ends = [(lo, math.inf), (-math.inf, hi)]
    own = [
        _both(operand, end) if case is x else operand
        for case, operand, end in zip(cases, operands[1:], ends, strict=True)
    ]
    return [operands[0], *own]


def _both(x: Interval, y: Interval) -> Interval:
    """What two intervals share, or the first one if they share nothing."""
    lo, hi = max(x[0], y[0]), min(x[1], y[1])
    return (lo, hi) if lo <= hi else x


def _hull(*intervals: Interval) -> Interval:
    return min(lo for lo, _ in intervals), max(hi for _, hi in intervals)


def _monotone(function: Callable[[float], float], least: float) -> _Function:
    """Of an increasing function, whose domain starts at `least`."""

    def end(x: float) -> float:
        try:
            return function(max(x, least))
        except OverflowError:
            return math.inf
        except ValueError:  # log(0)
            return -math.inf

    return lambda x: (end(x[0]), end(x[1]))


def _add(x: Interval, y: Interval) -> Interval:
    lo, hi = x[0] + y[0], x[1] + y[1]
    return REALS if math.isnan(lo) or math.isnan(hi) else (lo, hi)  # inf - inf


def _negative(x: Interval) -> Interval:
    return -x[1], -x[0]


def _product(x: Interval, y: Interval) -> Interval:
    ends = [a * b if a and b else 0.0 for a in x for b in y]  # 0 * inf is 0 here
    return min(ends), max(ends)


def _quotient(x: Interval, y: Interval) -> Interval:
    if y[0] < 0 < y[1] or y[0] == y[1] == 0:
        return REALS
    if y[1] <= 0:
        return _quotient(_negative(x), _negative(y))
    inverse = (1 / y[1], 1 / y[0] if y[0] else math.inf)
    return _product(x, inverse)


def _absolute(x: Interval) -> Interval:
    return max(x[0], -x[1], 0.0), max(-x[0], x[1])


def _power(x: Interval, y: int) -> Interval:
    lo, hi = _absolute(x) if y % 2 == 0 else x
    return math.prod([lo] * y), math.prod([hi] * y)  # inf where `**` raises an error


def _sum_of_products(operands: Sequence[Interval]) -> Interval:
    """Of any number of terms: the sign is known, the size is not."""
    lo, hi = _product(*operands) if len(operands) == 2 else operands[0]
    return (lo if lo >= 0 else -math.inf, hi if hi <= 0 else math.inf)


def _scattered(name: str, before: Interval, updates: Interval) -> Interval:
    if "mul" in name:
        return REALS
    lo, hi = _hull(before, updates)
    return _sum_of_products([(lo, hi)]) if "add" in name else (lo, hi)


_FUNCTIONS: dict[str, _Function] = {
    "add": _add,
    "add_any": _add,
    "sub": lambda x, y: _add(x, _negative(y)),
    "neg": _negative,
    "mul": _product,
    "div": _quotient,
    "abs": _absolute,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "clamp": lambda low, x, high: (
        min(max(x[0], low[0]), high[0]),
        min(max(x[1], low[1]), high[1]),
    ),
    "exp": _monotone(math.exp, -math.inf),
    "exp2": _monotone(lambda x: 2.0**x, -math.inf),
    "expm1": _monotone(math.expm1, -math.inf),
    "log": _monotone(math.log, 0.0),
    "log1p": _monotone(math.log1p, -1.0),
    # An operand without a bound may lie anywhere in the domain, and far from its end.
    "sqrt": lambda x: REALS if x[0] < 0 else _monotone(math.sqrt, 0.0)(x),
}

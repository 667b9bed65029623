"""Maxima that are taken off scores, whose choice leaves every result as it is.

A softmax written by hand, exp(s - m) over its sum, has the same value whatever the
shift m is; so have s - m - log(sum(exp(s - m))) and m + log(sum(exp(s - m))). The
gradient through such a maximum is zero, wherever a checkpoint that computes rounded
scores again finds that. `jax.nn.softmax` stops the gradient there.

It is read off the program: each value has m in it a number of times, as a term, or
exp(m) as a factor, to some power. In results there must be neither left.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import (
    EXPONENTIALS,
    JOINS,
    MOVES,
    PLACEMENTS,
    PRODUCTS,
    SELECTIONS,
    STEPS,
)
from jaxact._jaxpr.read import call_body, is_float, is_literal, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var

# Beside a sum that holds exp(0): guards a division, and is not shifted.
_SMALL = 1e-3
# Less than all scores by so much that nothing is left of its exponential.
_MUCH = 1e3
# With every operand times a positive number, the result is times that too.
_HOMOGENEOUS = JOINS | frozenset(
    "add add_any sub max min abs reduce_sum reduce_max reduce_min cumsum "
    "reduce_window_sum scatter-add scatter_add psum psum_invariant".split()
)


class _Content(NamedTuple):
    """How a value depends on a shift m: it is a + term * m or a * exp(power * m).

    Attributes:
      constant: its value where it is a number written in the program; a sum or a mask
        takes those with others.
    """

    term: float = 0.0
    power: float = 0.0
    constant: float | None = None

    @property
    def is_free(self) -> bool:
        return not (self.term or self.power)

    @property
    def is_small(self) -> bool:
        return self.constant is not None and abs(self.constant) <= _SMALL

    def times(self, factor: float) -> "_Content":
        return _Content(self.term * factor, self.power * factor)


_FREE = _Content()
_Contents = dict[Var, _Content]


def shifts_in(eqns: Sequence[Eqn], results: Sequence[Atom]) -> set[Var]:
    """The maxima among equations that shift scores and do nothing else.

    Args:
      results: values that leave them.
    """
    shifts: set[Var] = set()
    if not any(e.primitive.name == "reduce_max" for e in eqns):
        return shifts
    maxima = _maxima(eqns)
    # The last first: attention with a sink takes max(max(s), sink) off.
    for place, eqn in reversed(list(enumerate(eqns))):
        if eqn.primitive.name in ("reduce_max", "max") and eqn.outvars[0] in maxima:
            contents = {eqn.outvars[0]: _Content(term=1.0)}
            is_read = _follow(eqns[place + 1 :], eqn, contents, shifts)
            # One that is only compared with tells which score is chosen.
            is_taken_off = any(
                v in shifts or x.power or x.term < 0 for v, x in contents.items()
            )
            is_left = any(not _of(v, contents).is_free for v in results)
            if is_read and is_taken_off and not is_left:
                shifts.add(eqn.outvars[0])
    return shifts


def _maxima(eqns: Sequence[Eqn]) -> set[Var]:
    """Rows' maxima, also with a sink: not a ReLU, which differs within a row."""
    maxima: set[Var] = set()
    for eqn in eqns:
        name = eqn.primitive.name
        is_later = name in MOVES | {"max"} and not maxima.isdisjoint(
            variables_in(eqn.invars)
        )
        if name == "reduce_max" or is_later:
            maxima.update(eqn.outvars)
    return maxima


def _adds_rows(eqn: Eqn, source: Eqn, operands: Sequence[_Content]) -> bool:
    """Whether it adds elements less different maxima: exp(s - max(s, 1)) by columns."""
    axes, rank = source.params.get("axes", ()), source.invars[0].aval.ndim
    if not axes or operands[0].is_free or eqn.invars[0].aval.ndim != rank:
        return False
    if eqn.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        return not set(eqn.params["axes"]) <= set(axes)
    return eqn.primitive.name == "cumsum" and eqn.params["axis"] not in axes


def _follow(
    eqns: Sequence[Eqn], source: Eqn, contents: _Contents, shifts: set[Var]
) -> bool:
    """Note the values' contents; whether every equation is understood."""
    for eqn in eqns:
        operands = [_of(v, contents) for v in eqn.invars]
        if all(x == _FREE for x in operands):
            continue
        if _adds_rows(eqn, source, operands):
            return False
        body = call_body(eqn)
        if body is not None:
            jaxpr, _ = open_jaxpr(body)
            inside = dict(zip(jaxpr.invars, operands, strict=True))
            if not _follow(jaxpr.eqns, source, inside, shifts):
                return False
            results = [_of(v, inside) for v in jaxpr.outvars]
        elif eqn.primitive.name == "max" and eqn.outvars[0] in shifts:
            results = [_FREE]
        else:
            result = _result(eqn, operands)
            if result is None:
                return False
            results = [result] * len(eqn.outvars)
        contents.update(zip(eqn.outvars, results, strict=True))
    return True


def _of(v: Atom, contents: _Contents) -> _Content:
    if is_literal(v):
        return _Content(constant=float(v.val)) if _is_real(v) else _FREE
    return contents.get(v, _FREE)


def _is_real(v: Atom) -> bool:
    return v.aval.dtype.kind in "fiub" and v.aval.shape == ()


def _result(eqn: Eqn, operands: Sequence[_Content]) -> _Content | None:
    """The content that results have, or None: that is not known."""
    name, first = eqn.primitive.name, operands[0]
    if name in STEPS:  # has no derivative: asks where the maximum is, or for a guard
        return _FREE
    if name in MOVES | SELECTIONS | PLACEMENTS:
        return first
    if all(x.is_free for x in operands):
        return _FREE
    if name == "neg":
        return first._replace(term=-first.term)
    if name in EXPONENTIALS and not first.power:
        return _Content(power=first.term * (1.0 if name == "exp" else math.log(2)))
    if name == "log" and not first.term:
        return _Content(term=first.power)
    if name in ("add", "add_any", "sub") and not any(x.power for x in operands):
        sign = -1.0 if name == "sub" else 1.0
        return _Content(term=first.term + sign * operands[1].term)
    if name == "select_n":
        return _selected(operands[1:])
    if name in _HOMOGENEOUS:
        floats = zip(eqn.invars, operands, strict=True)
        found = _common([x for v, x in floats if is_float(v) and not x.is_small])
        return None if found is None or found.term else found
    if name in PRODUCTS | {"mul", "div", "integer_pow"}:
        return _product(eqn, operands)
    return None


def _selected(cases: Sequence[_Content]) -> _Content | None:
    """The content that all cases have beside fillers: 0, or about -infinity for s - m.

    In place of m itself any number is one: a guard for rows that a mask leaves empty.
    """
    found = _common([x for x in cases if x.constant is None])
    fillers = [x.constant for x in cases if x.constant is not None]
    if found is None or found.term > 0:
        return found
    is_filler = (lambda c: c == 0) if found.power else (lambda c: c < -_MUCH)
    return found if all(map(is_filler, fillers)) else None


def _common(contents: Sequence[_Content]) -> _Content | None:
    """The content that all have."""
    found = {(x.term, x.power) for x in contents}
    return _Content(*found.pop()) if len(found) == 1 else None


def _product(eqn: Eqn, operands: Sequence[_Content]) -> _Content | None:
    """Powers add up; a term is multiplied with a number, as a temperature, alone."""
    name = eqn.primitive.name
    if name == "integer_pow":
        first = operands[0]
        return None if first.term else first.times(eqn.params["y"])
    a, b = operands
    if name == "mul" and a.constant is not None:
        a, b = b, a
    if a.term and b.constant:
        return a.times(b.constant if name == "mul" else 1 / b.constant)
    if a.term or b.term:
        return None
    return _Content(power=a.power + (-b.power if name == "div" else b.power))

"""Maxima that are taken off scores, whose choice leaves every result as it is.

A softmax written by hand, exp(s - m) over its sum, has the same value whatever the
shift m is; so have s - m - log(sum(exp(s - m))) and m + log(sum(exp(s - m))). The
gradient through such a maximum is zero, wherever a checkpoint that computes rounded
scores again finds that. `jax.nn.softmax` stops the gradient there.

It is read off the program: each value has m in it a number of times, as a term, or
exp(m) as a factor, to some power, and runs along m's axes. In results there must be
neither left. Values in different rows have different maxima, so nothing adds those.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxact._jaxpr.axes import MIXED, Labels, moved, multiplied
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import (
    EXPONENTIALS,
    MOVES,
    PLACEMENTS,
    SELECTIONS,
    STEPS,
)
from jaxact._jaxpr.read import call_body, is_float, is_literal
from jaxact._jaxpr.types import Atom, Eqn, Var

# Beside a sum that holds exp(0): guards a division, and is not shifted.
_SMALL = 1e-3
# Less than all scores by so much that nothing is left of its exponential.
_MUCH = 1e3
# With every operand times a positive number, the result is times that too.
_ELEMENTWISE = frozenset("add add_any sub max min abs".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min cumsum".split())
_HOMOGENEOUS = _ELEMENTWISE | _REDUCTIONS | {"concatenate", "pad"}


class _Content(NamedTuple):
    """How a value depends on a shift m: it is a + term * m or a * exp(power * m).

    Attributes:
      axes: for each of its own the axis that it is of m; for a value that does not
        depend on m, none.
      constant: its value where it is a number written in the program; a sum or a mask
        takes those with others.
    """

    term: float = 0.0
    power: float = 0.0
    axes: Labels = ()
    constant: float | None = None

    @property
    def is_free(self) -> bool:
        return not (self.term or self.power)

    @property
    def is_small(self) -> bool:
        return self.constant is not None and abs(self.constant) <= _SMALL

    def times(self, factor: float) -> "_Content":
        return self._replace(term=self.term * factor, power=self.power * factor)


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
    # The last first: attention with a sink takes max(max(s), sink) off.
    for place, eqn in reversed(list(enumerate(eqns))):
        if eqn.primitive.name in ("reduce_max", "max"):
            (m,) = eqn.outvars
            axes = tuple(i if n > 1 else None for i, n in enumerate(m.aval.shape))
            contents = {m: _Content(1.0, 0.0, axes)}
            is_read = _follow(eqns[place + 1 :], contents, shifts)
            # One that is only compared with tells which score is chosen.
            is_taken_off = any(
                v in shifts or x.power or x.term < 0 for v, x in contents.items()
            )
            is_left = any(not _of(v, contents).is_free for v in results)
            if is_read and is_taken_off and not is_left:
                shifts.add(m)
    return shifts


def _follow(eqns: Sequence[Eqn], contents: _Contents, shifts: set[Var]) -> bool:
    """Note the values' contents; whether every equation is understood."""
    for eqn in eqns:
        operands = [_of(v, contents) for v in eqn.invars]
        if all(x == _FREE for x in operands):
            continue
        body = call_body(eqn)
        if body is not None:
            jaxpr, _ = open_jaxpr(body)
            inside = dict(zip(jaxpr.invars, operands, strict=True))
            if not _follow(jaxpr.eqns, inside, shifts):
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
    if all(x.is_free for x in operands):
        return first if name in MOVES | PLACEMENTS else _FREE
    if name in MOVES | SELECTIONS | PLACEMENTS:
        return _moved(eqn, first)
    # A maximum of all scores is a number, which is for each element.
    every = (None,) * eqn.outvars[0].aval.ndim
    operands = [
        x if x.is_free or v.aval.ndim else x._replace(axes=every)
        for v, x in zip(eqn.invars, operands, strict=True)
    ]
    if name == "neg":
        return first._replace(term=-first.term)
    if name in EXPONENTIALS and not first.power:
        power = first.term * (1.0 if name == "exp" else math.log(2))
        return _Content(0.0, power, first.axes)
    if name == "log" and not first.term:
        return _Content(first.power, 0.0, first.axes)
    if name in ("add", "add_any", "sub") and not any(x.power for x in operands):
        sign = -1.0 if name == "sub" else 1.0
        term = first.term + sign * operands[1].term
        return _along(operands, term, 0.0)
    if name == "select_n":
        return _selected(operands[1:])
    if name in _HOMOGENEOUS:
        return _added(eqn, operands)
    if name in ("mul", "div", "integer_pow", "dot_general"):
        return _multiplied(eqn, operands)
    return None


def _along(operands: Sequence[_Content], term: float, power: float) -> _Content | None:
    """The content of a value made of elements at the same places; None: others."""
    axes = {x.axes for x in operands if not x.is_free}
    return _Content(term, power, axes.pop()) if len(axes) == 1 else None


def _moved(eqn: Eqn, content: _Content) -> _Content | None:
    """The content of a part, or of a copy with other axes, in which m's are whole."""
    if content.is_free:  # its indices may be where the maximum is
        return content
    name, axes = eqn.primitive.name, content.axes
    if name in ("slice", "split", "dynamic_slice"):
        return content if _keeps_sizes(eqn, axes) else None
    if name == "rev":
        is_kept = all(axes[i] is None for i in eqn.params["dimensions"])
        return content if is_kept else None
    return _on(content, _gathered(eqn, axes) if name == "gather" else moved(eqn, axes))


def _on(content: _Content, axes: Labels | None) -> _Content | None:
    """The content along these axes, if m's are there as they were."""
    if axes is None or MIXED in axes:
        return None
    counts = {sum(axis is not None for axis in own) for own in (axes, content.axes)}
    return content._replace(axes=axes) if len(counts) == 1 else None


def _keeps_sizes(eqn: Eqn, axes: Labels) -> bool:
    """Whether m's axes are as long as before."""
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = zip(axes, *shapes, strict=True)
    return all(axis is None or before == after for axis, before, after in sizes)


def _gathered(eqn: Eqn, axes: Labels) -> Labels | None:
    """Where m's axes are after `jnp.take_along_axis`: the label's logit."""
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    places = [i for i in range(out.ndim) if i not in numbers.offset_dims]
    batch = numbers.operand_batching_dims
    if any(axis is not None and i not in batch for i, axis in enumerate(axes)):
        return None
    found: list[int | None] = [None] * out.ndim
    for i, k in zip(batch, numbers.start_indices_batching_dims, strict=True):
        found[places[k]] = axes[i]
    return tuple(found)


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
    found = {x._replace(constant=None) for x in contents}
    return found.pop() if len(found) == 1 else None


def _added(eqn: Eqn, operands: Sequence[_Content]) -> _Content | None:
    """Elements with one maximum may be added: those of a row, not those of a column."""
    floats = zip(eqn.invars, operands, strict=True)
    found = _common([x for v, x in floats if is_float(v) and not x.is_small])
    if found is None or found.term:
        return None
    if eqn.primitive.name in _REDUCTIONS:
        is_running = eqn.primitive.name == "cumsum"
        reduced = [eqn.params["axis"]] if is_running else eqn.params["axes"]
        if any(found.axes[i] is not None for i in reduced):
            return None
        left = [x for i, x in enumerate(found.axes) if is_running or i not in reduced]
        return found._replace(axes=tuple(left))
    return found if _keeps_sizes(eqn, found.axes) else None


def _multiplied(eqn: Eqn, operands: Sequence[_Content]) -> _Content | None:
    """Powers add up; a term is multiplied with a number, as a temperature, alone."""
    name = eqn.primitive.name
    if name == "integer_pow":
        (first,) = operands
        return None if first.term else first.times(eqn.params["y"])
    a, b = operands
    if name == "mul" and a.constant is not None:
        a, b = b, a
    if a.term and b.constant:
        return a.times(b.constant if name == "mul" else 1 / b.constant)
    if a.term or b.term:
        return None
    if name == "dot_general":
        sides = [
            x if x.is_free else _on(x, multiplied(eqn, side, x.axes))
            for side, x in enumerate(operands)
        ]
        if None in sides:
            return None
        operands = [x for x in sides if x is not None]
    return _along(operands, 0.0, a.power + (-b.power if name == "div" else b.power))

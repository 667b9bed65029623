"""Sums along an array's rows that a function with a pole is taken of.

The slope of log(sum(exp(s))) is exp(s) / sum(exp(s)), and that of
(exp(s) @ v) / sum(exp(s)) has the same inverse: a row's cotangents are as large as one
over its sum. Where rows with unlike sums share a group, the noise that the largest
gives the smallest is magnified by their ratio: with rows of 16 scores that differ by 10
in the mean it was 5 gradients for the logarithm and 1e12 for the quotient, at 8 bits.
Divided by its sum, which is exact, each row is stored like any other.

Scores less their row's maximum have a sum from 1 to the row's length, and need none
(`jax.nn.logsumexp`, attention in chunks). Nor do sums in a sum with a number, 1 + s,
but for those that add exponentials, which have any size above it (a circle loss).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jaxact._form.intervals import Interval, interval_of
from jaxact._form.pole_arguments import MARGIN, pole_in
from jaxact._jaxpr.primitives import (
    CASTS,
    COMPARISONS,
    COPIES,
    EXPONENTIALS,
    MOVES,
    SCATTERS,
)
from jaxact._jaxpr.read import (
    contracts,
    is_float,
    is_literal,
    is_square,
    keeps_elements,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Eqn, Producers, Shape, Var
from jaxact._plan.storage import Normalized

# Groups with the default size hold one row if it has at least so many elements.
_LONG_ROW = 128
# Results that grow and shrink with an operand: a mask or a weight is in them at most.
_GROWING = (
    CASTS | COPIES | frozenset("abs neg mul div max add add_any select_n".split())
)
# With elements of the operand that are not in the result.
_LEAVING_OUT = frozenset("max select_n".split())
_MAXIMA = frozenset("reduce_max cummax pmax scatter-max scatter_max".split())
# From maxima to the value that scores are shifted by.
_SHIFTING = MOVES | _MAXIMA | COMPARISONS | frozenset("max select_n gather".split())
# In place of an axis: segments, which are no rows; a part of one, or several in one.
_SEGMENT, _MIXED = -1, -2
# Values that a local derivative is made from, at most: that of |x|^3 has nine.
_NEAR = 16

_Axes: TypeAlias = tuple[int, ...]


def varies_in_groups(axes: _Axes, shape: Shape) -> bool:
    """Whether a statistic with these axes varies inside a group of codes."""
    constant = math.prod(shape[max(axes, default=-1) + 1 :])
    return bool(axes) and constant < _LONG_ROW


def are_apart(axes: _Axes, others: _Axes) -> bool:
    """Whether two statistics with these axes belong to rows and to columns."""
    return not set(axes) <= set(others) and not set(others) <= set(axes)


class _Image(NamedTuple):
    """A value that grows like a power of an array.

    Attributes:
      axes: for each of its own the array's axis that it is, or None; or `_SEGMENT`, or
        `_MIXED`.
      total: the sum that it is a multiple of; None before elements are added.
      is_partial: whether elements were left out before: by a mask, or a ReLU. No sum
        bounds these, and over one that is small they would be a group's range.
    """

    variable: Var
    axes: tuple[int | None, ...]
    degree: int
    total: Var | None = None
    is_partial: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RowSums:
    """The sums along rows in one program, by the arrays that they sum.

    Attributes:
      users: the equations that read each variable.
      known: the maps that were asked for.
    """

    producers: Producers
    users: Mapping[Var, Sequence[Eqn]]
    intervals: dict[Var, Interval]
    known: dict[Var, Normalized | None] = dataclasses.field(default_factory=dict)

    def normalizing(self, x: Var) -> Normalized | None:
        """The map that divides by sums near a pole, if groups of codes need it.

        A local derivative has the rows' sizes too: that of a sum of cubes has squares.
        """
        todo = [(x, 1)]
        for _ in range(_NEAR):
            if not todo:
                break
            v, degree = todo.pop(0)
            own = self._by_own_sums(v)
            if own is not None:
                return own.of_power(degree)
            eqn = self.producers.get(v)
            if eqn is not None:
                todo += self._operands(eqn, degree)
        return None

    def _operands(self, eqn: Eqn, degree: int) -> Iterator[tuple[Var, int]]:
        """The operands that an array grows like a power of, as it is that of others."""
        name, inputs = eqn.primitive.name, eqn.invars
        if name == "square" or (name == "integer_pow" and eqn.params["y"] > 0):
            degree *= eqn.params.get("y", 2)
        elif name not in _GROWING:
            return
        elif name == "mul" and inputs[0] is inputs[1]:
            degree *= 2
        shape = eqn.outvars[0].aval.shape
        for v in variables_in(inputs):
            others = [u for u in variables_in(inputs) if u is not v]
            is_scaled = name == "mul" and not self._with_poles.isdisjoint(others)
            is_alike = is_float(v) and v.aval.shape == shape
            if is_alike and not is_scaled and not (name == "div" and others):
                yield v, degree

    @functools.cached_property
    def _with_poles(self) -> set[Var]:
        """Inverses, other functions with a pole, and values that are made from these.

        The slope of x / size in the size, -x / size^2, has not the size of x.
        """
        found: set[Var] = set()
        for v, eqn in self.producers.items():  # in the program's order
            is_behind = not found.isdisjoint(variables_in(eqn.invars))
            if keeps_elements(eqn) and (is_behind or pole_in(eqn)[0] is not None):
                found.add(v)
        return found

    def _by_own_sums(self, x: Var) -> Normalized | None:
        """The map by sums over an array itself.

        Sinkhorn's iterations divide by sums along rows and along columns.
        """
        if x not in self.known:
            self.known[x] = self._find_map(x)
        return self.known[x]

    def _find_map(self, x: Var) -> Normalized | None:
        found: dict[_Axes, Normalized] = {}
        for sums in self._sums(x):
            own = self._map_by(sums, x)
            # The last one: a linear attention's sum plus epsilon is at hand anyway.
            if own and all(m.degree == own.degree for m in found.values()):
                found[own.axes] = own
        maps = list(found.values())
        others = [m for m in maps[1:] if are_apart(m.axes, maps[0].axes)]
        if others:
            return dataclasses.replace(maps[0], then=others[0])
        return maps[0] if maps else None

    def _map_by(self, sums: _Image, x: Var) -> Normalized | None:
        """The map that divides rows by sums, if each has one and shares a group."""
        v = sums.variable
        own = [(i, n) for i, n in zip(sums.axes, v.aval.shape, strict=True) if n > 1]
        axes = tuple(i for i, _ in own if i is not None)
        if _has_no_rows(sums) or len(set(axes)) < len(own) or sums.is_partial:
            return None
        if not varies_in_groups(axes, x.aval.shape) or not self._is_unlike(x, v):
            return None
        return Normalized(None, v, False, axes, True, degree=sums.degree)

    def are_unlike(self, x: Var) -> bool:
        """Whether rows or segments that share groups have sums near a pole."""
        return any(
            self._is_unlike(x, sums.variable)
            if _has_no_rows(sums)
            else self._map_by(sums, x) is not None
            for sums in self._sums(x)
        )

    def has_parts(self, x: Var) -> bool:
        """Whether several sums along the same rows are near a pole: a part of the row.

        A contrastive loss that adds positives, log(sum(e * mask) / sum(e)), divides by
        both: their noise, by the row's largest, is magnified by the part's inverse.
        """
        found: dict[_Axes, set[Var | None]] = {}
        for sums in self._sums(x):
            own = self._map_by(sums, x)
            if own is not None:
                found.setdefault(own.axes, set()).add(sums.total)
        return any(len(totals) > 1 for totals in found.values())

    def is_exponential(self, x: Var) -> bool:
        """Whether it is one, or a copy in another dtype."""
        eqn = self._maker(x, CASTS)
        return eqn is not None and eqn.primitive.name in EXPONENTIALS

    def _is_unlike(self, x: Var, sums: Var) -> bool:
        """Whether the sums may have any size, and a pole magnifies that."""
        is_shifted = self.is_shifted(x, fewest=sums.aval.size)
        margin = math.inf if self.is_exponential(x) else MARGIN
        return not is_shifted and self._is_near_pole(sums, margin)

    def _sums(self, x: Var) -> Iterator[_Image]:
        """Sums over some axes, also with weights: reductions, products, segments."""
        todo = [_Image(x, tuple(range(x.aval.ndim)), 1)]
        seen = {x}
        while todo:
            image = todo.pop(0)
            is_smaller = image.variable.aval.size < x.aval.size
            is_sum = image.total is not None and is_smaller
            if is_sum or _is_by_segment(image):
                yield image
            for eqn in self.users.get(image.variable, ()):
                if len(eqn.outvars) != 1 or eqn.outvars[0] in seen:
                    continue
                found = _result(eqn, image)
                if is_sum and not _is_by_numbers(eqn):
                    continue
                if found is not None:
                    if not is_sum and eqn.primitive.name in _LEAVING_OUT:
                        found = found._replace(is_partial=True)
                    seen.add(found.variable)
                    todo.append(found)

    def _is_near_pole(self, sums: Var, margin: float) -> bool:
        """Whether a function with a pole is taken that no bound keeps away from it.

        And not something else where the sums are small: an mLSTM divides by max(|sum|,
        exp(-m)), and its queries, stored over |sum|, erred by 0.1 gradients at 8 bits.
        """
        todo, seen = [sums], {sums}
        while todo:
            v = todo.pop()
            for eqn in self.users.get(v, ()):
                argument, pole = pole_in(eqn)
                if argument is v:
                    lo, hi = interval_of(v, self.intervals)
                    if lo < pole + margin and hi > pole - MARGIN:
                        return True
                name = eqn.primitive.name
                is_numerator = name != "div" or eqn.invars[0] is v
                is_bounded = name == "max" and not _is_by_numbers(eqn)
                if name in _GROWING | MOVES and is_numerator and not is_bounded:
                    todo += [out for out in eqn.outvars if out not in seen]
                    seen.update(eqn.outvars)
        return False

    def is_shifted(self, x: Var, fewest: int) -> bool:
        """Whether exponentials are those less at least so many maxima."""
        eqn = self._maker(x, CASTS)
        if eqn is None or not self.is_exponential(x):
            return False
        scaled = CASTS | COPIES | {"mul", "div"}
        eqn = self._maker(eqn.invars[0], scaled)
        if eqn is None or eqn.primitive.name != "sub":
            return False
        todo, seen = variables_in(eqn.invars[1:]), set[Var]()
        while todo:
            v = todo.pop()
            maker = self.producers.get(v)
            if v in seen or maker is None or maker.primitive.name not in _SHIFTING:
                continue
            seen.add(v)
            if maker.primitive.name in _MAXIMA and v.aval.size >= fewest:
                return True
            todo += variables_in(maker.invars)
        return False

    def _maker(self, v: Atom, past: frozenset[str]) -> Eqn | None:
        """The equation that makes a value, past others with these names."""
        eqn = None if is_literal(v) else self.producers.get(v)
        while eqn is not None and eqn.primitive.name in past:
            inputs = variables_in(eqn.invars)
            eqn = self.producers.get(inputs[0]) if inputs else None
        return eqn


def _result(eqn: Eqn, image: _Image) -> _Image | None:
    """The image that an equation makes; None where sizes do not go on."""
    v, axes, degree, total, is_partial = image
    name, out = eqn.primitive.name, eqn.outvars[0]
    is_same = out.aval.shape == v.aval.shape
    if name == "square" or (name == "integer_pow" and eqn.params["y"] > 0):
        return _Image(out, axes, degree * eqn.params.get("y", 2), total, is_partial)
    if name in ("add", "add_any") and not any(map(_is_number, eqn.invars)):
        return None  # a residual join
    if name == "div" and eqn.invars[0] is not v:
        return None
    if name in _GROWING and is_same:
        return _Image(out, axes, degree * (1 + is_square(eqn)), total, is_partial)
    if name in ("reduce_sum", "reduce_max"):
        left = [i for k, i in enumerate(axes) if k not in eqn.params["axes"]]
        return _Image(out, tuple(left), degree, total or out, is_partial)
    if name == "dot_general" and contracts(eqn):
        return _product(eqn, image)
    if name in SCATTERS and eqn.invars[-1] is v:
        segments = (_SEGMENT,) * out.aval.ndim
        return _Image(out, segments, degree, total or out, is_partial)
    if name in MOVES | {"slice", "dynamic_slice"} and eqn.invars[0] is v:
        return _Image(out, _moved(eqn, axes), degree, total, is_partial)
    return None


def _is_by_segment(image: _Image) -> bool:
    """Whether these are sums over segments, whose axes are not the array's."""
    return _SEGMENT in image.axes


def _has_no_rows(image: _Image) -> bool:
    """Whether no axes say which of the array's elements a sum adds.

    Or not in their order, as after a transpose.
    """
    sizes = zip(image.axes, image.variable.aval.shape, strict=True)
    own = [i for i, n in sizes if n > 1 and i is not None]
    return _is_by_segment(image) or _MIXED in own or own != sorted(own)


def _is_number(v: Atom) -> bool:
    return not v.aval.shape


def _is_by_numbers(eqn: Eqn) -> bool:
    """Whether an equation has one array, and numbers beside it: a mean, an epsilon."""
    return sum(not _is_number(v) for v in eqn.invars) == 1


def _product(eqn: Eqn, image: _Image) -> _Image:
    """A product that sums an array, with weights or with itself."""
    v, axes, degree, total, is_partial = image
    left, right = eqn.invars
    contracted, batch = eqn.params["dimension_numbers"]
    own = 0 if left is v else 1
    labels = [axes[i] for i in batch[own]]
    for side, operand in enumerate((left, right)):
        inside = (*contracted[side], *batch[side])
        free = [i for i in range(operand.aval.ndim) if i not in inside]
        labels += [axes[i] if side == own else None for i in free]
    out = eqn.outvars[0]
    degree *= 1 + (left is right)
    return _Image(out, tuple(labels), degree, total or out, is_partial)


def _moved(eqn: Eqn, axes: Sequence[int | None]) -> tuple[int | None, ...]:
    """The axes after a move."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if before == after and eqn.primitive.name not in ("transpose", "rev"):
        return tuple(axes)
    labels: list[int | None] = [None] * len(after)
    if eqn.primitive.name == "broadcast_in_dim":
        for i, k in zip(axes, eqn.params["broadcast_dimensions"], strict=True):
            labels[k] = i
    elif eqn.primitive.name == "transpose":
        labels = [axes[k] for k in eqn.params["permutation"]]
    elif [n for n in before if n > 1] == [n for n in after if n > 1]:
        long = [i for i, n in zip(axes, before, strict=True) if n > 1]
        rest = iter(long)
        labels = [next(rest) if n > 1 else None for n in after]
    else:  # a slice, or a reshape that joins or splits some axes
        mixed: list[int | None] = [_MIXED if n > 1 else None for n in after]
        first = _num_alike(before, after)
        last = min(_num_alike(before[::-1], after[::-1]), len(after) - first)
        middle = mixed[first : len(after) - last]
        labels = [*axes[:first], *middle, *axes[len(axes) - last :]]
    return tuple(labels)


def _num_alike(sizes: Shape, others: Shape) -> int:
    """How many sizes are equal before the first that is not."""
    pairs = enumerate(zip(sizes, others, strict=False))
    shorter = min(len(sizes), len(others))
    return next((k for k, (n, m) in pairs if n != m), shorter)

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

from jaxact._form.images import (
    GROWING,
    LEAVING_OUT,
    Axes,
    Image,
    has_no_rows,
    has_weights,
    image_in,
    is_by_numbers,
    is_by_segment,
)
from jaxact._form.intervals import Interval, interval_of
from jaxact._form.pole_arguments import MARGIN, pole_in
from jaxact._jaxpr.primitives import (
    CASTS,
    COMPARISONS,
    COPIES,
    EXPONENTIALS,
    MOVES,
)
from jaxact._jaxpr.read import (
    contracts,
    is_float,
    is_literal,
    keeps_elements,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Eqn, Producers, Shape, Var
from jaxact._plan.storage import Normalized

# Groups with the default size hold one row if it has at least so many elements.
_LONG_ROW = 128
_MAXIMA = frozenset("reduce_max cummax pmax scatter-max scatter_max".split())
# From maxima to the value that scores are shifted by.
_SHIFTING = MOVES | _MAXIMA | COMPARISONS | frozenset("max select_n gather".split())
# Values that a local derivative is made from, at most: that of |x|^3 has nine.
_NEAR = 16


def varies_in_groups(axes: Axes, shape: Shape) -> bool:
    """Whether a statistic with these axes varies inside a group of codes."""
    constant = math.prod(shape[max(axes, default=-1) + 1 :])
    return bool(axes) and constant < _LONG_ROW


def are_apart(axes: Axes, others: Axes) -> bool:
    """Whether two statistics with these axes belong to rows and to columns."""
    return not set(axes) <= set(others) and not set(others) <= set(axes)


@dataclasses.dataclass(frozen=True, eq=False)
class RowSums:
    """The sums along rows in one program, by the arrays that they sum.

    Attributes:
      users: the equations that read each variable.
      known: the maps that were asked for.
      partial: whether sums near a pole leave out elements of each that was asked for.
    """

    producers: Producers
    users: Mapping[Var, Sequence[Eqn]]
    intervals: dict[Var, Interval]
    known: dict[Var, Normalized | None] = dataclasses.field(default_factory=dict)
    partial: dict[Var, bool] = dataclasses.field(default_factory=dict)

    def normalizing(self, x: Var) -> Normalized | None:
        """The map that divides by sums near a pole, if groups of codes need it.

        A local derivative has the rows' sizes too: that of a sum of cubes has squares.
        """
        for v, degree in self._grown_from(x):
            own = self._by_own_sums(v)
            if own is not None:
                return own.of_power(degree)
        return None

    def _grown_from(self, x: Var) -> Iterator[tuple[Var, int]]:
        """An array and those that it grows like a power of, nearest first."""
        todo = [(x, 1)]
        for _ in range(_NEAR):
            if not todo:
                return
            v, degree = todo.pop(0)
            yield v, degree
            eqn = self.producers.get(v)
            if eqn is not None:
                todo += self._operands(eqn, degree)

    def _operands(self, eqn: Eqn, degree: int) -> Iterator[tuple[Var, int]]:
        """The operands that an array grows like a power of, as it is that of others."""
        name, inputs = eqn.primitive.name, eqn.invars
        if name == "square" or (name == "integer_pow" and eqn.params["y"] > 0):
            degree *= eqn.params.get("y", 2)
        elif name not in GROWING:
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
        found: dict[Axes, Normalized] = {}
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

    def _map_by(self, sums: Image, x: Var) -> Normalized | None:
        """The map that divides rows by sums, if each has one and shares a group."""
        v = sums.variable
        own = [(i, n) for i, n in zip(sums.axes, v.aval.shape, strict=True) if n > 1]
        axes = tuple(i for i, _ in own if i is not None)
        is_partial = sums.is_partial and not self.is_exponential(x)
        if has_no_rows(sums) or len(set(axes)) < len(own) or is_partial:
            return None
        if not varies_in_groups(axes, x.aval.shape) or not self._is_unlike(x, v):
            return None
        return Normalized(None, v, False, axes, True, degree=sums.degree)

    def are_unlike(self, x: Var) -> bool:
        """Whether rows or segments that share groups have sums near a pole."""
        return any(
            self._is_unlike(x, sums.variable)
            if has_no_rows(sums) or has_weights(sums)
            else self._map_by(sums, x) is not None
            for sums in self._sums(x)
        )

    def weighted(self, x: Var) -> list[Var]:
        """Sums near a pole with weights for each, or in windows or segments."""
        return [
            sums.variable
            for sums in self._sums(x)
            if (has_no_rows(sums) or has_weights(sums))
            and self._is_unlike(x, sums.variable)
        ]

    def may_vanish(self, x: Var) -> bool:
        """Whether a mask leaves sums near a pole few elements: small ones, at times.

        The first of a causal row is alone there: l^2 / (l^2 + 1e-6) has a slope where
        l is near 1e-3, and rounded among larger ones it erred by 10 gradients at 8
        bits; |l| after its product with values by 1. So does this product.
        """
        for v, _ in self._grown_from(x):
            if self._by_own_sums(v) is not None:
                break
            if self._leaves_out(v):
                return True
        eqn = self.producers.get(x)
        if eqn is None or eqn.primitive.name != "dot_general" or not contracts(eqn):
            return False
        summed = (v for u in variables_in(eqn.invars) for v, _ in self._grown_from(u))
        return any(map(self._leaves_out, summed))

    def _leaves_out(self, x: Var) -> bool:
        if x not in self.partial:
            eqn = self.producers.get(x)
            is_filler = eqn is not None and not any(v.aval.shape for v in eqn.invars)
            # A softmax's largest element is alone at worst.
            is_bounded = is_filler or self.is_exponential(x)
            self.partial[x] = not is_bounded and any(
                sums.is_masked and self._is_unlike(x, sums.variable)
                for sums in self._sums(x)
            )
        return self.partial[x]

    def _is_mask(self, eqn: Eqn) -> bool:
        """Whether it selects by positions: not a ReLU, or an ELU."""
        (predicate, *_) = eqn.invars
        maker = None if is_literal(predicate) else self.producers.get(predicate)
        compared = () if maker is None else variables_in(maker.invars)
        return eqn.primitive.name == "select_n" and not any(map(is_float, compared))

    def has_parts(self, x: Var) -> bool:
        """Whether several sums along the same rows are near a pole: a part of the row.

        A contrastive loss that adds positives, log(sum(e * mask) / sum(e)), divides by
        both: their noise, by the row's largest, is magnified by the part's inverse.
        """
        found: dict[Axes, set[Var | None]] = {}
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

    def _sums(self, x: Var) -> Iterator[Image]:
        """Sums over some axes, also with weights: reductions, products, segments."""
        todo = [Image(x, tuple(range(x.aval.ndim)), 1)]
        seen = {x}
        while todo:
            image = todo.pop(0)
            # Not an activation's product with a kernel, which grows like it at most.
            is_weighted = self.is_exponential(x) and image.degree == 1
            is_smaller = image.variable.aval.size < x.aval.size + is_weighted
            is_sum = image.total is not None and is_smaller
            if is_sum or is_by_segment(image):
                yield image
            for eqn in self.users.get(image.variable, ()):
                if len(eqn.outvars) != 1 or eqn.outvars[0] in seen:
                    continue
                found = image_in(eqn, image)
                if is_sum and not is_by_numbers(eqn):
                    continue
                if found is not None:
                    if not is_sum and eqn.primitive.name in LEAVING_OUT:
                        is_masked = image.is_masked or self._is_mask(eqn)
                        found = found._replace(is_partial=True, is_masked=is_masked)
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
                is_bounded = name == "max" and not is_by_numbers(eqn)
                if name in GROWING | MOVES and is_numerator and not is_bounded:
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
        # Whose maxima are not 0: a Performer's exp(z - |x|^2 / 2 - max(z)).
        shifted = self._maker(eqn.invars[0], CASTS)
        is_sum = shifted is not None and shifted.primitive.name in ("add", "sub")
        terms = variables_in(shifted.invars) if shifted and is_sum else []
        todo, seen = variables_in(eqn.invars[1:]), set[Var]()
        while todo:
            v = todo.pop()
            maker = self.producers.get(v)
            if v in seen or maker is None or maker.primitive.name not in _SHIFTING:
                continue
            seen.add(v)
            if maker.primitive.name in _MAXIMA and v.aval.size >= fewest:
                return maker.invars[0] not in terms
            todo += variables_in(maker.invars)
        return False

    def _maker(self, v: Atom, past: frozenset[str]) -> Eqn | None:
        """The equation that makes a value, past others with these names."""
        eqn = None if is_literal(v) else self.producers.get(v)
        while eqn is not None and eqn.primitive.name in past:
            inputs = variables_in(eqn.invars)
            eqn = self.producers.get(inputs[0]) if inputs else None
        return eqn

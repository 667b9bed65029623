"""Store the normalized value of a normalization, not the raw one.

A group of codes shares one range. Where channels lie inside a group, a channel with a
small deviation gets the step of the largest, and the channels' means widen the range
further. The program's own mean and inverse deviation, which are exact, take both out
before encoding and put them back after decoding; the map is affine, so nothing else
changes. On a ResNet at 2 bits it halves the variance of the rounding, in units of xhat.

So it is with a norm over a short axis, whose rows share a group: the heads of queries
and keys, the channels of a GroupNorm. With rows of 16 elements whose scales span a
factor of 1000 the noise at 8 bits was 15 times the gradient. Statistics that are
constant inside a group need no such care: its zero point and scale absorb them.

So it is with any other quotient by a statistic: attention that is normalized over the
queries (Point Cloud Transformer), or by sums over a row's features (Performer). The
slope in the divisor is -x / d^2: where d has size 1e-6 for a row in a group, the
group's step is 1e12 times that. For 64 tokens the noise at 8 bits was 76 times the
gradient.

Segments' statistics, such as the sums in a softmax over a graph's edges, are gathered
by each segment's elements. They are gathered again where an array is stored.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

from jaxact._form.intervals import Interval, interval_of, intervals_in
from jaxact._form.roots import Root, root_in
from jaxact._form.row_sums import RowSums, are_apart, varies_in_groups
from jaxact._form.statistics import spread_sums
from jaxact._jaxpr.primitives import (
    CASTS,
    COPIES,
    MATMULS,
    MOVES,
    RESHAPES,
    SCATTERS,
)
from jaxact._jaxpr.read import (
    contracts,
    is_literal,
    is_widened,
    keeps_elements,
    scales_rows,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Eqn, Predicate, Producers, Shape, Var
from jaxact._plan.program import Program, found_once
from jaxact._plan.storage import Normalized

# Of several arrays or elements of one size they make something of that size.
_ADDING = (
    MOVES
    | SCATTERS
    | frozenset("abs add add_any gather max reduce_max reduce_sum".split())
)
# Leave elements in their order.
_KEEPING_ORDER = CASTS | RESHAPES - {"transpose", "rev"}
# The deviations of variances from this on are far from the ends of float32.
_LEAST_VARIANCE = 1e-20

_Axes: TypeAlias = tuple[int, ...]


class _Statistic(NamedTuple):
    """A value that is broadcast to an array, of which it has these axes.

    `is_gathered`: it has all of them, gathered from a value with other ones.
    """

    variable: Var
    axes: _Axes
    is_gathered: bool = False


class _Scale(NamedTuple):
    """A divisor of rows, or if it is inverse a factor."""

    variable: Var
    is_inverse: bool
    may_vanish: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Norms:
    """The normalizations in one program.

    Attributes:
      users: the equations that read each variable.
      intervals: for each variable whose values have a bound.
      sums: those along rows.
      spread: products that give sums to each of the elements that they sum.
    """

    producers: Producers
    users: dict[Var, list[Eqn]]
    intervals: dict[Var, Interval]
    sums: RowSums
    spread: Mapping[Var, set[Var]]

    def normalizing(self, x: Var) -> Normalized | None:
        """The program's own normalization for `x`, if groups of codes need it."""
        for centered, means in self._results(x, "sub"):
            found = self._scaled_by(centered)
            if found is None or len(means) != 1:
                continue
            (mean,) = means
            if (mean.axes, mean.is_gathered) == (found.axes, found.is_gathered):
                own = centered if self._is_difference(centered, x, mean) else None
                return dataclasses.replace(found, mean=mean.variable, centered=own)
        return self._scaled_by(x) or self.sums.normalizing(x)

    def _is_difference(self, v: Var, x: Var, mean: _Statistic) -> bool:
        """Whether `v` is x - mean: not x - 0.5 mean, nor with either in fewer bits.

        Any mean is good to store `x` by; to have `v` back it takes this one.
        """
        first, second = map(self._as_computed, self.producers[v].invars)
        is_first = first is self._as_computed(x)
        return is_first and self._statistic(second, x.aval.shape) == mean

    def _as_computed(self, v: Atom) -> Atom:
        """A value before it is copied, or cast to a dtype that holds it."""
        while not is_literal(v) and v in self.producers:
            eqn = self.producers[v]
            if eqn.primitive.name == "convert_element_type":
                if not is_widened(eqn.invars[0].aval.dtype, v.aval.dtype):
                    break
            elif eqn.primitive.name not in COPIES:
                break
            v = eqn.invars[0]
        return v

    def _scaled_by(self, x: Var) -> Normalized | None:
        """A map without a mean, by a deviation or a divisor among the factors of `x`.

        A norm written by hand may multiply with the gain before it divides. Cosines
        after a product, (a @ b.T) / |a| / |b|, have two scales.
        """
        found: Normalized | None = None
        todo = [x]
        while todo:
            v = todo.pop()
            for name in ("mul", "div"):
                for product, factors in self._results(v, name):
                    for factor in factors:
                        own = self._map_by(factor, name == "div", x)
                        if found is None or own is None:
                            found = own or found
                        elif not (found.is_gathered or own.is_gathered) and are_apart(
                            found.axes, own.axes
                        ):
                            return dataclasses.replace(found, then=own)
                    # By segment, its rows have other sizes than those of `x`.
                    if not any(factor.is_gathered for factor in factors):
                        todo.append(product)
        return found

    def _map_by(
        self, factor: _Statistic, is_divisor: bool, x: Var
    ) -> Normalized | None:
        """The map by one factor of `x`, if it is a scale that varies in groups."""
        if not varies_in_groups(factor.axes, x.aval.shape):
            return None
        scale = self._scale(factor.variable, is_divisor, x)
        if scale is None:
            return None
        return Normalized(
            None,
            scale.variable,
            scale.is_inverse,
            factor.axes,
            scale.may_vanish,
            factor.is_gathered,
        )

    def _scale(self, factor: Var, is_divisor: bool, x: Var) -> _Scale | None:
        """The scale that multiplies or divides rows of `x`."""
        root = self._root(factor, is_divisor)
        if root is not None:
            v, is_inverse, _ = root
            return _Scale(v, is_inverse, self._may_vanish(v))
        segments = self._gathered_from(factor)
        root = None if segments is None else self._root(segments, is_divisor)
        if root is not None:
            return _Scale(factor, root.is_factor_inverse, True)
        # Sums may vanish, and overflow.
        divisor = self._divisor(factor, is_divisor)
        if divisor is not None:
            return _Scale(divisor, False, True) if self._is_scale(divisor, x) else None
        divisor = None if segments is None else self._divisor(segments, is_divisor)
        if divisor is not None and self._is_scale(divisor, x):
            return _Scale(factor, not is_divisor, True)
        return None

    def _root(self, factor: Var, is_divisor: bool) -> Root | None:
        """The root that a program divides by.

        Not that which a gated recurrent unit multiplies with, x sqrt(1 - a^2).
        """
        root = root_in(factor, self.producers)
        divides = root is not None and root.is_factor_inverse is not is_divisor
        return root if divides else None

    def _may_vanish(self, deviation: Var) -> bool:
        """Whether no epsilon under its root keeps a deviation away from 0."""
        lo, _ = interval_of(self.producers[deviation].invars[0], self.intervals)
        return lo < _LEAST_VARIANCE

    def _divisor(self, factor: Var, is_divisor: bool) -> Var | None:
        """The statistic that an array is divided by, or multiplied with 1 over."""
        if is_divisor:
            return factor
        eqn = self.producers.get(factor)
        while eqn is not None and eqn.primitive.name in _KEEPING_ORDER:
            (operand,) = eqn.invars
            is_same = operand.aval.size == factor.aval.size
            eqn = self.producers.get(operand) if is_same else None
        if eqn is None:
            return None
        if eqn.primitive.name == "integer_pow" and eqn.params["y"] == -1:
            return next(iter(variables_in(eqn.invars)), None)
        if eqn.primitive.name != "div":
            return None
        one, divisor = eqn.invars
        return divisor if is_literal(one) and not is_literal(divisor) else None

    def _is_scale(self, divisor: Var, x: Var) -> bool:
        """Whether the sizes of an array's rows, as it is read, go with a divisor's.

        The divisor adds up the array, or the array is read nowhere else. Else its rows
        may be alike where the divisor's are not: `h @ w + h / degrees`.
        """
        adding = _ADDING | MATMULS if self.spread else _ADDING
        if self._is_made_from(divisor, x, adding):
            return True
        todo = [x]
        while todo:
            v = todo.pop()
            for eqn in self.users.get(v, ()):
                name = eqn.primitive.name
                others = [u for u in eqn.invars if u is not v]
                by_number = name == "mul" and others and not others[0].aval.shape
                if by_number or name in CASTS | COPIES | {"neg"}:
                    todo += eqn.outvars
                elif not (name in ("mul", "div") or scales_rows(eqn, v)) or not others:
                    return False
                elif not self._is_made_from(others[0], divisor):
                    return False
        return True

    def _is_made_from(
        self, v: Atom, source: Var, by: Collection[str] | None = None
    ) -> bool:
        """Whether a value depends on another one, by some operations alone."""
        todo = variables_in([v])
        seen = set(todo)
        while todo:
            u = todo.pop()
            if u is source:
                return True
            eqn = self.producers.get(u)
            if eqn is None or (by is not None and eqn.primitive.name not in by):
                continue
            new = variables_in(eqn.invars)
            todo += [w for w in new if w not in seen]
            seen.update(new)
        return False

    def _results(self, x: Var, name: str) -> Iterator[tuple[Var, list[_Statistic]]]:
        """(result, factors) where `name` combines `x` with a product of statistics."""
        todo = [x]
        while todo:
            v = todo.pop()
            for eqn in self.users.get(v, ()):
                # A gain that is broadcast has not the axes of the array it scales.
                if any(out.aval.shape != x.aval.shape for out in eqn.outvars):
                    continue
                if eqn.primitive.name in CASTS | COPIES:
                    todo.append(eqn.outvars[0])
                elif eqn.primitive.name == name or (
                    name == "mul" and scales_rows(eqn, v)
                ):
                    others = [u for u in eqn.invars if u is not v]
                    if name != "mul" and eqn.invars[0] is not v:
                        continue  # mean - x, or something / x
                    for u in variables_in(others):
                        factors = self._factors(u, x.aval.shape)
                        if factors is None and self._is_spread(u, x.aval.shape):
                            axes = tuple(range(len(x.aval.shape)))
                            factors = [_Statistic(u, axes, is_gathered=True)]
                        if factors is not None:
                            yield eqn.outvars[0], factors

    def _factors(self, v: Var, shape: Shape) -> list[_Statistic] | None:
        """The statistics whose product `v` is; None if it is another value.

        Flax multiplies the inverse deviation of rows with a gain by channel first.
        """
        statistic = self._statistic(v, shape)
        if statistic is not None:
            return [statistic]
        eqn = self.producers.get(v)
        if eqn is None or eqn.primitive.name not in CASTS | COPIES | {"mul"}:
            return None
        factors: list[_Statistic] = []
        for u in dict.fromkeys(variables_in(eqn.invars)):  # a square's operand once
            inside = self._factors(u, shape)
            if inside is None:
                return None
            factors += inside
        return factors

    def _statistic(self, v: Var, shape: Shape) -> _Statistic | None:
        """A value that is broadcast to an array, or gathered for its elements."""
        axes: Sequence[int] = range(len(v.aval.shape))  # none of a scalar
        eqn = self.producers.get(v)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            v, axes = eqn.invars[0], eqn.params["broadcast_dimensions"]
        if is_literal(v):
            return None
        if v.aval.size >= math.prod(shape):
            if v.aval.shape != shape or not self._is_gathered(v):
                return None
            return _Statistic(v, tuple(range(len(shape))), is_gathered=True)
        sizes = zip(axes, v.aval.shape, strict=True)
        return _Statistic(v, tuple(axis for axis, n in sizes if n > 1))

    def _is_gathered(self, v: Var) -> bool:
        """Whether elementwise equations make a value from gathered ones alone."""
        return v in self._gathered

    @functools.cached_property
    def _gathered(self) -> Set[Var]:
        return self._made_of(lambda u: self._gathered_from(u) is not None)

    def _is_spread(self, v: Var, shape: Shape) -> bool:
        """Whether elementwise equations make a value from others repeated along axes.

        The norms of rows and columns, |a| * |b| + 1e-8; an outer product.
        """
        return v.aval.shape == shape and v in self._repeated

    @functools.cached_property
    def _repeated(self) -> Set[Var]:
        def is_repeated(u: Var) -> bool:
            eqn = self.producers[u]
            is_outer = eqn.primitive.name == "dot_general" and not contracts(eqn)
            is_smaller = all(w.aval.size < u.aval.size for w in eqn.invars)
            return is_smaller and (is_outer or keeps_elements(eqn))

        return self._made_of(is_repeated)

    def _made_of(self, is_source: Predicate) -> Set[Var]:
        """Values that elementwise equations and moves make from sources alone."""
        has_source: dict[Var, bool] = {}
        for v, eqn in self.producers.items():  # in the program's order
            operands = variables_in(eqn.invars)
            if is_source(v):
                has_source[v] = bool(operands)
            elif keeps_elements(eqn) and all(u in has_source for u in operands):
                has_source[v] = any(has_source[u] for u in operands)
        return {v for v, has in has_source.items() if has}

    def _gathered_from(self, v: Var) -> Var | None:
        """The value whose elements `v` gathers: by indices, or one-hot rows."""
        eqn = self.producers.get(v)
        while eqn is not None and eqn.primitive.name in MOVES:
            inputs = variables_in(eqn.invars)
            if not inputs or inputs[0].aval.size < v.aval.size:
                return None
            v, eqn = inputs[0], self.producers.get(inputs[0])
        if v in self.spread:
            return next(iter(self.spread[v]))
        if eqn is None or eqn.primitive.name != "gather":
            return None
        return next(iter(variables_in(eqn.invars[:1])), None)


@found_once
def norms_in(program: Program) -> Norms:
    """The normalizations in a program."""
    producers, users = program.producers, program.readers
    intervals = intervals_in(program)
    sums = RowSums(producers, users, intervals)
    return Norms(producers, users, intervals, sums, spread_sums(program))

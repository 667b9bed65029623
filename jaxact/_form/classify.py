"""Find each value's exact-affine class, equation by equation."""

import dataclasses
from collections.abc import Collection

from jaxact._form.affine_bases import base_of
from jaxact._form.classes import MOST_BITS, Classes
from jaxact._form.pole_arguments import pole_in
from jaxact._form.small_integers import integer_widths
from jaxact._form.softmax import softmaxes
from jaxact._form.statistics import find_statistics
from jaxact._jaxpr.flow import Facts, fact_of
from jaxact._jaxpr.primitives import EXPONENTIALS
from jaxact._jaxpr.read import call_body, is_cheap, is_float, is_literal, variables_in
from jaxact._jaxpr.types import Eqn, Predicate, Var
from jaxact._plan.facts import is_activation
from jaxact._plan.program import Program


def classify(
    program: Program,
    small_size: int,
    inexact: set[Var],
    kept: Collection[Var] = (),
    is_normalized: Predicate = lambda v: False,
    is_summed: Predicate = lambda v: False,
    multiplied: Collection[Var] = (),
) -> Classes:
    """Find every variable's class.

    Args:
      small_size: values with at most this many elements are exact.
      inexact: inputs that the backward pass can have only as they are stored.
      kept: variables that are stored exactly, whatever they cost.
      is_normalized: whether a variable is the operand of a norm, and stored through it.
      is_summed: whether it is stored over its rows' sums, which may vanish.
      multiplied: bases that are stored in place of products with `kept` values.
    """
    classes = Classes(
        find_statistics(program),
        softmaxes={s.output: s.exponential for s in softmaxes(program)},
        widths=integer_widths(program, small_size),
        multiplied=set(multiplied),
    )
    finder = _Finder(program, classes, small_size, kept, is_normalized, is_summed)
    finder.find(inexact)
    return classes


@dataclasses.dataclass(frozen=True, eq=False)
class _Finder:
    """Fills `classes`; the other attributes are arguments of `classify`."""

    program: Program
    classes: Classes
    small_size: int
    kept: Collection[Var]
    is_normalized: Predicate
    is_summed: Predicate

    def find(self, inexact: set[Var]) -> None:
        """See `classify`."""
        jaxpr, classes = self.program.jaxpr, self.classes
        for v in (*jaxpr.constvars, *jaxpr.invars):
            classes.cost[v], classes.needed[v] = 0.0, frozenset()
            if not is_float(v):
                classes.random.add(v)
            if v in inexact and v.aval.size > self.small_size:
                self._round(v, v)
        for eqn in jaxpr.eqns:
            self._note(eqn)
            for v in eqn.outvars:
                self._classify(eqn, v)
            if eqn.primitive.name == "name" and not is_literal(eqn.invars[0]):
                base = classes.base.get(eqn.invars[0], eqn.invars[0])
                classes.names.setdefault(base, []).append(eqn)

    def _note(self, eqn: Eqn) -> None:
        """Note facts about an equation that hold whatever its outputs' classes are."""
        classes = self.classes
        classes.masks.note(eqn)
        if eqn.primitive.name in EXPONENTIALS:
            classes.exponentials.update(eqn.outvars)
        if classes.random.issuperset(variables_in(eqn.invars)):
            classes.random.update(eqn.outvars)
        if pole_in(eqn)[0] in classes.spared:
            classes.inverses.update(eqn.outvars)

    def _classify(self, eqn: Eqn, v: Var) -> None:
        """Give an output its base, or note that it is exact and how."""
        base = None
        if not _is_parameter(eqn, v, self.program.facts):
            base = base_of(eqn, v, self.classes, self.program, self.small_size)
        if base not in (None, v):
            base = self._base_before_norm(v, base)
        if base is None and not self._settle(eqn, v):
            base = v
        self._check_part(v)
        if base is not None:
            self._round(v, base)

    def _base_before_norm(self, v: Var, base: Var) -> Var:
        """The base, or `v` itself, of which its base is a part then.

        0.5 x before a norm, which tells the scales of its channels alone.
        """
        if not self.is_normalized(v) or self.is_normalized(base):
            return base
        self.classes.parts[v] = base
        return v

    def _check_part(self, v: Var) -> None:
        """Let `v` be no part where the noise of the whole would be magnified."""
        whole = self.classes.parts.get(v)
        if whole is None or whole in self.classes.exponentials:
            return
        if self.is_summed(v) and not self.is_summed(whole):
            del self.classes.parts[v]

    def _round(self, v: Var, base: Var) -> None:
        """Let a base be rounded, and `v` with it, unless `v` is kept exactly."""
        classes = self.classes
        if v in self.kept:
            classes.cost[v], classes.needed[v] = 0.0, frozenset()
            classes.spared.add(v)
        else:
            classes.base[v] = base

    def _settle(self, eqn: Eqn, v: Var) -> bool:
        """Note an exact output's cost; False if it is better stored as a base."""
        classes = self.classes
        cost, needed = self._bytes(v), frozenset([v])
        told = self._told(eqn)
        again = told if told is not None and told[0] <= cost else None
        cost, needed = again or (cost, needed)
        if is_float(v) and v.aval.size > self.small_size:
            # Near a pole: log(p) times random numbers, or a product of softmaxes that
            # is normalized again, has slopes of any size there.
            if told and not classes.spared.isdisjoint(variables_in(eqn.invars)):
                classes.spared.add(v)
            elif self._is_worth_a_codec(v, cost) and not (
                again and _is_count(eqn, classes)
            ):
                return False
        if again:
            classes.cheap.add(v)
        classes.cost[v], classes.needed[v] = cost, needed
        return True

    def _told(self, eqn: Eqn) -> tuple[float, frozenset[Var]] | None:
        """The values that an equation's outputs are computed again from, if they are.

        A cast weight, a broadcast mean, an embedded row.

        Returns:
          Their bytes, where they are kept, and the values; None: it is not cheap, or
          an operand is rounded.
        """
        classes, sources = self.classes, set(variables_in(eqn.invars))
        if eqn.effects or not all(map(classes.is_exact, sources)):
            return None
        if not _is_count(eqn, classes) and not is_cheap(eqn):
            return None
        needed = frozenset().union(*(classes.needed[x] for x in sources))
        return sum(classes.cost[x] for x in needed), needed

    def _bytes(self, v: Var) -> float:
        """Those that keeping it takes; of a mask a bit for each element."""
        if v.aval.dtype == bool:
            return v.aval.size / 8
        itemsize = getattr(v.aval.dtype, "itemsize", 4)
        return self.classes.widths.get(v, 8 * itemsize) * v.aval.size / 8

    def _is_worth_a_codec(self, v: Var, cost: float) -> bool:
        """Whether an exact activation costs much: a look-up by one-hot rows."""
        if v in self.classes.statistics or not is_activation(self.program.facts, v):
            return False
        return 8 * cost > MOST_BITS * v.aval.size


def _is_parameter(eqn: Eqn, v: Var, facts: Facts) -> bool:
    """Whether a call has it from parameters alone, whatever else the call computes.

    A weight that a shard_map copies to each device, or that a branch returns for its
    backward pass, as before JAX 0.12; one that a custom rule's forward rule returns
    beside its result, as those of `nnx.custom_vjp` do.
    """
    if eqn.primitive.name in ("shard_map", "cond"):
        return not is_activation(facts, v)
    return call_body(eqn) is not None and not fact_of(facts, v)


def _is_count(eqn: Eqn, classes: Classes) -> bool:
    """Whether an output counts a mask's elements, which tell it.

    By the count each maximum's derivative divides, where several elements are largest:
    a pool by reshaping (DreamerV3's encoder), maxout, an EdgeConv's neighbours.
    """
    if eqn.primitive.name != "reduce_sum" or is_literal(eqn.invars[0]):
        return False
    return eqn.invars[0] in classes.masks.integers

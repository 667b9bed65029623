"""Operands that functions have a pole in, and values that they select from.

The slope of -log(softmax(z)[label]) is 1 / p, and is multiplied with p again: rounded
among a row's larger elements, a p of e^-20 erred by 5e4 gradients at 8 bits. An
element is selected by an index, or by a mask before a sum.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from jaxact._form.intervals import REALS, Interval, interval_of, intervals_in
from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr
from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES, POLES, SELECTIONS, SUMS
from jaxact._jaxpr.read import equations_behind, is_literal, is_square, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.program import Program, found_once

# An argument that stays this far from the pole has slopes within 10 (a logarithm's)
# or 100 (an inverse's): x / (1 + exp(-x)), log1p(exp(x)).
MARGIN = 0.1
# Those among them that are not large there themselves; their slopes are.
SMALL_NEAR_POLES = frozenset("log log2 log1p sqrt cbrt acosh".split())
# Elements of a sum that is small where these are, and not by its size alone.
_FEW = 64
# Results that a few probabilities may be added to.
MIXING = frozenset("dot_general scatter-add scatter_add".split())
# Functions with a slope that vanishes where they are zero, or end.
_FLAT = EXPONENTIALS | frozenset(
    "expm1 log1p logistic tanh erf erfc square integer_pow sin cos".split()
)
# Results that are elements of the first operand, or that grow with a few of them.
_CHOICES = SELECTIONS | frozenset(
    "top_k reduce_max reduce_min reduce_prod cumsum cumprod cummax cummin".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """Operands that may come near their equation's pole, as far as bounds tell.

    Attributes:
      bounded: those that a bound is known for, or with a small number added, which
        says that the rest may be zero: log(iou + 1e-6). Without either nothing is
        known: that log(x) is taken says that x is positive.
      numerators: values that are divided by such an operand.
      mixtures: results that a few probabilities are added to.
    """

    program: Program
    bounded: Sequence[Var]
    others: Sequence[Var]
    divisors: Sequence[Var]
    numerators: Sequence[Var]
    mixtures: Set[Var]

    def behind(self, carried: Mapping[Var, Atom], with_sums: bool) -> set[Var]:
        """Values that they are made from, scaled, selected and added.

        Args:
          carried: in a scan's body, the output of the step before that an input is.
          with_sums: go past sums that a mask or an index selects from, and from those
            without a bound.
        """
        near = [*self.bounded]
        if with_sums:
            near += [*self.others, *self._divided_selections()]
        todo = [(v, False) for v in near]  # with whether it is summed
        seen = set(todo)
        while todo:
            v, is_sum = todo.pop()
            if v in carried:
                # A filter takes the logarithm of the last step's softmax.
                before = [(u, is_sum) for u in variables_in([carried[v]])]
                todo += [pair for pair in before if pair not in seen]
                seen.update(before)
            eqn = self.program.producers.get(v)
            if eqn is None or is_square(eqn):
                continue
            name, inputs = eqn.primitive.name, variables_in(eqn.invars)
            if name == "reduce_sum" and with_sums:
                is_sum = is_sum or not adds_few(eqn)
            elif name == "sort":
                inputs = variables_in([eqn.invars[eqn.outvars.index(v)]])
            elif name in _CHOICES:
                inputs, is_sum = inputs[:1], False
            elif not is_scaling(eqn) and v not in self.mixtures:
                continue
            is_sum = is_sum and name not in ("mul", "select_n")
            new = [(u, is_sum) for u in inputs if (u, is_sum) not in seen]
            todo += new
            seen.update(new)
        return {v for v, is_sum in seen if not is_sum}

    def _divided_selections(self) -> list[Var]:
        """Selections that numerators are made from.

        The new probability of an action over the old one, which both are small (PPO:
        3 gradients at 8 bits). No sums: a Dice loss divides sums over whole images.
        """
        return [
            v
            for numerator in self.numerators
            for eqn in equations_behind(numerator, self.program.producers, is_scaling)
            if eqn.primitive.name in _CHOICES
            for v in eqn.outvars
        ]

    def selected(self) -> list[Var]:
        """Divisors that are selected: the width of a spline's bin.

        Its slope, an inverse square, meets the width's own factor in a softmax again.
        Rounded among larger ones it erred by 3 gradients at 8 bits, in a flow with two
        layers whose bins differ in width by 1e3.
        """
        return [
            v
            for v in self.divisors
            if any(
                eqn.primitive.name == "gather"
                for eqn in equations_behind(v, self.program.producers, is_scaling)
            )
        ]

    def flat(self, carried: Mapping[Var, Atom]) -> set[Var]:
        """Results behind them whose function's slope may vanish with the result.

        That of sigmoid(z)[label] is p (1 - p).
        """
        behind, eqns = self.behind(carried, with_sums=False), self.program.jaxpr.eqns
        flat = (eqn for eqn in eqns if eqn.primitive.name in _FLAT or is_square(eqn))
        return {v for eqn in flat for v in behind.intersection(eqn.outvars)}


@found_once
def arguments_near_poles(program: Program) -> Arguments:
    """The arguments in a program."""
    intervals = intervals_in(program)
    bounded, others, divisors, numerators = [], [], [], []
    guarded: set[Var] = set()
    mixtures: set[Var] = set()
    for eqn in program.jaxpr.eqns:
        is_moved = eqn.primitive.name in MOVES
        is_guarded = is_moved and not guarded.isdisjoint(variables_in(eqn.invars))
        if is_guarded or _is_guard(eqn, intervals):
            guarded.update(eqn.outvars)
        if is_mixture(eqn, intervals):
            mixtures.update(eqn.outvars)
        x, pole = pole_in(eqn)
        if x is None:
            x, pole = _pole_in_rule(eqn)
        if x is None:
            continue
        lo, hi = interval_of(x, intervals)
        if lo < pole + MARGIN and hi > pole - MARGIN:
            is_known = (lo, hi) != REALS or x in guarded
            (bounded if is_known else others).append(x)
            if eqn.primitive.name == "div":
                divisors.append(x)
                numerators += variables_in(eqn.invars[:1])
    return Arguments(program, bounded, others, divisors, numerators, mixtures)


def _is_guard(eqn: Eqn, intervals: Mapping[Var, Interval]) -> bool:
    """Whether it adds a number that keeps its result off a pole at zero."""
    added = [interval_of(x, intervals) for x in eqn.invars]
    is_small = any(0 <= lo <= hi < MARGIN and hi > 0 for lo, hi in added)
    return eqn.primitive.name == "add" and is_small


def is_scaling(eqn: Eqn) -> bool:
    """Whether results are operands scaled, selected or added."""
    name = eqn.primitive.name
    return name in SUMS | _CHOICES | {"mul", "div"}


def pole_in(eqn: Eqn) -> tuple[Var | None, float]:
    """The operand that an equation has a pole in, and where; None without one."""
    name, inputs = eqn.primitive.name, eqn.invars
    operand, pole = None, 0.0
    if name in POLES:
        operand, pole = inputs[0], POLES[name]
    elif name == "div" or (name == "integer_pow" and eqn.params["y"] < 0):
        operand = inputs[-1]
    elif is_log_gamma(eqn) or name == "polygamma":
        operand = inputs[1]
    elif name == "pow" and not _is_power(inputs[1]):
        operand = inputs[0]
    return (None if operand is None or is_literal(operand) else operand), pole


def _pole_in_rule(eqn: Eqn) -> tuple[Var | None, float]:
    """The operand in which a function with a rule of its own has a pole.

    A logarithm whose rule calls it again and divides by its operand: the slope 2 z of
    an operand z^2 + 1e-6 had noise of 7 gradients at 8 bits. One that adds the number
    itself, log(x + 1e-6), had 29 for x = z^2.
    """
    body = custom_vjp_body(eqn)
    if body is None:
        return None, 0.0
    jaxpr, _ = open_jaxpr(body)
    operands = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    for inside in jaxpr.eqns:
        x, pole = pole_in(inside)
        operand = None if x is None else operands.get(x)
        if operand is not None and not is_literal(operand):
            return operand, pole
        inputs = variables_in(inside.invars)
        if len(inputs) == 1 and inputs[0] in operands and _keeps_pole(inside):
            operands[inside.outvars[0]] = operands[inputs[0]]
    return None, 0.0


def _keeps_pole(eqn: Eqn) -> bool:
    """Whether it gives its operand, or keeps that off a pole at zero."""
    return _is_guard(eqn, {}) or eqn.primitive.name in MOVES


def is_log_gamma(eqn: Eqn) -> bool:
    """Whether it draws logarithms from a gamma distribution: slopes are 1 / shape^2."""
    return eqn.primitive.name == "random_gamma" and eqn.params["log_space"]


def _is_power(exponent: Atom) -> bool:
    """Whether it is a small natural number, with which a power has no pole."""
    return is_literal(exponent) and exponent.val in (0, 1, 2, 3, 4)


def adds_few(eqn: Eqn) -> bool:
    """Whether each result is a sum of a few elements: an ensemble's probabilities."""
    return eqn.invars[0].aval.size <= _FEW * eqn.outvars[0].aval.size


def is_mixture(eqn: Eqn, intervals: Mapping[Var, Interval]) -> bool:
    """Whether it adds a few products of probabilities, or adds some by an index.

    The first is a mixture of softmaxes, or a hidden Markov chain's step; the second a
    pointer network, which adds attention to the words that it is paid to. Both had
    noise of 0.6 gradients at 8 bits with their factors rounded.
    """
    if eqn.primitive.name not in MIXING:
        return False
    operands = [eqn.invars[0], eqn.invars[-1]]  # between them, of scatters: indices
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = operands[0].aval.shape
        if math.prod(shape[axis] for axis in contracted) > _FEW:
            return False
    ends = [interval_of(x, intervals) for x in operands]
    return all(0 <= lo <= hi <= 1 for lo, hi in ends)

"""Sources that stay exact in place of an argument near a pole.

Where another value to store is computed from them alone, the pole magnifies its noise:
the slope 1 / b meets another one that vanishes with b, and where a mask is zero, its
neighbours' noise is all that is left. With the sources exact, both are, and
cost nothing. One derivative for log(softplus(x @ w) + 1e-3) meets no other factor: it
goes to a matrix product alone.

Where others are in it too, as q in q / (p + 1e-8), the derivative of q log(p + 1e-8), p
is exact and that has the noise of its largest elements, 1e8 of q's, which softmax
multiplies with p again (1e3 gradients at 8 bits). With q exact too it has none. An
exponential that may be large is such an inverse too: (y - m) exp(-2 h), the slope of a
normal in a mixture, meets the normal's share of the likelihood, which is small there
(4 gradients at 8 bits). So is 1 / (a b - c^2), made from exponentials: the inverse of a
Gaussian's covariance, whose slopes meet these again (5 gradients).
"""

import collections
from collections.abc import Collection, Iterable, Mapping

from jaxact._form.backward_products import BackwardProducts
from jaxact._form.chooser import Chooser
from jaxact._form.intervals import interval_of, intervals_in
from jaxact._form.pole_arguments import (
    MARGIN,
    SMALL_NEAR_POLES,
    arguments_near_poles,
    pole_in,
)
from jaxact._form.poles import UNSELECTED, sources_behind, sources_of
from jaxact._form.scaled_poles import has_function_of_fewer
from jaxact._jaxpr.flow import fact_of
from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES, SUMS
from jaxact._jaxpr.read import equations_behind, is_cheap, is_literal, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.reading import Reading

# Slopes that a source replaces.
_SEVERAL = 2
# Values whose multiples a slope adds.
_TERMS = 2
# Results that are multiples of a value if the inexact operands are.
_SCALED_TOGETHER = SUMS | {"mul"}
_LARGE_TOGETHER = MOVES | frozenset("mul div neg square integer_pow exp exp2".split())


def sources_near_poles(
    reading: Reading,
    chooser: Chooser,
    arguments: Iterable[Var],
    inside: Collection[Var],
) -> tuple[set[Var], set[Var]]:
    """Bases that are better exact than arguments or slopes computed from them.

    And values that are better stored than slopes which are multiples of these.

    Args:
      arguments: bases near a pole, which stay exact.
      inside: those among them that a program inside keeps.
    """
    classes, stored = chooser.classes, chooser.choose(reading.leaves)
    products = BackwardProducts(reading)
    found: set[Var] = set()
    slopes = _with_exponentials(chooser, products, stored)
    apart: dict[Var, tuple[set[Var], frozenset[Var]]] = {}
    if classes.spared:
        kept, _ = chooser.derive(reading.leaves, stored)
        magnified = set(chooser.bases(products.with_others()))
        poles = _spared_near_poles(chooser)
        near = [v for v in stored if _is_near(v, poles, chooser)]
        slopes += [v for v in near if v in magnified]
        sources = {v: sources_of(v, chooser) for v in arguments}
        apart = _sources_apart(chooser, near, sources, poles)
        for v, own in sources.items():
            noisy = stored if v in kept or v in inside else magnified
            found |= _with_noise(chooser, own, noisy)
        found |= _of_several(chooser, sources.values(), magnified)
    multiplied: set[Var] = set()
    for v in slopes:  # from a network's output, or its parts: a mixture's deviations
        if v in apart:
            own, factors = apart[v]
            found |= own
            multiplied.update(classes.base[factor] for factor in factors)
            continue
        found |= sources_of(v, chooser) or sources_of(v, chooser, UNSELECTED)
    return found | _sources_of_divisors(chooser, products, stored), multiplied


def _with_noise(chooser: Chooser, own: set[Var], noisy: Iterable[Var]) -> set[Var]:
    """An argument's `own` sources, if a value with noise is made from them alone."""
    found: set[Var] = set()
    for x in noisy:
        if _sources_within(chooser, x, own) <= own:
            found |= own | _drawn(chooser, x)
    return found


def _of_several(
    chooser: Chooser, sources: Collection[set[Var]], magnified: Iterable[Var]
) -> set[Var]:
    """Sources that slopes have from several arguments, and from nothing else.

    A squashed normal's sample a has slopes in its mean and its deviation's logarithm;
    1 - a^2 near a pole has one's, the deviation itself the other's. Soft actor-critic
    (Haarnoja et al. 2018, arXiv:1801.01290, eq. 21) had noise of 500 gradients.
    """
    every = set[Var]().union(*sources)
    found: set[Var] = set()
    for own in sources:
        for x in magnified:
            behind = _sources_within(chooser, x, own)
            if behind <= every and not behind.isdisjoint(own):
                found |= behind | _drawn(chooser, x)
    return found


def _drawn(chooser: Chooser, x: Var) -> set[Var]:
    """Random numbers that a value is made from, if they would be rounded.

    Those of a key that is given, a sample's noise, are made again from nothing exact.
    """
    classes = chooser.classes

    def is_passed(eqn: Eqn) -> bool:
        return is_cheap(eqn) and not classes.random.issuperset(eqn.outvars)

    return {
        classes.whole_base(v)
        for eqn in equations_behind(x, chooser.producers, is_passed)
        for v in variables_in(eqn.invars)
        if v in classes.random and v in classes.base
    }


def _sources_within(chooser: Chooser, x: Var, ends: set[Var]) -> set[Var]:
    """The sources of a value that are not drawn at random, from `ends` on."""
    return sources_behind(x, chooser, ends=ends) - chooser.classes.random


def _sources_of_divisors(
    chooser: Chooser, products: BackwardProducts, stored: Collection[Var]
) -> set[Var]:
    """Sources of slopes with a divisor made from exponentials, that has no known bound.

    Exact in place of the slopes, of which there are several for each of them: eight
    slopes of a conic become two logarithms of scales and a correlation.
    """
    producers = chooser.producers
    if not chooser.classes.exponentials:
        return set()
    divisors = {
        v
        for v in arguments_near_poles(chooser.program).others
        if any(
            eqn.primitive.name in EXPONENTIALS
            for eqn in equations_behind(v, producers, is_cheap)
        )
    }
    replaced: dict[Var, int] = {}  # elements of slopes, by source
    for v in stored if divisors else ():
        behind = equations_behind(v, producers, is_cheap)
        if any(pole_in(eqn)[0] in divisors for eqn in behind):
            for source in sources_behind(v, chooser) - {v}:
                replaced[source] = replaced.get(source, 0) + v.aval.size
    if not replaced or not products.after(replaced, among=products.reading.leaves):
        return set()
    return {v for v, size in replaced.items() if _SEVERAL * v.aval.size <= size}


def _spared_near_poles(chooser: Chooser) -> set[Var]:
    """Exact arguments that may come near a pole."""
    near = arguments_near_poles(chooser.program)
    return chooser.classes.spared.intersection([*near.bounded, *near.others])


def _is_near(v: Var, poles: Collection[Var], chooser: Chooser) -> bool:
    """Whether one in `poles` makes a value large: q / (p + 1e-8)."""
    return any(
        pole_in(eqn)[0] in poles and eqn.primitive.name not in SMALL_NEAR_POLES
        for eqn in equations_behind(v, chooser.producers, is_cheap)
    )


def _sources_apart(
    chooser: Chooser,
    slopes: Collection[Var],
    arguments: Mapping[Var, set[Var]],
    poles: Collection[Var],
) -> dict[Var, tuple[set[Var], frozenset[Var]]]:
    """Sources with which slopes are multiples of values without a pole; and these.

    One is stored for several slopes, or for one that meets another factor from a
    parameter alone: in a real-gated linear recurrent unit, see `scaled_poles.py`. Any
    other may meet a factor from the value's own sources. The unit may also add two
    values' multiples: exp(-a) g + sqrt(1 - exp(-2 a)) h, a step from one to the other
    that keeps their variance.

    Args:
      slopes: that one in `poles` makes large.
      arguments: near a pole, with their sources.
    """
    classes, producers = chooser.classes, chooser.producers
    is_parameter = lambda v: classes.is_exact(v) and v not in classes.statistics
    scaled = {
        v
        for argument, own in arguments.items()
        if has_function_of_fewer(argument, producers, is_parameter)
        for v in own
    }
    apart = {v: _factors_apart(chooser, v, arguments, poles) for v in slopes}
    shared = collections.Counter(others for _, others in apart.values())

    def is_apart(own: set[Var], others: frozenset[Var]) -> bool:
        if not own or not 0 < len(others) <= _TERMS:
            return False
        return own <= scaled or (len(others) == 1 and shared[others] >= _SEVERAL)

    return {v: found for v, found in apart.items() if is_apart(*found)}


def _factors_apart(
    chooser: Chooser,
    slope: Var,
    arguments: Mapping[Var, set[Var]],
    poles: Collection[Var],
) -> tuple[set[Var], frozenset[Var]]:
    """The sources of a slope's arguments near a pole, and its factors from others."""
    classes, producers = chooser.classes, chooser.producers
    made = equations_behind(slope, producers, is_cheap)
    behind = {v for eqn in made for v in eqn.outvars}
    own = set[Var]().union(*(arguments[v] for v in behind & arguments.keys()))

    def is_own(v: Atom) -> bool:
        is_known = is_literal(v) or classes.is_exact(v)
        return is_known or sources_behind(v, chooser) <= own

    others, todo = set[Var](), [slope]
    while todo:
        v = todo.pop()
        eqn = producers.get(v)
        if eqn is None or eqn.primitive.name not in _SCALED_TOGETHER:
            others.add(v)
            continue
        inputs = variables_in(eqn.invars)
        # A dropout's mask belongs to the value.
        is_masked = v in classes.parts and classes.spared.isdisjoint(inputs)
        is_multiple = any(map(is_own, eqn.invars)) and not is_masked
        if is_multiple or _is_near(v, poles, chooser):
            new = [u for u in inputs if not is_own(u)]
            if len(new) > 1 and eqn.primitive.name == "mul":
                return own, frozenset()  # a product, which no multiples make
            todo += new
        else:
            others.add(v)
    return own, frozenset(others)


def _with_exponentials(
    chooser: Chooser, products: BackwardProducts, slopes: Collection[Var]
) -> list[Var]:
    """Those among `slopes` that are others times an exponential that may be large.

    They meet a factor from the same sources, which may be small there.
    """
    reading, producers = products.reading, chooser.producers
    exponentials = {
        v: [
            eqn.outvars[0]
            for eqn in equations_behind(v, producers, _scales)
            if eqn.primitive.name in EXPONENTIALS
            and fact_of(reading.program.facts, eqn.outvars[0])
        ]
        for v in slopes
    }
    if not any(exponentials.values()):
        return []
    intervals = intervals_in(chooser.program)
    parts = lambda v: sources_behind(v, chooser, UNSELECTED)

    def residuals_of(v: Var) -> set[Var]:
        return {r for r in reading.leaves if v in chooser.bases([r])}

    def is_found(v: Var) -> bool:
        sources = parts(v)
        return any(
            interval_of(e, intervals)[1] > 1 / MARGIN and not sources <= parts(e)
            for e in exponentials[v]
        ) and bool(products.after(sources, among=residuals_of(v)))

    return list(filter(is_found, slopes))


def _scales(eqn: Eqn) -> bool:
    """Whether its result is large where an operand is."""
    return eqn.primitive.name in _LARGE_TOGETHER

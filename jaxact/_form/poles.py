"""Arguments that may come near the pole of a function, and its derivative's.

The slope of log(q + 1e-9) spans nine orders of magnitude, and is multiplied with
softmax's own rounded factor: at 8 bits the gradient of the naive cross-entropy had 1.4
times its own size in noise, and `rel_entr(p, softmax(z))` 837 times. With the argument
exact both factors cancel as they do without rounding.
"""

import math
from collections.abc import Collection, Iterator

from jaxact._form.affine_classes import Classes
from jaxact._form.intervals import Interval, find_intervals, interval_of
from jaxact._jaxpr.primitives import CHEAP
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Producers, Var

# An argument that stays this far from the pole has slopes within 10 (a logarithm's)
# or 100 (an inverse's): x / (1 + exp(-x)), log1p(exp(x)).
MARGIN = 0.1
# Elements of sources for each of an argument's: log(x^2 + y^2).
_MORE = 2
# Functions of their first operand with a pole where their domain ends.
_POLES = {**dict.fromkeys("log log2 sqrt rsqrt cbrt".split(), 0.0), "log1p": -1.0}


def bases_near_poles(jaxpr: Jaxpr, classes: Classes) -> set[Var]:
    """Bases in which an argument is affine that may come near a pole."""
    intervals = find_intervals(jaxpr)
    arguments = [v for eqn in jaxpr.eqns for v in _arguments(eqn, intervals)]
    inexact = [v for v in arguments if not classes.is_exact(v)]
    return {classes.whole_base(v) for v in inexact}


def sources_instead(
    v: Var, classes: Classes, producers: Producers, stored: Collection[Var]
) -> set[Var]:
    """Bases that are better exact than `v`, an argument that is computed from them.

    That is so where another value to store is computed from no others: the pole would
    magnify its noise. With the sources exact, both are, and cost nothing.
    """
    sources = sources_of(v, classes, producers)
    noisy = any(sources_behind(x, classes, producers) <= sources for x in stored)
    return sources if noisy else set()


def sources_of(v: Var, classes: Classes, producers: Producers) -> set[Var]:
    """Bases that an argument is a cheap function of, unless they are larger.

    Rounded, they have noise that the pole magnifies: the slope of log(x^2 + 1e-3) is x
    times 2 / (x^2 + 1e-3), at 8 bits with an error of two gradients; that of
    x rsqrt(x^2 + 1e-4) is a small difference.
    """
    sources = sources_behind(v, classes, producers)
    size = sum(x.aval.size for x in sources)
    return sources if size <= _MORE * v.aval.size else set()


def sources_behind(v: Var, classes: Classes, producers: Producers) -> set[Var]:
    """The inexact values that `v` is computed from, past cheap functions."""
    sources: set[Var] = set()
    todo, seen = [v], set()
    while todo:
        x = todo.pop()
        eqn = producers.get(x)
        if eqn is None or eqn.primitive.name not in CHEAP or eqn.effects:
            sources.add(x)
            continue
        new = [u for u in variables_in(eqn.invars) if u not in seen]
        seen.update(new)
        todo += [u for u in new if not classes.is_exact(u)]
    return sources


def _arguments(eqn: Eqn, intervals: dict[Var, Interval]) -> Iterator[Atom]:
    """An equation's operand, if its bounds reach near the equation's pole.

    Without a bound nothing is known: that log(x) is taken says that x is positive.
    """
    x, pole = pole_in(eqn)
    if x is None:
        return
    lo, hi = interval_of(x, intervals)
    if (-math.inf < lo or hi < math.inf) and lo < pole + MARGIN and hi > pole - MARGIN:
        yield x


def pole_in(eqn: Eqn) -> tuple[Atom | None, float]:
    """The operand that an equation has a pole in, and where; None without one."""
    name, inputs = eqn.primitive.name, eqn.invars
    if name in _POLES:
        return inputs[0], _POLES[name]
    if name == "div" or (name == "integer_pow" and eqn.params["y"] < 0):
        return inputs[-1], 0.0
    if name == "pow" and not _is_power(inputs[1]):
        return inputs[0], 0.0
    return None, 0.0


def _is_power(exponent: Atom) -> bool:
    """Whether it is a small natural number, with which a power has no pole."""
    return is_literal(exponent) and exponent.val in (0, 1, 2, 3, 4)

"""A number less a sum, near a pole: 1 - |u|^2 in the distances of the Poincare ball.

Near the ball's edge the slope in u is large and points along u. A map to the ball, such
as tanh(|x|) x / |x|, takes most of that away again, but not the noise in u: with pairs
at 0.999 from the center it was 0.8 gradients at 8 bits. The summed values stay exact.

So do those whose sum is a cosine, where its angle is taken: the slope has a pole at 1,
and normalized vectors take it away (0.7 gradients for vectors 3 % apart).
"""

from collections.abc import Iterable, Mapping

from jaxact._form.chooser import Chooser
from jaxact._form.intervals import Interval, interval_of, intervals_in
from jaxact._form.pole_arguments import MARGIN, arguments_near_poles
from jaxact._form.short_norms import bases_behind
from jaxact._jaxpr.primitives import MATMULS, REDUCTIONS
from jaxact._jaxpr.read import (
    contracts,
    equations_behind,
    is_cheap,
    is_literal,
    variables_in,
)
from jaxact._jaxpr.types import Eqn, Producers, Var

_ANGLES = frozenset(["acos", "asin"])


def bases_in_complements(chooser: Chooser) -> set[Var]:
    """Bases whose sum is taken from a number, which is then near a pole."""
    program, producers = chooser.program, chooser.producers
    eqns = program.jaxpr.eqns
    complements = _outputs(eqn for eqn in eqns if _is_complement(eqn))
    angles = [eqn for eqn in eqns if eqn.primitive.name in _ANGLES]
    cosines = [v for eqn in angles for v in variables_in(eqn.invars)]
    sums = {v: _sums_behind(v, producers) for v in (*complements, *cosines)}
    if not any(sums.values()):
        return set()
    intervals, near = intervals_in(program), arguments_near_poles(program)
    behind = {
        v
        for argument in (*near.bounded, *near.others)
        for v in _outputs(equations_behind(argument, producers, is_cheap))
    }
    at_pole = [v for v in complements if v in behind and _reaches(0, v, intervals)]
    at_pole += [
        v for v in cosines if _reaches(1, v, intervals) or _reaches(-1, v, intervals)
    ]
    summed = [x for v in at_pole for x in sums[v]]
    return set().union(*(bases_behind(x, chooser) for x in summed))


def _reaches(pole: int, v: Var, intervals: Mapping[Var, Interval]) -> bool:
    lo, hi = interval_of(v, intervals)
    return lo < pole + MARGIN and hi > pole - MARGIN


def _is_complement(eqn: Eqn) -> bool:
    if eqn.primitive.name != "sub" or is_literal(eqn.invars[1]):
        return False
    return eqn.invars[0].aval.size == 1 < eqn.invars[1].aval.size


def _sums_behind(complement: Var, producers: Producers) -> list[Var]:
    """The arrays whose sums are in a complement."""
    made = equations_behind(complement, producers, is_cheap)
    makers = [producers.get(v) for eqn in made for v in variables_in(eqn.invars)]
    sums = [eqn for eqn in makers if eqn is not None and _is_sum(eqn)]
    summed = [v for eqn in sums for v in variables_in(eqn.invars)]
    return [u for v in summed for u in _factors(v, producers)]


def _factors(v: Var, producers: Producers) -> list[Var]:
    """What `v` is a product of, as in 1 - u @ v with normalized u and v."""
    eqn = producers.get(v)
    if eqn is None or eqn.primitive.name != "mul":
        return [v]
    return variables_in(eqn.invars)


def _is_sum(eqn: Eqn) -> bool:
    """Whether each result is reduced from several elements."""
    if eqn.primitive.name not in REDUCTIONS | MATMULS or not contracts(eqn):
        return False
    size = eqn.outvars[0].aval.size
    return all(v.aval.size > size for v in variables_in(eqn.invars))


def _outputs(eqns: Iterable[Eqn]) -> list[Var]:
    return [v for eqn in eqns for v in eqn.outvars]

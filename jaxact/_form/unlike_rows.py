"""Values, mostly exponentials, whose rows have unlike sums that no map divides by.

Sums by segment that divide others' sums, (sum e v) / (sum e), are not there for the
elements; nor are those in the body of a scan, such as Sinkhorn's iterations, for the
array that it is given. At 8 bits the noise was 2 and 15 gradients. Such exponentials
stay exact, and so do those that two sums along a row divide. Networks subtract a
maximum first, and keep their memory. Other positive values stay exact where a mask
leaves few of them in a row's sum, which may vanish.
"""

from collections.abc import Collection, Iterable

from jaxact._form.chooser import Chooser
from jaxact._form.images import GROWING
from jaxact._form.norms import Norms, norms_in
from jaxact._form.pole_arguments import pole_in
from jaxact._form.poles import UNSELECTED, sources_behind
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import EXPONENTIALS, MOVES
from jaxact._jaxpr.read import equations_behind, variables_in
from jaxact._jaxpr.rewrite import flatten, inlinable_body
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.program import Program


def bases_in_unlike_rows(
    chooser: Chooser, needed: Iterable[Atom], kept: Collection[Var]
) -> set[Var]:
    """Values that have rows or segments with sums near a pole.

    Args:
      needed: values that the backward pass reads.
      kept: bases that stay exact for other reasons.
    """
    classes = chooser.classes
    norms = norms_in(chooser.program)
    found = _in_quotients(chooser, norms)
    for v in chooser.bases(needed):
        if _is_scaled_exponential(v, norms) and norms.sums.has_parts(v):
            found.add(v)
            continue
        if norms.sums.may_vanish(v):
            found.add(v)
            continue
        if not norms.sums.is_exponential(v):
            continue
        own = norms.normalizing(v)
        if own is not None and all(
            classes.is_exact(c) or classes.base[c] in kept for c in own.coefficients
        ):
            continue
        scans = [e for e in norms.users.get(v, ()) if e.primitive.name == "scan"]
        is_divided = any(_is_divided(scan, v) for scan in scans)
        if norms.sums.are_unlike(v) or (
            is_divided and not norms.sums.is_shifted(v, fewest=1)
        ):
            found.add(v)
    return found


def _in_quotients(chooser: Chooser, norms: Norms) -> set[Var]:
    """Weighted sums of exponentials that divide others, and these others.

    An attention-free transformer's (w @ (e v)) / (w @ e) has as many sums as elements:
    their inverses, 1 / size and -x / size^2, erred by 2 gradients at 8 bits. From both
    sums, exact, all slopes are computed.
    """
    sums = {
        v
        for eqn in chooser.jaxpr.eqns
        if eqn.primitive.name in EXPONENTIALS
        for v in norms.sums.weighted(eqn.outvars[0])
    }
    found: set[Var] = set()
    for eqn in chooser.jaxpr.eqns if sums else ():
        divisor, _ = pole_in(eqn)
        if divisor is None:
            continue
        grown = equations_behind(divisor, chooser.producers, _grows)
        behind = {v for e in grown for v in variables_in(e.invars)}
        if sums.isdisjoint({divisor, *behind}):
            continue
        # Of an inverse alone the other factor.
        is_inverse = len(variables_in(eqn.invars)) == 1
        readers = norms.users.get(eqn.outvars[0], ()) if is_inverse else ()
        products = [e for e in readers if e.primitive.name == "mul"]
        for v in chooser.bases([x for e in (eqn, *products) for x in e.invars]):
            found |= sources_behind(v, chooser, UNSELECTED)
    return found


def _grows(eqn: Eqn) -> bool:
    return eqn.primitive.name in GROWING | MOVES


def _is_scaled_exponential(v: Var, norms: Norms) -> bool:
    """Whether it is one, or one times a mask or a weight."""
    operands, eqn = [v], norms.producers.get(v)
    if eqn is not None and eqn.primitive.name in ("mul", "select_n"):
        operands = variables_in(eqn.invars)
    return any(map(norms.sums.is_exponential, operands))


def _is_divided(scan: Eqn, x: Var) -> bool:
    """Whether the body of a scan divides an array that it is given by its sums."""
    body, _ = flatten(open_jaxpr(scan.params["jaxpr"])[0], inlinable_body)
    norms = norms_in(Program(body))
    pairs = zip(body.invars, scan.invars, strict=True)
    return any(norms.normalizing(v) is not None for v, given in pairs if given is x)

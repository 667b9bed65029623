"""Products that the program adds to something, packed apart from it.

XLA rounds a product and its sum with another term once, where one kernel computes both:
z = mean + deviation * noise in a variational autoencoder. A codec that reads the
product makes XLA compute it apart, and z would have other last bits than without it. So
where JAX does not keep the product itself, the codec's is computed once more, behind a
barrier.
"""

from collections.abc import Collection, Mapping, Sequence

from jaxact._jaxpr.compat import BARRIER_KEEPS_TYPES
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import (
    is_float,
    is_literal,
    producers_of,
    readers_of,
    variables_in,
)
from jaxact._jaxpr.rewrite import barrier_equation, new_variable, with_outputs
from jaxact._jaxpr.types import Eqn, Jaxpr, Var

_SUMS = frozenset("add sub add_any".split())


def with_terms_apart(jaxpr: Jaxpr, num_outputs: int, whole: Collection[Var]) -> Jaxpr:
    """The program, with products of their own among its last outputs.

    Args:
      jaxpr: its outputs from `num_outputs` on are packed or kept.
      whole: variables that the uncompressed program keeps too.
    """
    producers, readers = producers_of(jaxpr.eqns), readers_of(jaxpr.eqns)
    outputs, saved = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    others = {*whole, *variables_in(outputs)}
    eqns, own = list(jaxpr.eqns), {}
    for v in dict.fromkeys(variables_in(saved)):
        eqn = producers.get(v)
        if v in others or eqn is None or not _is_product(eqn):
            continue
        if _is_added(v, readers):
            own[v] = new_variable(v.aval)
            eqns += _again(eqn, own[v])
    if not own:
        return jaxpr
    saved = [v if is_literal(v) else own.get(v, v) for v in saved]
    return with_outputs(jaxpr, eqns, [*outputs, *saved])


def _is_product(eqn: Eqn) -> bool:
    """Whether it is one of floats that a barrier takes together."""
    factors = variables_in(eqn.invars)
    if eqn.primitive.name != "mul" or not all(map(is_float, factors)):
        return False
    axes = {v.aval.manual_axis_type.varying for v in factors}
    return BARRIER_KEEPS_TYPES or len(axes) == 1


def _is_added(v: Var, readers: Mapping[Var, Sequence[Eqn]]) -> bool:
    """Whether a sum reads it, perhaps in another shape."""
    return any(
        eqn.primitive.name in _SUMS
        or (eqn.primitive.name in MOVES and _is_added(eqn.outvars[0], readers))
        for eqn in readers.get(v, ())
    )


def _again(product: Eqn, result: Var) -> list[Eqn]:
    """Equations for a product from factors behind a barrier."""
    factors = list(dict.fromkeys(variables_in(product.invars)))
    waiting = {v: new_variable(v.aval) for v in factors}
    barrier = barrier_equation(product, factors, list(waiting.values()))
    invars = [x if is_literal(x) else waiting[x] for x in product.invars]
    return [barrier, product.replace(invars=invars, outvars=[result])]

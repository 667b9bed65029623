"""Masks read off a value that is in memory.

A ReLU's mask, x > 0, is max(x, 0) > 0 too, to the last bit: also for NaN, for zeros of
either sign and for any other threshold. Its output is in memory where a convolution
reads it; its operand is not, and is computed again for the mask, often from two arrays:
the sum of a residual join.
"""

from collections.abc import Sequence

import jax
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.read import is_literal, literal_key
from jaxact._jaxpr.rewrite import new_equation, new_variable, with_outputs
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Var
from jaxact._plan.fusion import read_whole

# A comparison with a threshold, and the operation that keeps its outcome.
_KEEPING = {"gt": "max", "lt": "min"}


def masks_of_outputs(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> Jaxpr:
    """`jaxpr` with the masks of a ReLU computed from its output, where that is whole.

    Args:
      outputs: those that the program is evaluated for, beside the stored values.
    """
    whole = read_whole(jaxpr, outputs)
    clipped = {
        (eqn.primitive.name, *map(literal_key, eqn.invars)): eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _KEEPING.values() and eqn.outvars[0] in whole
    }
    done: set[int] = set()
    eqns: list[Eqn] = []

    def add(eqn: Eqn) -> None:
        if id(eqn) not in done:
            done.add(id(eqn))
            eqns.append(eqn)

    for eqn in jaxpr.eqns:
        name, key = eqn.primitive.name, tuple(map(literal_key, eqn.invars))
        source = clipped.get((_KEEPING.get(name, ""), *key))
        if source is None or not is_literal(eqn.invars[1]):
            add(eqn)
            continue
        add(source)
        held = _held(source.outvars[0], eqn)
        eqns += [held, eqn.replace(invars=[held.outvars[0], eqn.invars[1]])]
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


def _held(v: Var, like: Eqn) -> Eqn:
    """A barrier: XLA would simplify max(x, 0) > 0 to x > 0."""
    traced, _ = open_jaxpr(jax.make_jaxpr(lax.optimization_barrier)(v.aval))
    (eqn,) = traced.eqns
    outputs = [new_variable(v.aval)]
    return new_equation(like, eqn.primitive, [v], outputs, eqn.params)

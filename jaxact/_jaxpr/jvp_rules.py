"""The derivatives of custom_jvps, as programs.

JAX has another function at each call: only a trace tells one rule from others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr
from jaxact._jaxpr.evaluate import bind
from jaxact._jaxpr.primitives import ELEMENTWISE
from jaxact._jaxpr.read import (
    is_float,
    is_split_explicitly,
    loses_precision,
    names_inside,
    variables_in,
)
from jaxact._jaxpr.rewrite import flatten, jit_body
from jaxact._jaxpr.types import ClosedJaxpr, Eqn


def has_rule(eqn: Eqn) -> bool:
    """Whether it is a custom_jvp for `rules_of`.

    In a shard_map it has axes that exist nowhere else.
    """
    if eqn.primitive.name != "custom_jvp_call" or custom_vjp_body(eqn) is not None:
        return False
    with eqn.ctx.manager:
        return not jax.sharding.get_abstract_mesh().manual_axes


def rules_of(eqns: Sequence[Eqn]) -> ClosedJaxpr:
    """Values and tangents of custom_jvps: JAX has another function at each call.

    Their derivatives are those of the linear parts alone, so that rules inside count
    no more. One trace for all: to start one takes longer than a rule like relu's.
    """

    def evaluate(inputs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
        return [
            jax.jvp(functools.partial(_evaluate, eqn), primals, tangents)
            for eqn, (primals, tangents) in zip(eqns, inputs, strict=True)
        ]

    return jax.make_jaxpr(evaluate)(list(map(_inputs_with_tangents, eqns)))


def _evaluate(eqn: Eqn, *values: Any) -> list[Any]:
    return bind(eqn, list(values))


def _inputs_with_tangents(eqn: Eqn) -> tuple[list[Any], list[Any]]:
    """An equation's inputs and their tangents, as types."""
    primals = [
        # A rule may ask for operands that are split alike, over a mesh's Explicit axes.
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=v.aval.sharding)
        if is_split_explicitly(v.aval)
        else jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in eqn.invars
    ]
    tangents = [
        x if is_float(v) else jax.ShapeDtypeStruct(x.shape, jax.dtypes.float0)
        for x, v in zip(primals, eqn.invars, strict=True)
    ]
    return primals, tangents


def scales_each_element(eqn: Eqn) -> bool:
    """Whether a custom_jvp's rule multiplies each tangent by a slope of its element.

    Not where it subtracts a tangent's mean (a projection), rolls it, or rounds it to
    few bits. True where a rule cannot be traced alone, in a shard_map.
    """
    if not has_rule(eqn):
        return True
    try:
        traced = rules_of([eqn])
    except Exception:  # of any type: the rule's own
        return False
    jaxpr, _ = flatten(open_jaxpr(traced)[0], jit_body)
    known = set(jaxpr.invars[len(eqn.invars) :])
    for step in jaxpr.eqns:
        if not known.isdisjoint(variables_in(step.invars)):
            if not names_inside(step) <= ELEMENTWISE or loses_precision(step):
                return False
            known.update(step.outvars)
    return True

"""Tell the values that custom rules keep.

The backward pass of a `jax.checkpoint` or a `custom_vjp` may do anything with the
values that it keeps, so rounding them may bias a gradient, and tables say so. Tags mark
the values that such a call is given, and those that it returns. Everything between is
the rule's own, also the equations in its forward rule, which only `jax.vjp` brings in;
a returned value is an ordinary one again.
"""

import enum
from collections.abc import Sequence
from typing import Any

from jax import core
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.flow import Facts, flow, union
from jaxact._jaxpr.read import has_custom_rule, is_literal
from jaxact._jaxpr.rewrite import new_equation, new_variable, rename, with_outputs
from jaxact._jaxpr.types import Array, Atom, Axes, Eqn, Jaxpr, Renaming, Tangent


class Tag(enum.Enum):
    """On which side a value crosses into or out of a custom rule."""

    GIVEN = "given to a custom rule"
    RETURNED = "returned by a custom rule"


tag_p = jex.Primitive("jaxact_tag")


def with_tags(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with a tag on each operand and result where a custom rule is called."""
    eqns: list[Eqn] = []
    names: Renaming = {}

    def tagged(v: Atom, like: Eqn, tag: Tag) -> Atom:
        is_array = isinstance(v.aval, core.ShapedArray)
        if is_literal(v) or isinstance(v, jex.DropVar) or not is_array:
            return v
        out = new_variable(v.aval)
        eqns.append(new_equation(like, tag_p, [v], [out], {"tag": tag}))
        return out

    for eqn in jaxpr.eqns:
        inputs = [rename(v, names) for v in eqn.invars]
        is_rule = has_custom_rule(eqn)
        if is_rule:
            inputs = [tagged(v, eqn, Tag.GIVEN) for v in inputs]
        eqns.append(eqn.replace(invars=inputs))
        if is_rule:
            names |= {v: tagged(v, eqn, Tag.RETURNED) for v in eqn.outvars}
    return with_outputs(jaxpr, eqns, [rename(v, names) for v in jaxpr.outvars])


def inside_custom_rules(jaxpr: Jaxpr) -> Facts:
    """1 for each variable that is made from a given value and not returned yet."""
    return flow(jaxpr, [], _learn)


def _learn(eqn: Eqn, facts: Sequence[int], around: tuple[Eqn, ...]) -> int:
    if eqn.primitive is tag_p:
        return int(eqn.params["tag"] is Tag.GIVEN)
    return union(eqn, facts, around)


def _batch(args: tuple[Array], dims: Axes, *, tag: Tag) -> tuple[Any, Any]:
    return tag_p.bind(*args, tag=tag), dims[0]


def _differentiate(
    primals: tuple[Array], tangents: tuple[Tangent], *, tag: Tag
) -> tuple[Any, Tangent]:
    return tag_p.bind(*primals, tag=tag), tangents[0]


tag_p.def_impl(lambda x, *, tag: x)
tag_p.def_abstract_eval(lambda aval, *, tag: aval)
mlir.register_lowering(tag_p, lambda ctx, x, *, tag: [x])
batching.primitive_batchers[tag_p] = _batch
ad.primitive_jvps[tag_p] = _differentiate

"""Matrix products that XLA must not merge with others.

XLA makes one product from several that share an operand, such as those for queries,
keys and values, and slices its result. Elementwise readers read the slices where they
lie. A kernel that packs one reads its own array, which is then a copy. Predicted for
ViT-B on an H100 (batch 64, 4 bits): 27.33 ms with merged products, 26.84 with these
apart.
"""

import collections
from collections.abc import Collection

import numpy as np

from jaxact._jaxpr.compat import BARRIER_KEEPS_TYPES
from jaxact._jaxpr.primitives import RESHAPES
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.rewrite import (
    barrier_equation,
    new_literal,
    new_variable,
    with_outputs,
)
from jaxact._jaxpr.types import Eqn, Jaxpr, Var

# XLA merges no convolutions.
_PRODUCT = "dot_general"


def with_products_apart(jaxpr: Jaxpr, packed: Collection[Var]) -> Jaxpr:
    """The program, with own operands for each product that a kernel packs.

    Args:
      packed: variables that kernels read.
    """
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == _PRODUCT]
    readers = collections.Counter(
        v for eqn in products for v in set(variables_in(eqn.invars))
    )
    moved = _with_moved(jaxpr, packed)
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == _PRODUCT and not moved.isdisjoint(eqn.outvars):
            operands = dict.fromkeys(variables_in(eqn.invars))
            shared = [v for v in operands if readers[v] > 1 and _can_wait(v)]
            own = {v: new_variable(v.aval) for v in shared}
            eqns += [_barrier(eqn, v, own[v], number=len(eqns)) for v in shared]
            eqn = eqn.replace(invars=[own.get(x, x) for x in eqn.invars])
        eqns.append(eqn)
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


def _with_moved(jaxpr: Jaxpr, packed: Collection[Var]) -> set[Var]:
    """The packed variables, and those that are reshaped to them."""
    moved = set(packed)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in RESHAPES and not moved.isdisjoint(eqn.outvars):
            moved.update(variables_in(eqn.invars))
    return moved


def _can_wait(v: Var) -> bool:
    """Whether a barrier takes it with a number that is the same on all devices."""
    return BARRIER_KEEPS_TYPES or not v.aval.manual_axis_type.varying


def _barrier(like: Eqn, v: Var, own: Var, number: int) -> Eqn:
    """An equation that gives `own` the value `v`.

    With a number: XLA joins barriers that are equal.
    """
    tag = new_literal(np.int32(number))
    return barrier_equation(like, [v, tag], [own, new_variable(tag.aval)])

"""An optimization barrier in programs for one device, and none in those for several.

Where the rows of a batch are on several devices, a weight's gradient is summed over
them before it can wait at a barrier. XLA sums those on either side of one apart: two
collectives in a block that has a barrier in its middle, where there is one without.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.types import PyTree
from jaxact_kernels.compat import num_devices

_lone_p = jex.Primitive("jaxact_lone_barrier")
_lone_p.multiple_results = True


def lone_barrier(operands: PyTree) -> PyTree:
    """`lax.optimization_barrier` where the program is lowered for one device."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _lone_p.bind(*leaves))


def _lower(ctx: mlir.LoweringRuleContext, *values: Any) -> Sequence[Any]:
    if num_devices(ctx) > 1:
        return values
    wait = mlir.lower_fun(lambda *xs: lax.optimization_barrier(xs))
    return wait(ctx, *values)


_lone_p.def_impl(lambda *xs: list(xs))
_lone_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[_lone_p] = lambda primals, tangents: (
    _lone_p.bind(*primals),
    tangents,
)
batching.primitive_batchers[_lone_p] = lambda xs, dims: (_lone_p.bind(*xs), dims)
mlir.register_lowering(_lone_p, _lower)

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


def lone_barrier(operands: PyTree, *, on_cpu: bool = True) -> PyTree:
    """`lax.optimization_barrier` where the program is lowered for one device.

    Args:
      on_cpu: for a CPU as well.
    """
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _lone_p.bind(*leaves, on_cpu=on_cpu))


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, on_cpu: bool) -> Sequence[Any]:
    if num_devices(ctx) > 1:
        return values
    wait = mlir.lower_fun(lambda *xs: lax.optimization_barrier(xs))
    return wait(ctx, *values)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext, *values: Any, on_cpu: bool
) -> Sequence[Any]:
    return _lower(ctx, *values, on_cpu=on_cpu) if on_cpu else values


_lone_p.def_impl(lambda *xs, on_cpu: list(xs))
_lone_p.def_abstract_eval(lambda *avals, on_cpu: list(avals))
ad.primitive_jvps[_lone_p] = lambda primals, tangents, **params: (
    _lone_p.bind(*primals, **params),
    tangents,
)
batching.primitive_batchers[_lone_p] = lambda xs, dims, **params: (
    _lone_p.bind(*xs, **params),
    dims,
)
mlir.register_lowering(_lone_p, _lower)
mlir.register_lowering(_lone_p, _lower_for_cpu, platform="cpu")

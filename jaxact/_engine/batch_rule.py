"""A call with a derivative rule, and a rule of its own for `vmap`.

A `custom_vjp` call in a program is mapped example by example, see `mapped.py`. From
JAX 0.12 on it is an object whose methods are JAX's rules for it. One that hands all of
them on but the rule for `vmap` is the same call otherwise.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental import hijax
from jax.extend import core as jex

from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING
from jaxact._jaxpr.types import Array, PyTree

# (axis, draw, values, batch axes of the draw and of each value)
# -> outputs and their batch axes; None: example by example.
BatchRule: TypeAlias = Callable[
    [Any, PyTree, Sequence[Array], Sequence[int | None], Sequence[int | None]],
    tuple[list[jax.Array], list[int | None]] | None,
]
_Primitive: Any = getattr(hijax, "HiPrim", object)  # none before 0.12


# The rules of a `custom_vjp` call that stay.
_OTHER_RULES = "expand jvp vjp_fwd vjp_bwd lin linearized remat".split()


class _Call(_Primitive):
    """A `custom_vjp` call of a draw and values, with another rule for `vmap`."""

    skip_linearization_on_zero_tangents = True  # as for the call itself

    def __init__(self, call: Any, rule: BatchRule):
        self.call, self.rule, self.traced = call, rule, call.traced
        self.in_avals, self.out_aval = call.in_avals, call.out_aval
        self.effects, self.params = call.effects, {"call": call}
        super().__init__()
        for name in _OTHER_RULES:
            setattr(self, name, getattr(call, name))

    def batch(self, axis: Any, args: Any, dims: Any) -> Any:
        _, _, draw, *values = args
        _, _, draw_dims, *own = dims
        leaves = jax.tree.leaves(draw_dims, is_leaf=lambda d: d is None)
        found = self.rule(axis, draw, values, leaves, own)
        return self.call.batch(axis, args, dims) if found is None else found

    def transpose(self, *args: object) -> Any:
        raise TypeError(
            "jaxact: jax.linear_transpose of a compressed function: use jax.vjp, or "
            "the uncompressed function."
        )


def with_batch_rule(
    function: Callable[..., list[jax.Array]],
    rule: BatchRule,
    draw: PyTree,
    values: Sequence[Array],
) -> Callable[..., list[jax.Array]]:
    """A `custom_vjp` function, with a rule for `vmap` where it is called with these."""
    if not HAS_GENERIC_BATCHING or not _may_be_mapped():
        return function
    (eqn,) = jax.make_jaxpr(function)(draw, *values).eqns
    call = eqn.params["_prim"]
    constants, forward_constants, *_ = call.in_avals
    return functools.partial(_Call(call, rule), constants, forward_constants)


def _may_be_mapped() -> bool:
    """Whether `vmap` may come before anything else that happens to a call made here.

    It does not right inside a derivative: each example has a gradient of its own.
    """
    trace: Any = jex.find_top_trace(())
    return type(trace).__name__ not in ("EvalTrace", "JVPTrace", "LinearizeTrace")

"""Identities that mark, inside a traced program, residuals and compressed calls.

The mark on a residual carries the decision about it, so a table can be read back from
any program that contains compressed calls, however deep inside jit, scan or vmap they
are and whatever JAX had cached. It also stops second-order differentiation, which would
otherwise silently differentiate through the rounding. The mark on a call says how it is
compressed, so that it can be evaluated in another way, for measuring. Marks compile to
nothing.
"""

import dataclasses
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._decision import Decision
from jaxact._jaxpr.types import Array, Axes, Tangent
from jaxact._policy import Policy
from jaxact._trace import Flat

mark_p = jex.Primitive("jaxact_residual")
call_p = jex.Primitive("jaxact_call")


@dataclasses.dataclass(frozen=True, eq=False)
class CompressedCall:
    """A compressed call: the function, and how its residuals are stored.

    Attributes:
      prefix: its module path.
    """

    flat: Flat
    policy: Policy
    prefix: str


def mark_call(seed: Array, call: CompressedCall) -> jax.Array:
    """A compressed call's seed, marked as such."""
    return call_p.bind(seed, call=call)


def mark(
    x: jax.Array, decision: Decision, policy: Policy, used_rules: tuple[int, ...]
) -> jax.Array:
    """`x`, marked as a residual that `policy` decided about; see `jaxact.residuals`."""
    return mark_p.bind(x, decision=decision, policy=policy, used_rules=used_rules)


def _batch(args: tuple[Array], dims: Axes, **params: object) -> tuple[Any, Any]:
    return mark_p.bind(*args, **params), dims[0]


def _differentiate(
    primals: tuple[Array],
    tangents: tuple[Tangent],
    *,
    decision: Decision,
    **params: object,
) -> tuple[Any, Tangent]:
    if not decision.action.is_differentiable:
        raise TypeError(
            "jaxact: second-order differentiation of a compressed function. Its "
            f"residual {decision.residual} is stored by {decision.action}, whose "
            "rounding has no derivative. Use the uncompressed function for the inner "
            "derivative, or compress with Policy(default=Exact()). Reports, such as "
            "jaxact.residuals, take the loss itself, not its gradient."
        )
    return mark_p.bind(*primals, decision=decision, **params), tangents[0]


def _batch_call(args: tuple[Array], dims: Axes, **params: object) -> tuple[Any, Any]:
    return call_p.bind(*args, **params), dims[0]


for primitive, batch in ((mark_p, _batch), (call_p, _batch_call)):
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.primitive_batchers[primitive] = batch
ad.primitive_jvps[mark_p] = _differentiate

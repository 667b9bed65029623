"""The identity that marks, inside a traced program, where a residual is stored.

A mark carries what was decided for the residual, so a table can be read back from any
program that contains compressed calls, however deep inside jit, scan or vmap they are
and whatever JAX had cached. A mark compiles to nothing. It also stops second-order
differentiation, which would otherwise silently differentiate through the rounding.
"""

from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._codec import is_stored_exactly
from jaxact._policy import Decision, Policy

mark_p = jex.Primitive("jaxact_residual")


def mark(
    x: jax.Array, decision: Decision, policy: Policy, used_rules: tuple[int, ...]
) -> jax.Array:
    """`x`, marked as a residual that `policy` decided about; see `jaxact.residuals`."""
    return mark_p.bind(x, decision=decision, policy=policy, used_rules=used_rules)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return mark_p.bind(*args, **params), dims[0]


def _differentiate(primals: Any, tangents: Any, **params: Any) -> Any:
    decision = params["decision"]
    if not is_stored_exactly(decision.action):
        raise TypeError(
            "jaxact: second-order differentiation of a compressed function. Its "
            f"residual {decision.residual} is stored by {decision.action}, whose "
            "rounding has no derivative. Use the uncompressed function for the inner "
            "derivative, or compress with Policy(default=Exact())."
        )
    return mark_p.bind(*primals, **params), tangents[0]


mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])
batching.primitive_batchers[mark_p] = _batch
ad.primitive_jvps[mark_p] = _differentiate

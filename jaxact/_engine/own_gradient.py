"""Tell a function that takes the gradient itself, such as a whole training step.

Compressed as a whole it would store the residuals of its own derivative in a small
form, and nothing takes that derivative.
"""

from collections import Counter
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import mlir

from jaxact._engine.lines import user_line
from jaxact._engine.warnings import warn
from jaxact._flat import Flat
from jaxact._jaxpr.read import is_backward, programs_in
from jaxact._jaxpr.types import Jaxpr
from jaxact._plan.mark import identity

warning_p = jex.Primitive("jaxact_warning")


def warns_when_evaluated(x: jax.Array, name: str) -> jax.Array:
    """`x`; a warning that nothing differentiates a function which takes a gradient."""
    return warning_p.bind(x, name=name)


def _evaluate(x: Any, *, name: str) -> Any:
    warn(
        user_line(),
        f"jaxact: {name} takes a gradient itself, and nothing differentiates it here: "
        "nothing is compressed. Compress the function whose gradient it takes, as in "
        "jax.grad(jaxact.compress(loss)).",
    )
    return x


identity(warning_p)
warning_p.def_impl(_evaluate)
mlir.register_lowering(
    warning_p, lambda ctx, x, **params: [_evaluate(x, **params)], cacheable=False
)


def returns_own_gradient(flat: Flat) -> bool:
    """Whether a gradient is inside, and the parameters' or their updates come out.

    Parameters are here the argument with most arrays, and each of their shapes is an
    output's. A model of energies and forces takes the gradient of positions instead: it
    is compressed where a loss differentiates it.
    """
    arrays: dict[int, list[object]] = {}
    for owner, v in zip(flat.owners, flat.invars, strict=True):
        if owner >= 0 and v.aval.shape:
            arrays.setdefault(owner, []).append((v.aval.shape, v.aval.dtype))
    parameters = Counter(max(arrays.values(), key=len, default=[]))
    outputs = Counter((v.aval.shape, v.aval.dtype) for v in flat.jaxpr.outvars)
    return bool(parameters) and parameters <= outputs and _has_gradient(flat.jaxpr)


def _has_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a gradient is taken in a program, however deep."""
    return any(
        is_backward(eqn) or any(map(_has_gradient, programs_in(eqn)))
        for eqn in jaxpr.eqns
    )

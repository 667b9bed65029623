"""Evaluate traced programs equation by equation.

Two reasons. Compiling a program takes half a second, evaluating it milliseconds: NumPy
does most operations, and JAX compiles each of the others once for each shape. And no
fusion changes the rounding: two programs that compute the same, operation by
operation, give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fuzz.numpy_rules import RULES

_CALLS = frozenset(
    "jit pjit closed_call core_call eval_jaxpr checkpoint remat remat2 "
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "definition")
# Each rounds its result, by at most one unit in the last place of its type.
ARITHMETIC = frozenset(
    "add sub mul div add_any dot_general conv_general_dilated reduce_sum exp exp2 log "
    "log1p expm1 tanh logistic integer_pow pow sqrt rsqrt cbrt erf erfc erf_inv lgamma "
    "digamma sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh square "
    "cumsum cumprod cumlogsumexp reduce_prod reduce_window_sum scatter-add fft "
    "triangular_solve cholesky lu eigh qr svd householder_product geqrf".split()
)

After = Callable[[Any, list[Any]], list[Any]]


def _leave(eqn: Any, outputs: list[Any]) -> list[Any]:
    return outputs


def evaluate(closed: Any, args: Sequence[Any], after: After = _leave) -> list[Any]:
    """Outputs of a closed jaxpr; `after` may change those of each equation."""
    jaxpr, env = _bound(closed, args)
    with np.errstate(all="ignore"):
        _run(jaxpr.eqns, env, after)
    return [_read(env, v) for v in jaxpr.outvars]


def _bound(closed: Any, args: Sequence[Any]) -> tuple[Any, dict[Any, Any]]:
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    return jaxpr, {v: _as_numpy(x) for v, x in env.items()}


def _as_numpy(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return np.asarray(x)


def _read(env: dict[Any, Any], v: Any) -> Any:
    if isinstance(v, core.Literal):
        return np.asarray(v.val, v.aval.dtype)
    return env[v]


def _run(eqns: Sequence[Any], env: dict[Any, Any], after: After) -> None:
    for eqn in eqns:
        inputs = [_read(env, v) for v in eqn.invars]
        env |= dict(zip(eqn.outvars, _apply(eqn, inputs, after), strict=True))


def _apply(eqn: Any, inputs: list[Any], after: After) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    body = next((params[key] for key in _BODIES if key in params), None)
    is_call = name in _CALLS or name.endswith(("_opaque", "_operation"))
    if name == "call_hi_primitive":  # a custom rule that nothing is differentiated by
        body = getattr(getattr(params["_prim"], "traced", None), "jaxpr", None)
        is_call = True
    if body is not None and is_call:
        return evaluate(body, inputs, after)
    if name == "scan":
        return _scan(eqn, inputs, after)
    if name == "while":
        return _while(params, inputs, after)
    if name == "cond" and np.ndim(inputs[0]) == 0:
        branch = params["branches"][int(inputs[0])]
        return evaluate(branch, inputs[1:], after)
    if name in ("optimization_barrier", "jaxact_residual"):  # marks stored arrays
        return inputs
    rule = RULES.get(name)
    output = NotImplemented if rule is None else rule(eqn, *inputs)
    if output is not NotImplemented:
        return after(eqn, [np.asarray(output, eqn.outvars[0].aval.dtype)])
    outputs = eqn.primitive.bind(*inputs, **params)
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    return after(eqn, [_as_numpy(x) for x in outputs])


def _scan(eqn: Any, inputs: list[Any], after: After) -> list[Any]:
    params = eqn.params
    if not params["length"]:
        return list(eqn.primitive.bind(*inputs, **params))
    num_consts, num_carry = _scan_counts(eqn)
    consts, length = inputs[:num_consts], params["length"]
    carry = inputs[num_consts : num_consts + num_carry]
    rows = inputs[num_consts + num_carry :]
    order = range(length)[::-1] if params["reverse"] else range(length)
    results: list[Any] = [None] * length
    for i in order:
        row = [x[i] for x in rows]
        outputs = evaluate(params["jaxpr"], [*consts, *carry, *row], after)
        carry, results[i] = outputs[:num_carry], outputs[num_carry:]
    return [*carry, *(_stack(column) for column in zip(*results, strict=True))]


def _scan_counts(eqn: Any) -> tuple[int, int]:
    """(constants, carries): what is stacked has one axis more than in the body."""
    jaxpr = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])

    def stacked(outer: Any, inner: Any) -> bool:
        return len(outer.aval.shape) > len(inner.aval.shape)

    num_carry = len(eqn.outvars) - sum(map(stacked, eqn.outvars, jaxpr.outvars))
    num_xs = sum(map(stacked, eqn.invars, jaxpr.invars))
    return len(eqn.invars) - num_xs - num_carry, num_carry


def _stack(column: Sequence[Any]) -> Any:
    if jnp.issubdtype(column[0].dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(
            jnp.stack([jax.random.key_data(key) for key in column])
        )
    return np.stack(column)


def _while(params: Any, inputs: list[Any], after: After) -> list[Any]:
    in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:in_cond], inputs[in_cond : in_cond + in_body]
    carry = inputs[in_cond + in_body :]
    while bool(evaluate(params["cond_jaxpr"], [*of_cond, *carry], after)[0]):
        carry = evaluate(params["body_jaxpr"], [*of_body, *carry], after)
    return carry


def randomly_rounded(closed: Any, args: Sequence[Any], seed: int) -> list[Any]:
    """Outputs where each operation makes a random error of up to its rounding error.

    The spread of several such runs is what float arithmetic in another order can
    change: Monte Carlo arithmetic (Parker 1997).
    """
    rng = np.random.default_rng(seed)

    def perturbed(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        info = jnp.finfo(x.dtype)
        relative = float(info.eps) * rng.uniform(-1, 1, x.shape)
        wide = np.complex64 if jnp.iscomplexobj(x) else np.float32
        value = np.asarray(x).astype(wide) * (1 + relative.astype(np.float32))
        if x.dtype == np.float16:  # underflows in many programs, to this spacing
            spacing = float(info.smallest_subnormal) * rng.uniform(-1, 1, x.shape)
            value = value + np.where(x == 0, 0, spacing).astype(np.float32)
        return value.astype(x.dtype)

    def after(eqn: Any, outputs: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        narrows = name == "convert_element_type"
        if name in ARITHMETIC or narrows:
            return [perturbed(x) for x in outputs]
        return outputs

    return evaluate(closed, args, after)

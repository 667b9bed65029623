"""What differs between the supported JAX versions, each with its reason.

Everything here uses documented modules (`jax.extend`, `jax.interpreters`); nothing
reaches into `jax._src`. Versions meant: 0.10.2 to 0.12.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex, source_info_util
from jax.interpreters import partial_eval

# 0.12 batches a backward rule correctly when an output ignores the mapped argument;
# before, such an output's cotangent was counted once per example, so `_engine`
# splits outputs by what they depend on.
HAS_GENERIC_BATCHING = (
    "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
)
VJP_OPTIONS: dict[str, Any] = {"symbolic_zeros": True} | (
    {"generic_batching": True} if HAS_GENERIC_BATCHING else {}
)

# Calls whose body has the call's own inputs and outputs. `pjit` and `closed_call` are
# 0.10 names, `eval_jaxpr` is what 0.12 leaves after partial evaluation.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
}


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and its constants; in 0.12 the two classes are one."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def call_body(eqn: Any) -> Any | None:
    """The body of a call equation, if its inputs and outputs map one to one."""
    key = CALLS.get(eqn.primitive.name)
    closed = None if key is None else eqn.params.get(key)
    if closed is None:
        return None
    jaxpr, _ = open_jaxpr(closed)
    same = len(jaxpr.invars) == len(eqn.invars)
    return closed if same and len(jaxpr.outvars) == len(eqn.outvars) else None


def custom_vjp_body(eqn: Any) -> Any | None:
    """What a call with a custom derivative rule evaluates, if it is one.

    0.12 has these calls as objects of one primitive, which hold the traced function.
    """
    if eqn.primitive.name == "call_hi_primitive":
        traced = getattr(eqn.params["_prim"], "traced", None)
        closed = None if traced is None else traced.jaxpr
    elif eqn.primitive.name == "custom_vjp_call":
        closed = eqn.params["call_jaxpr"]
    else:
        return None
    if closed is None:
        return None
    jaxpr, _ = open_jaxpr(closed)
    return closed if len(jaxpr.invars) == len(eqn.invars) else None


def without_unused(jaxpr: Any) -> Any:
    """`jaxpr` without what none of its outputs needs, also inside calls and loops."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(constants, carries) of a scan; 0.12 dropped `num_consts` and `num_carry`.

    A carry has its body's rank, a stacked input or output one more.
    """
    jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])

    def stacked(outer: Any, inner: Any) -> bool:
        return len(outer.aval.shape) == len(inner.aval.shape) + 1

    num_ys = sum(map(stacked, eqn.outvars, jaxpr.outvars))
    num_xs = sum(map(stacked, eqn.invars, jaxpr.invars))
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Apply one equation, keeping the source line and scope it was traced under."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # (functions, params) until 0.12, params alone since
    functions, params = params if isinstance(params, tuple) else ((), params)
    with traced_at(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def varying_alike(values: Sequence[Any]) -> list[Any]:
    """The values as operands of one primitive inside a `shard_map` that checks them.

    Primitives, unlike the functions of `lax`, do not cast a constant themselves.
    """
    axes = [set(jax.typeof(v).manual_axis_type.varying) for v in values]
    every = set().union(*axes)
    return [
        lax.pcast(v, tuple(every - own), to="varying") if own != every else v
        for v, own in zip(values, axes, strict=True)
    ]


def reduced_like(gradient: Any, aval: Any) -> Any:
    """A gradient, summed over the manual axes over which its argument is the same.

    0.12 does that to what a custom derivative rule returns; 0.10 refuses it.
    """
    own = jax.typeof(gradient).manual_axis_type.varying
    more = set(own) - set(aval.manual_axis_type.varying)
    return lax.psum(gradient, tuple(more)) if more else gradient


def traced_at(eqn: Any) -> Any:
    """A context in which what is traced has the source line and scope of `eqn`."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def is_literal(v: Any) -> bool:
    return isinstance(v, jex.Literal)


def value(v: Any, env: dict[Any, Any]) -> Any:
    """The value of a variable or literal."""
    return v.val if is_literal(v) else env[v]


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among variables and literals."""
    return [v for v in atoms if not is_literal(v)]


def with_outputs(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """`jaxpr` with other equations and outputs."""
    info = jaxpr.debug_info
    paths = ("",) * len(outvars) if info.result_paths is not None else None
    return jaxpr.replace(
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=info._replace(result_paths=paths),
    )


def with_constants(jaxpr: Any, variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """`jaxpr` with more constants; in 0.12 it holds their values too."""
    if not variables:
        return jaxpr
    constvars = [*jaxpr.constvars, *variables]
    held = {"consts": [*jaxpr.consts, *values]} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=constvars, **held)


def with_inputs(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """`jaxpr` with more inputs, after its own."""
    inputs = [*jaxpr.invars, *variables]
    info = jaxpr.debug_info._replace(arg_names=None)
    return jaxpr.replace(invars=inputs, debug_info=info)


def without_constants(jaxpr: Any) -> Any:
    """`jaxpr` with its constants as the first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    info = jaxpr.debug_info._replace(arg_names=("",) * len(inputs))
    return jaxpr.replace(constvars=[], invars=inputs, debug_info=info)


def is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a `jit` without shardings, donation or options.

    What a jit does not say about a sharding is an instance of a private class.
    """
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects:
        return False
    params = eqn.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    return (
        all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
    )


def new_variable(aval: Any) -> Any:
    return jex.Var(aval)


@functools.cache
def _name_primitive() -> Any:
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0))
    return jaxpr.eqns[0].primitive


def name_equation(like: Any, v: Any, name: str) -> Any:
    """An equation that calls `v` by a `checkpoint_name`; its output is new."""
    out, params = new_variable(v.aval), {"name": name}
    return new_equation(like, _name_primitive(), [v], [out], params)


def new_equation(like: Any, primitive: Any, ins: Any, outs: Any, params: Any) -> Any:
    """An equation without side effects or a scope, at the source line of `like`."""
    source = like.source_info.replace(name_stack=source_info_util.new_name_stack())
    return jex.new_jaxpr_eqn(
        list(ins), list(outs), primitive, params, jex.no_effects, source
    )

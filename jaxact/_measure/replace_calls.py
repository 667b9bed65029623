"""Evaluate a traced program with other functions in place of its compressed calls.

A compressed call leaves its mark in a program that is traced without being
differentiated, so it can be found again inside jit, scan, branches, checkpoints and
shard_map, whatever transformed it since. Calls inside custom rules, loops without a
fixed length and a shard_map that checks varying axes are left as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxact._engine.scan import rebuild
from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr
from jaxact._jaxpr.evaluate import bind, traced_at, value_of
from jaxact._jaxpr.primitives import CHECKPOINTS, JITS
from jaxact._plan.mark import CompressedCall, call_p

# (call, seed, values, extra) -> outputs of the call
Replace = Callable[[CompressedCall, Any, Sequence[Any], Any], list[Any]]


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    replace: Replace,
    extra: Any,
) -> list[Any]:
    """Outputs of the program, each compressed call evaluated by `replace`.

    `extra` is a pytree of arrays that reaches every replaced call.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(inputs, [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        given = [value_of(v, env) for v in eqn.invars]
        found = find_compressed_call(eqn)
        if found is not None:
            with traced_at(eqn):
                out = replace(found, given[0], given[1:], extra)
        elif has_calls(eqn):
            with traced_at(eqn):
                out = _evaluate_inside(eqn, given, replace, extra)
        else:
            out = bind(eqn, given)
        env.update(zip(eqn.outvars, out, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def find_compressed_call(eqn: Any) -> CompressedCall | None:
    """The compressed call that an equation is, as a function of its present inputs."""
    mark = _mark_in(eqn)
    if mark is None:
        return None
    jaxpr, _ = open_jaxpr(custom_vjp_body(eqn))
    call: CompressedCall = mark.params["call"]
    plain = jaxpr.replace(
        invars=jaxpr.invars[1:],
        eqns=[e for e in jaxpr.eqns if e is not mark],
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    return dataclasses.replace(call, flat=dataclasses.replace(call.flat, jaxpr=plain))


def _mark_in(eqn: Any) -> Any | None:
    """The equation that marks a compressed call, if `eqn` is one."""
    body = custom_vjp_body(eqn)
    if body is None:
        return None
    jaxpr, consts = open_jaxpr(body)
    if consts:
        return None
    return next((e for e in jaxpr.eqns if e.primitive is call_p), None)


def has_calls(eqn: Any) -> bool:
    """Whether there are compressed calls inside that can be replaced."""
    return any(
        _mark_in(e) is not None or has_calls(e)
        for body in _bodies(eqn)
        for e in open_jaxpr(body)[0].eqns
    )


def _bodies(eqn: Any) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "shard_map" and eqn.params["check_vma"]:
        return ()  # what goes in would have to be cast to each call's manual axes
    if name in ("scan", *JITS, "closed_call", "shard_map", *CHECKPOINTS):
        return [eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))]
    return eqn.params["branches"] if name == "cond" else ()


def _evaluate_inside(
    eqn: Any, values: Sequence[Any], replace: Replace, extra: Any
) -> list[Any]:
    def function(body: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = open_jaxpr(body)
        return lambda extra, *xs: evaluate(jaxpr, consts, xs, replace, extra)

    name, params = eqn.primitive.name, eqn.params
    bodies = [function(body) for body in _bodies(eqn)]
    if name == "scan":
        return rebuild(eqn, functools.partial(bodies[0], extra), values)
    if name == "cond":
        index, *operands = values
        return list(lax.switch(index, bodies, extra, *operands))
    if name in CHECKPOINTS:
        again = jax.checkpoint(
            bodies[0], policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
        return list(again(extra, *values))
    if name == "shard_map":
        mapped = jax.shard_map(
            bodies[0],
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=False,
        )
        return list(mapped(extra, *values))
    return bodies[0](extra, *values)

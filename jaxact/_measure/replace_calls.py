"""Evaluate a traced program with its compressed calls replaced.

A compressed call leaves its mark in a program that is traced without being
differentiated, so it can be recognized inside jit, scan, branches, checkpoints and
shard_map, after any transformation. Calls inside custom rules and loops without a fixed
length are left as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxact._engine.scan import rebuild
from jaxact._engine.storage import Draw
from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr
from jaxact._jaxpr.evaluate import bind, traced_at, value_of
from jaxact._jaxpr.primitives import CALL_BODIES, CHECKPOINTS, JITS
from jaxact._jaxpr.types import Array, ClosedJaxpr, Eqn, Jaxpr
from jaxact._plan.mark import CompressedCall, call_p

# (call, seed, values, common draw) -> outputs
Replace: TypeAlias = Callable[
    [CompressedCall, jax.Array, Sequence[Array], Draw], list[jax.Array]
]

# The parameter that holds the body, where there is one to evaluate.
_BODY = {name: CALL_BODIES[name] for name in (*JITS, *CHECKPOINTS, "closed_call")}
_BODY |= {"scan": "jaxpr", "shard_map": "jaxpr"}


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Array],
    values: Sequence[Array],
    replace: Replace,
    draw: Draw,
) -> list[jax.Array]:
    """The program's outputs, each compressed call evaluated by `replace`.

    `draw` reaches every replaced call.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(inputs, [*consts, *values], strict=True))
    for eqn in jaxpr.eqns:
        operands = [value_of(v, env) for v in eqn.invars]
        call = find_compressed_call(eqn)
        if call is not None:
            with traced_at(eqn):
                out = replace(call, operands[0], operands[1:], draw)
        elif has_calls(eqn):
            with traced_at(eqn):
                out = _evaluate_inside(eqn, operands, replace, draw)
        else:
            out = bind(eqn, operands)
        env.update(zip(eqn.outvars, out, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def find_compressed_call(eqn: Eqn) -> CompressedCall | None:
    """The compressed call that an equation is, as a function on its present inputs."""
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


def _mark_in(eqn: Eqn) -> Eqn | None:
    """The equation that marks a compressed call, if `eqn` is one."""
    body = custom_vjp_body(eqn)
    if body is None:
        return None
    jaxpr, consts = open_jaxpr(body)
    if consts:
        return None
    marks = (e for e in jaxpr.eqns if e.primitive is call_p)
    return next((e for e in marks if e.params["call"] is not None), None)


def has_calls(eqn: Eqn) -> bool:
    """Whether there are compressed calls inside that can be replaced."""
    return any(
        _mark_in(e) is not None or has_calls(e)
        for body in _bodies(eqn)
        for e in open_jaxpr(body)[0].eqns
    )


def _bodies(eqn: Eqn) -> Sequence[ClosedJaxpr]:
    name = eqn.primitive.name
    if name == "cond":
        return eqn.params["branches"]
    return [eqn.params[_BODY[name]]] if name in _BODY else ()


def _evaluate_inside(
    eqn: Eqn, values: Sequence[Array], replace: Replace, draw: Draw
) -> list[jax.Array]:
    def function(body: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
        jaxpr, consts = open_jaxpr(body)
        return lambda draw, *xs: evaluate(jaxpr, consts, xs, replace, draw)

    name, params = eqn.primitive.name, eqn.params
    functions = [function(body) for body in _bodies(eqn)]
    if name == "scan":
        # A call in a user's scan has one seed in all steps.
        return rebuild(eqn, lambda step, *xs: functions[0](draw, *xs), values)
    if name == "cond":
        index, *operands = values
        return list(lax.switch(index, functions, draw, *operands))
    if name in CHECKPOINTS:
        checkpointed = jax.checkpoint(
            functions[0], policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
        return list(checkpointed(draw, *values))
    if name == "shard_map":
        mapped = jax.shard_map(
            functions[0],
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(mapped(draw, *values))
    return functions[0](draw, *values)

"""Evaluate a traced program, equation by equation."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util

from jaxact._jaxpr.compat import bind_params
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Array, Atom, Env, Eqn


def value_of(v: Atom, env: Env) -> Any:
    """A variable's or literal's value."""
    return v.val if is_literal(v) else env[v]


def bind(eqn: Eqn, values: Sequence[Array]) -> list[Any]:
    """Apply one equation, keeping the source line and scope it was traced under."""
    functions, params = bind_params(eqn)
    with traced_at(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def traced_at(eqn: Eqn) -> contextlib.AbstractContextManager[None]:
    """A context in which operations get the source line and scope of `eqn`."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def varying_alike(values: Sequence[Array]) -> list[Any]:
    """The values as operands for one primitive inside a `shard_map` that checks them.

    Primitives, unlike `lax` functions, do not cast a constant themselves.
    """
    axes = [set(jax.typeof(v).manual_axis_type.varying) for v in values]
    every = set().union(*axes)
    return [
        lax.pcast(v, tuple(every - own), to="varying") if own != every else v
        for v, own in zip(values, axes, strict=True)
    ]

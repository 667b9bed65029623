"""Differences between the supported JAX versions, each with its reason.

Everything here uses documented modules (`jax.extend`, `jax.interpreters`); nothing
reaches into `jax._src`. Versions meant: 0.10.2 to 0.12.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend import core as jex

from jaxact._jaxpr.types import Array, Atom, Aval, ClosedJaxpr, Eqn, Jaxpr, Var

T = TypeVar("T")

# 0.12 evaluates a custom backward rule anew for each use of a program, and maps only
# the outputs that depend on a mapped argument; before, see `_engine`'s `custom_rule`
# and `outputs`.
HAS_GENERIC_BATCHING = (
    "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
)
BARRIER_KEEPS_TYPES = jax.__version_info__ >= (0, 11)
VJP_OPTIONS: dict[str, Any] = {"symbolic_zeros": True} | (
    {"generic_batching": True} if HAS_GENERIC_BATCHING else {}
)

# The name of the primitive that marks a compressed call in its body.
CALL_MARK = "jaxact_call"
# The classes of a program; in 0.12 the two are one.
PROGRAMS = (jex.Jaxpr, getattr(jex, "ClosedJaxpr", jex.Jaxpr))


def open_jaxpr(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """The jaxpr and its constants; in 0.12 the two classes are one."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def with_jaxpr(closed: ClosedJaxpr, jaxpr: Jaxpr, **changes: Any) -> Any:
    """`closed` with another jaxpr that has the same constants, or with other ones."""
    is_pair = hasattr(closed, "consts") and hasattr(closed, "jaxpr")
    if not is_pair or closed.jaxpr is closed:
        return jaxpr
    return closed.replace(jaxpr=jaxpr, **changes)


def custom_vjp_body(eqn: Eqn) -> ClosedJaxpr | None:
    """The body of a call with a custom backward rule; None for another equation.

    0.12 has one primitive for these calls, with an object that holds the function.
    Before, a compressed call is a `custom_jvp`, see `custom_rule`.
    """
    if eqn.primitive.name == "call_hi_primitive":
        traced = getattr(eqn.params["_prim"], "traced", None)
        closed = None if traced is None else traced.jaxpr
    elif eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call"):
        closed = eqn.params["call_jaxpr"]
    else:
        return None
    if closed is None:
        return None
    jaxpr, _ = open_jaxpr(closed)
    if eqn.primitive.name == "custom_jvp_call" and not any(
        e.primitive.name == CALL_MARK for e in jaxpr.eqns
    ):
        return None
    return closed if len(jaxpr.invars) == len(eqn.invars) else None


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """(constants, carries) of a scan; 0.12 dropped `num_consts` and `num_carry`.

    A carry has its body's rank, a stacked input or output one more.
    """
    jaxpr, _ = open_jaxpr(eqn.params["jaxpr"])

    def stacked(outer: Atom, inner: Atom) -> bool:
        return len(outer.aval.shape) == len(inner.aval.shape) + 1

    num_ys = sum(map(stacked, eqn.outvars, jaxpr.outvars))
    num_xs = sum(map(stacked, eqn.invars, jaxpr.invars))
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry


def reduced_like(gradient: jax.Array, aval: Aval) -> jax.Array:
    """A gradient, summed over the manual axes over which its argument is the same.

    0.12 does that to the results of a custom derivative rule; 0.10 refuses it.
    """
    varying = jax.typeof(gradient).manual_axis_type.varying
    summed = set(varying) - set(aval.manual_axis_type.varying)
    return lax.psum(gradient, tuple(summed)) if summed else gradient


def barrier(operands: T) -> T:
    """`lax.optimization_barrier`: no result is there before all operands are.

    In 0.10 all its results vary over the manual axes over which any operand does, which
    is then no cotangent's type. There the results that vary over fewer axes wait only
    for operands that vary over no others.
    """
    leaves, tree = jax.tree.flatten(operands)
    kinds = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in leaves]
    if BARRIER_KEEPS_TYPES or len(set(kinds)) <= 1:
        return lax.optimization_barrier(operands)
    results = list(leaves)
    for kind in dict.fromkeys(kinds):
        waiting = [i for i, k in enumerate(kinds) if k <= kind]
        held = lax.optimization_barrier([leaves[i] for i in waiting])
        for i, x in zip(waiting, held, strict=True):
            if kinds[i] == kind:
                results[i] = x
    return jax.tree.unflatten(tree, results)


def with_constants(
    jaxpr: Jaxpr, variables: Sequence[Var], values: Sequence[Array]
) -> Jaxpr:
    """`jaxpr` with more constants; in 0.12 it holds their values too."""
    if not variables:
        return jaxpr
    changes: dict[str, Any] = {"constvars": [*jaxpr.constvars, *variables]}
    if hasattr(jaxpr, "consts"):
        changes["consts"] = [*open_jaxpr(jaxpr)[1], *values]
    return jaxpr.replace(**changes)


def is_plain_jit(eqn: Eqn) -> bool:
    """Whether an equation is a `jit` without shardings or options.

    That it donates arguments is a permission, which nobody needs inside another one.
    """
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects:
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    # Where it says nothing about one, its parameter has a private class.
    asked = [s for s in shardings if type(s).__name__ != "UnspecifiedValue"]
    return not any(asked) and not eqn.params["compiler_options_kvs"]


def with_body(eqn: Eqn, body: Jaxpr) -> dict[str, Any]:
    """The parameters of a `jit` with another body, which has no constants.

    Of the inputs that the body has before the equation's own the jit asks nothing.
    `jax.jit` with `in_shardings` cannot say that of one input alone where a mesh is
    set: it takes None for replicated there.
    """
    more = len(body.invars) - len(eqn.invars)
    plain = jax.make_jaxpr(jax.jit(lambda x: x))(0).eqns[0].params
    asked = {
        name: (*plain[name] * more, *eqn.params[name])
        for name in ("in_shardings", "in_layouts", "donated_invars")
    }
    closed = with_jaxpr(eqn.params["jaxpr"], body, consts=[])
    return eqn.params | asked | {"jaxpr": closed}


def bind_params(eqn: Eqn) -> tuple[Sequence[Callable[..., Any]], dict[str, Any]]:
    """The functions and parameters to bind an equation's primitive with again."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # (functions, params) until 0.12, params alone since
    return params if isinstance(params, tuple) else ((), params)

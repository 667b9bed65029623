"""Slopes: what a tangent is multiplied with along one elementwise equation.

A slope is an integer, an array of the equation's shape (or one that broadcasts to it),
or a `Choice`. Nothing here makes an array that does not depend on the data: `scan`
would keep it, as large as a residual, from its forward to its backward pass.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import bind, traced_at, value_of, varying_alike
from jaxact._jaxpr.primitives import LINEAR, SMOOTH
from jaxact._jaxpr.read import is_literal, is_piecewise_linear
from jaxact._jaxpr.rewrite import flatten, jit_body


@dataclass(frozen=True)
class Choice:
    """`value` where a branch was taken, elsewhere zero, whatever it is multiplied with.

    As in JAX: the derivative of where(x > 0, sqrt(x), 0) at x < 0 is 0, not 0 * inf.
    """

    taken: jax.Array
    value: Any = 1


def slopes_of(
    eqn: Any, inputs: Sequence[Any], moving: Sequence[int]
) -> tuple[Any, list[Any]]:
    """The output of an equation and its slopes in the moving inputs."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name in LINEAR or name in ("mul", "select_n"):
        out = bind(eqn, inputs)[0]
        if name == "mul":
            return out, [jnp.asarray(inputs[1 - i], dtype) for i in moving]
        if name == "select_n":
            which = inputs[0].astype(jnp.int32)
            return out, [Choice(which == i - 1) for i in moving]
        is_minus = {"sub": {1}, "neg": {0}}.get(name, set())
        return out, [-1 if i in is_minus else 1 for i in moving]
    out, slopes = bind(eqn, inputs)[0], []
    for i in moving:
        slope = _slope(eqn, inputs, i)
        slopes.append(Choice(slope != 0, slope) if is_piecewise_linear(eqn) else slope)
    return out, slopes


def _slope(eqn: Any, inputs: Sequence[Any], i: int) -> Any:
    """The slope of a nonlinear equation in its i-th input."""
    dtypes = tuple(v.aval.dtype for v in eqn.invars)
    params = tuple(eqn.params.items())
    try:
        program = _scalar_slope(eqn.primitive, params, dtypes, i)
    except TypeError:  # unhashable parameters
        program = None
    if program is not None:
        with traced_at(eqn):
            return _evaluate(program, inputs)

    def along(x: Any) -> Any:
        return bind(eqn, [*inputs[:i], x, *inputs[i + 1 :]])[0]

    x = jnp.asarray(inputs[i], dtypes[i])
    return jax.jvp(along, (x,), (jnp.ones_like(x),))[1]


@functools.cache
def _scalar_slope(
    primitive: Any, params: tuple[Any, ...], dtypes: tuple[Any, ...], i: int
) -> Any | None:
    """The slope of an elementwise primitive as a program of scalars.

    Evaluated on arrays it is what JAX would compute, without an array of ones. None
    where it does more than arithmetic, which needs shapes.
    """
    if primitive.name not in SMOOTH:
        return None

    def slope(*scalars: Any) -> Any:
        f = lambda x: primitive.bind(*scalars[:i], x, *scalars[i + 1 :], **dict(params))
        return jax.jvp(f, (scalars[i],), (np.ones((), dtypes[i]),))[1]

    closed = jax.make_jaxpr(slope)(*[jax.ShapeDtypeStruct((), d) for d in dtypes])
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, more = flatten(jaxpr, jit_body)
    simple = all(e.primitive.name in SMOOTH | LINEAR for e in jaxpr.eqns)
    return jaxpr if simple and not consts and not more else None


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> Any:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        values = varying_alike([value_of(v, env) for v in eqn.invars])
        ones = [i for i, v in enumerate(eqn.invars) if _is_one(v)]
        if eqn.primitive.name == "mul" and ones:
            env[eqn.outvars[0]] = values[1 - ones[0]]
        else:
            # Not as it was traced: the program may have been, for another mesh.
            env[eqn.outvars[0]] = eqn.primitive.bind(*values, **eqn.params)
    return value_of(jaxpr.outvars[0], env)


def _is_one(v: Any) -> bool:
    return is_literal(v) and v.val == 1


def times(a: Any, b: Any) -> Any:
    """The product of two slopes."""
    if isinstance(a, Choice) and isinstance(b, Choice):
        return Choice(a.taken & b.taken, times(a.value, b.value))
    if isinstance(b, Choice):
        a, b = b, a
    if isinstance(a, Choice):
        if isinstance(b, int):
            return Choice(a.taken, times(a.value, b))
        return _chosen(a.taken, times(a.value, b))
    if isinstance(a, int) or isinstance(b, int):
        number, other = (a, b) if isinstance(a, int) else (b, a)
        return other if number == 1 else other * number
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype) * b.astype(dtype)


def plus(a: Any, b: Any) -> Any:
    """The sum of two slopes."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    a, b = (_array(x) if isinstance(x, Choice) else x for x in (a, b))
    if isinstance(a, int) or isinstance(b, int):
        return a + b
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def apply(slope: Any, tangent: Any, like: Any) -> Any:
    """slope * tangent, in the shape and dtype of `like`."""
    taken = None
    if isinstance(slope, Choice):
        taken, slope = slope.taken, slope.value
    moved = tangent.astype(like.dtype)
    if isinstance(slope, jax.Array):
        moved = moved * slope.astype(like.dtype)
    elif slope != 1:
        moved = moved * slope
    moved = jnp.broadcast_to(moved, like.shape)
    return moved if taken is None else jnp.where(taken, moved, jnp.zeros_like(moved))


def _array(choice: Choice) -> jax.Array:
    value, taken = choice.value, choice.taken
    return _chosen(taken, taken.astype(jnp.float32) * value)


def _chosen(taken: jax.Array, value: jax.Array) -> jax.Array:
    taken, value = jnp.broadcast_arrays(taken, value)
    zeros = (taken & False).astype(value.dtype)  # depends on the data, in name
    return jnp.where(taken, value, zeros)

"""Slopes: the factors of a tangent along one elementwise equation.

A slope is an integer, an array with the equation's shape (or one that broadcasts to
it), or `Gated`. Nothing here makes an array that does not depend on the data: `scan`
would keep it, as large as a residual, from its forward to its backward pass.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import bind, traced_at, value_of, varying_alike
from jaxact._jaxpr.primitives import LINEAR, SMOOTH
from jaxact._jaxpr.read import is_literal, is_piecewise_linear
from jaxact._jaxpr.rewrite import flatten, jit_body
from jaxact._jaxpr.types import Array, Atom, Dtype, Env, Eqn, Jaxpr, Primitive


@dataclass(frozen=True)
class Gated:
    """`value` where a gate is open, elsewhere zero, whatever it is multiplied with.

    As in JAX: the derivative of where(x > 0, sqrt(x), 0) at x < 0 is 0, not 0 * inf.
    """

    is_open: jax.Array
    value: jax.Array | int = 1


Slope: TypeAlias = int | jax.Array | Gated


def slopes_of(
    eqn: Eqn, inputs: Sequence[Array], moving: Sequence[int]
) -> tuple[jax.Array, list[Slope]]:
    """An equation's output and its slopes in the moving inputs."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    out = bind(eqn, inputs)[0]
    if name == "mul":
        return out, [jnp.asarray(inputs[1 - i], dtype) for i in moving]
    if name == "select_n":
        branch = jnp.asarray(inputs[0], jnp.int32)
        return out, [Gated(branch == i - 1) for i in moving]
    if name in LINEAR:
        is_minus = {"sub": {1}, "neg": {0}}.get(name, set())
        return out, [-1 if i in is_minus else 1 for i in moving]
    slopes = [_slope(eqn, inputs, i) for i in moving]
    if is_piecewise_linear(eqn):  # max, clamp and abs: 0, 1, -1, or 1/2 at a tie
        return out, [Gated(slope != 0, slope) for slope in slopes]
    return out, list(slopes)


def _slope(eqn: Eqn, inputs: Sequence[Array], i: int) -> jax.Array:
    """A nonlinear equation's slope in its i-th input."""
    dtypes = tuple(v.aval.dtype for v in eqn.invars)
    params = tuple(eqn.params.items())
    try:
        program = _scalar_slope(eqn.primitive, params, dtypes, i)
    except TypeError:  # unhashable parameters
        program = None
    if program is not None:
        with traced_at(eqn):
            return _evaluate(program, inputs)

    def along(x: Array) -> Any:
        return bind(eqn, [*inputs[:i], x, *inputs[i + 1 :]])[0]

    x = jnp.asarray(inputs[i], dtypes[i])
    return jax.jvp(along, (x,), (jnp.ones_like(x),))[1]


@functools.cache
def _scalar_slope(
    primitive: Primitive,
    params: tuple[tuple[str, object], ...],
    dtypes: tuple[Dtype, ...],
    i: int,
) -> Jaxpr | None:
    """An elementwise primitive's slope as a program on scalars.

    Evaluated on arrays, it does as JAX would, without an array filled with ones. None
    where it does more than arithmetic, which needs shapes.
    """
    if primitive.name not in SMOOTH:
        return None

    def slope(*scalars: Array) -> jax.Array:
        f = lambda x: primitive.bind(*scalars[:i], x, *scalars[i + 1 :], **dict(params))
        return jax.jvp(f, (scalars[i],), (np.ones((), dtypes[i]),))[1]

    # A number in the program would be one of the first call's mesh.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(slope)(*[jax.ShapeDtypeStruct((), d) for d in dtypes])
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, constants = flatten(jaxpr, jit_body)
    simple = all(e.primitive.name in SMOOTH | LINEAR for e in jaxpr.eqns)
    return jaxpr if simple and not consts and not constants else None


def _evaluate(jaxpr: Jaxpr, inputs: Sequence[Array]) -> jax.Array:
    env: Env = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        values = varying_alike([value_of(v, env) for v in eqn.invars])
        ones = [i for i, v in enumerate(eqn.invars) if _is_one(v)]
        if eqn.primitive.name == "mul" and ones:
            env[eqn.outvars[0]] = values[1 - ones[0]]
        else:
            # Not as it was traced: the program may have been, for another mesh.
            env[eqn.outvars[0]] = eqn.primitive.bind(*values, **eqn.params)
    return value_of(jaxpr.outvars[0], env)


def _is_one(v: Atom) -> bool:
    return is_literal(v) and v.val == 1


def times(a: Slope, b: Slope) -> Slope:
    """The product of two slopes."""
    if isinstance(a, Gated) and isinstance(b, Gated):
        return Gated(a.is_open & b.is_open, _product(a.value, b.value))
    if isinstance(a, Gated):
        return _gated_product(a, b)
    return _gated_product(b, a) if isinstance(b, Gated) else _product(a, b)


def _gated_product(gated: Gated, factor: Slope) -> Slope:
    if isinstance(factor, Gated):
        return times(gated, factor)
    product = _product(gated.value, factor)
    if isinstance(factor, int):
        return Gated(gated.is_open, product)
    return _select(gated.is_open, product)


def _product(a: jax.Array | int, b: jax.Array | int) -> Any:
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, int):
        return a * b
    if isinstance(b, int):
        return a if b == 1 else _wide(a) * b
    a, b = _in_one_dtype(a, b)
    return a * b


def _wide(x: jax.Array) -> jax.Array:
    """A float16 or float8 array in float32.

    A product of slopes may overflow where, with small cotangents, no product that JAX
    computes does. The other dtypes' exponents are as wide as float32's.
    """
    is_narrow = x.dtype == jnp.float16 or x.dtype.itemsize < 2
    return x.astype(jnp.float32) if is_narrow else x


def _in_one_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two wide arrays in the dtype that holds both.

    A chain through a cast has slopes of two dtypes, which `jax_numpy_dtype_promotion =
    "strict"` would refuse to promote.
    """
    a, b = _wide(a), _wide(b)
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def plus(a: Slope, b: Slope) -> Slope:
    """The sum of two slopes."""
    a, b = (_array(x) if isinstance(x, Gated) else x for x in (a, b))
    if isinstance(a, int) or isinstance(b, int):
        return a + b
    a, b = _in_one_dtype(a, b)
    return a + b


def apply(slope: Slope, tangent: jax.Array, like: jax.Array) -> jax.Array:
    """slope * tangent, in the shape and dtype of `like`.

    Multiplied in the slope's dtype where that is wider, see `_wide`. A number's tangent
    keeps its own dtype until it is spread over the shape: what spreads is summed in the
    backward pass, and a sum of bfloat16 has few digits.
    """
    gate = None
    if isinstance(slope, Gated):
        gate, slope = slope.is_open, slope.value
    dtype = like.dtype if tangent.shape == like.shape else tangent.dtype
    moved = tangent.astype(dtype)
    if isinstance(slope, jax.Array):
        wide = slope.dtype if dtype == jnp.float16 else dtype
        moved = (moved.astype(wide) * slope.astype(wide)).astype(dtype)
    elif slope != 1:
        moved = moved * slope
    moved = jnp.broadcast_to(moved, like.shape).astype(like.dtype)
    return moved if gate is None else jnp.where(gate, moved, jnp.zeros_like(moved))


def _array(slope: Gated) -> jax.Array:
    return _select(
        slope.is_open, _product(slope.is_open.astype(jnp.float32), slope.value)
    )


def _select(gate: jax.Array, value: jax.Array) -> jax.Array:
    gate, value = jnp.broadcast_arrays(gate, value)
    # Zeros that JAX takes to depend on the data, and so leaves inside a scan.
    zeros = (gate & False).astype(value.dtype)
    return jnp.where(gate, value, zeros)

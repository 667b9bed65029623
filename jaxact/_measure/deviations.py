"""Pass random errors in an equation's operands on to its results.

A value's error is a sum, deviation * unit noise, over the *sources* that it carries: a
noisy input and the path its elements took. All unit noise has mean 0 and variance 1,
and counts as independent between different elements or sources. Deviations have a sign,
so that paths which meet again element by element, as the terms of a recomputed
derivative do, add up or cancel exactly.

Exact to first order for elementwise equations and where elements only move. A sum over
a source becomes a source by itself, independent from everything else, and the copies
from a broadcast count as independent in a later sum. These two approximations err by
up to 2 / (elements in a statistic) for a norm; noise from a softmax's rounded
exponentials comes out 1 to 6 % too large at 4 bits and more, up to 18 % at 2 bits where
a few weights dominate a row.

Products of two errors are left out. A norm's backward reads its normalized value twice:
its input's gradient comes out with too little noise by about half the variance of that
value's error, 4 % for 0.1.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxact._jaxpr.evaluate import bind, placed
from jaxact._jaxpr.primitives import (
    BARRIERS,
    CASTS,
    COPIES,
    JOINS,
    PLACEMENTS,
    RESHAPES,
    SELECTIONS,
)
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Array, Eqn, Params

# (noisy input, path) -> each element's deviation, float32
Deviations: TypeAlias = dict[tuple[int, Hashable], jax.Array]

# Move or copy elements; a path tells a source's equal moves.
_REARRANGED = RESHAPES | SELECTIONS | JOINS | PLACEMENTS | {"dynamic_update_slice"}
_TOTALS = frozenset("reduce_sum cumsum reduce_window_sum".split())

# (operands, result, parameters) -> derivative with respect to one operand
_Slope: TypeAlias = Callable[[Sequence[jax.Array], jax.Array, Params], Array | float]


def _one(xs: Sequence[jax.Array], y: jax.Array, params: Params) -> float:
    return 1.0


def _minus_one(xs: Sequence[jax.Array], y: jax.Array, params: Params) -> float:
    return -1.0


# For each operand; None: not followed. At a kink the derivative from one side.
_SLOPES: dict[str, tuple[_Slope | None, ...]] = {
    "neg": (_minus_one,),
    "add": (_one, _one),
    "add_any": (_one, _one),
    "sub": (_one, _minus_one),
    "mul": (lambda xs, y, p: xs[1], lambda xs, y, p: xs[0]),
    "div": (lambda xs, y, p: 1 / xs[1], lambda xs, y, p: -y / xs[1]),
    "max": (lambda xs, y, p: xs[0] >= xs[1], lambda xs, y, p: xs[1] > xs[0]),
    "min": (lambda xs, y, p: xs[0] <= xs[1], lambda xs, y, p: xs[1] < xs[0]),
    "clamp": (None, lambda xs, y, p: (xs[0] < xs[1]) & (xs[1] < xs[2]), None),
    "abs": (lambda xs, y, p: jnp.sign(xs[0]),),
    "square": (lambda xs, y, p: 2 * xs[0],),
    "one_minus_square": (lambda xs, y, p: -2 * xs[0],),
    "integer_pow": (lambda xs, y, p: p["y"] * lax.integer_pow(xs[0], p["y"] - 1),),
    "pow": (lambda xs, y, p: xs[1] * xs[0] ** (xs[1] - 1), None),
    "sqrt": (lambda xs, y, p: 0.5 / y,),
    "rsqrt": (lambda xs, y, p: -0.5 * y / xs[0],),
    "exp": (lambda xs, y, p: y,),
    "exp2": (lambda xs, y, p: math.log(2) * y,),
    "expm1": (lambda xs, y, p: y + 1,),
    "log": (lambda xs, y, p: 1 / xs[0],),
    "log1p": (lambda xs, y, p: 1 / (1 + xs[0]),),
    "tanh": (lambda xs, y, p: 1 - y * y,),
    "logistic": (lambda xs, y, p: y * (1 - y),),
    "erf": (lambda xs, y, p: 2 / math.sqrt(math.pi) * jnp.exp(-xs[0] * xs[0]),),
    "sin": (lambda xs, y, p: jnp.cos(xs[0]),),
    "cos": (lambda xs, y, p: -jnp.sin(xs[0]),),
    **dict.fromkeys(CASTS | COPIES - {"stop_gradient", "pvary"}, (_one,)),
    "jaxact_centered": (_one,),  # the mean's error, of some 32 rows, is left out
}

FOLLOWED = _REARRANGED | _TOTALS | _SLOPES.keys() | {"select_n"} | BARRIERS


def pass_on(
    eqn: Eqn,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    operands: Sequence[Deviations],
) -> list[Deviations] | None:
    """The outputs' deviations, given the operands'; None: not known."""
    name = eqn.primitive.name
    if name in BARRIERS:
        return list(operands)
    if _tells_infinity_or_nan(eqn):
        return [{}]
    if not all(map(_is_floating, outputs)):
        return None
    if name in _SLOPES:
        return _elementwise(eqn, inputs, outputs[0], operands)
    if name in _TOTALS:
        return _sum(eqn, operands)
    if name == "select_n":
        return _move(eqn, inputs, operands, lambda path: path)
    if name in _REARRANGED:
        # With an array of indices, as an embedding has, no other equation moves alike.
        is_static = all(map(_is_floating, inputs))
        move = (name, str(eqn.params)) if is_static else eqn.outvars[0]
        return _move(eqn, inputs, operands, lambda path: (path, move))
    return None


def variances(errors: Deviations) -> dict[int, jax.Array]:
    """By noisy input, the variance that it adds to each element."""
    out: dict[int, jax.Array] = {}
    for (source, _), deviation in errors.items():
        square = deviation * deviation
        out[source] = out[source] + square if source in out else square
    return out


def _elementwise(
    eqn: Eqn, inputs: Sequence[Array], output: Array, operands: Sequence[Deviations]
) -> list[Deviations] | None:
    xs = [jnp.asarray(x).astype(jnp.float32) for x in inputs]
    y, out = jnp.asarray(output).astype(jnp.float32), {}
    slopes = _SLOPES[eqn.primitive.name]
    for slope, errors in zip(slopes, operands, strict=True):
        if not errors:
            continue
        if slope is None:
            return None
        derivative = jnp.asarray(slope(xs, y, eqn.params), jnp.float32)
        for key, deviation in errors.items():
            # An operand may be a scalar where the result is not.
            term = jnp.broadcast_to(derivative * deviation, y.shape)
            out[key] = out[key] + term if key in out else term
    return [out]


def _move(
    eqn: Eqn,
    inputs: Sequence[Array],
    operands: Sequence[Deviations],
    path_after: Callable[[Hashable], Hashable],
) -> list[Deviations]:
    """The same equation on deviations."""
    out: list[Deviations] = [{} for _ in eqn.outvars]
    for key in dict.fromkeys(key for errors in operands for key in errors):
        source, path = key
        moved = [
            placed(errors.get(key, jnp.zeros_like(x, jnp.float32)), jax.typeof(x))
            if _is_floating(x)
            else x
            for x, errors in zip(inputs, operands, strict=True)
        ]
        for errors, deviation in zip(out, bind(eqn, moved), strict=True):
            errors[source, path_after(path)] = deviation
    return out


def _sum(eqn: Eqn, operands: Sequence[Deviations]) -> list[Deviations]:
    """Independent errors add their variances."""
    out: Deviations = {}
    for source, variance in variances(operands[0]).items():
        (total,) = bind(eqn, [variance])
        out[source, eqn.outvars[0]] = jnp.sqrt(total)
    return [out]


def _tells_infinity_or_nan(eqn: Eqn) -> bool:
    """Whether the results are the same for rounded operands.

    So in the guards that a softmax or a logsumexp has against infinite maxima.
    """
    if eqn.primitive.name == "is_finite":
        return True
    if eqn.primitive.name not in ("eq", "ne"):
        return False
    a, b = eqn.invars
    literals = [v.val for v in (a, b) if is_literal(v)]
    return a is b or any(not math.isfinite(x) for x in literals)


def _is_floating(x: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)

"""Primitives that NumPy computes as XLA does, so that nothing is compiled for them.

A rule gets the equation and NumPy arrays, and returns NotImplemented where the two may
differ: integer division, conversions that overflow, sums in narrow types.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

Rule = Callable[..., Any]


def _elementwise(f: Callable[..., Any]) -> Rule:
    return lambda eqn, *xs: f(*xs)


def _floats(f: Callable[..., Any]) -> Rule:
    """Real floating operands of at least 32 bits alone."""

    def rule(eqn: Any, *xs: Any) -> Any:
        if not all(x.dtype in (np.float32, np.float64) for x in xs):
            return NotImplemented
        return f(*xs)

    return rule


def _reduction(f: Callable[..., Any]) -> Rule:
    return lambda eqn, x: f(x, axis=tuple(eqn.params["axes"]))


def _sum(eqn: Any, x: Any) -> Any:
    if x.dtype.itemsize < 4:
        return NotImplemented
    return np.sum(x, axis=tuple(eqn.params["axes"]), dtype=x.dtype)


def _convert(eqn: Any, x: Any) -> Any:
    new = eqn.outvars[0].aval.dtype
    numbers = (np.float16, jnp.bfloat16, np.float32, np.bool_, np.int32, np.uint32)
    if x.dtype not in numbers or new not in numbers:
        return NotImplemented
    if new in (np.int32, np.uint32) and x.dtype in (np.float16, np.float32):
        low = -(2.0**31) if new == np.int32 else 0.0
        if not ((x >= low) & (x < 2.0**31)).all():  # XLA saturates
            return NotImplemented
    elif new in (np.int32, np.uint32) and x.dtype == jnp.bfloat16:
        return NotImplemented
    return x.astype(new)


def _broadcast(eqn: Any, x: Any, *dynamic: Any) -> Any:
    if dynamic:
        return NotImplemented
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(eqn: Any, x: Any) -> Any:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    limits = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return x[tuple(slice(a, b, s) for a, b, s in limits)]


def _select(eqn: Any, which: Any, *cases: Any) -> Any:
    if which.dtype != np.bool_ or len(cases) != 2:
        return NotImplemented
    return np.where(which, cases[1], cases[0])


def _iota(eqn: Any, *dynamic: Any) -> Any:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
    line = np.arange(shape[axis]).astype(eqn.outvars[0].aval.dtype)
    return np.broadcast_to(line.reshape(sizes), shape)


def _bitcast(eqn: Any, x: Any) -> Any:
    new = eqn.outvars[0].aval.dtype
    if np.dtype(new).itemsize != x.dtype.itemsize or x.dtype == np.bool_:
        return NotImplemented
    return np.ascontiguousarray(x).view(new).reshape(x.shape)


def _unsigned(f: Callable[..., Any]) -> Rule:
    def rule(eqn: Any, x: Any, by: Any) -> Any:
        if x.dtype != np.uint32 or (by >= 32).any():
            return NotImplemented
        return f(x, by)

    return rule


def _division(eqn: Any, x: Any, y: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x / y
    is_plain = x.dtype == np.uint32 and (y != 0).all()
    return x // y if is_plain else NotImplemented


def _real(f: Callable[..., Any]) -> Rule:
    """Not for complex operands."""
    return lambda eqn, *xs: NotImplemented if np.iscomplexobj(xs[0]) else f(*xs)


def _round(eqn: Any, x: Any) -> Any:
    to_even = int(eqn.params["rounding_method"]) == 1
    return np.round(x) if to_even and x.dtype == np.float32 else NotImplemented


def _pad(eqn: Any, x: Any, value: Any) -> Any:
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        return NotImplemented
    widths = [(low, high) for low, high, _ in config]
    return np.pad(x, widths, constant_values=value) if widths else x


def _not(eqn: Any, x: Any) -> Any:
    return np.invert(x)


def _resized(eqn: Any, x: Any) -> Any:
    return x.reshape(eqn.outvars[0].aval.shape)


def _reshape(eqn: Any, x: Any, *dynamic: Any) -> Any:
    order = eqn.params["dimensions"]  # of the operand's axes, or None
    return _resized(eqn, x if order is None else x.transpose(order))


def _dot(eqn: Any, x: Any, y: Any) -> Any:
    """By matmul of (batch, free, summed) and (batch, summed, free), in float32."""
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]

    def arranged(a: Any, batch: Any, summed: Any, last: bool) -> tuple[Any, list[int]]:
        free = [i for i in range(a.ndim) if i not in (*batch, *summed)]
        order = (*batch, *free, *summed) if last else (*batch, *summed, *free)
        moved = a.transpose(order)
        sizes = [int(np.prod([a.shape[i] for i in g])) for g in (batch, free, summed)]
        if not last:
            sizes = [sizes[0], sizes[2], sizes[1]]
        wide = moved if a.dtype.itemsize >= 4 else moved.astype(np.float32)
        return wide.reshape(sizes), free

    left, _ = arranged(x, x_batch, x_sum, True)
    right, _ = arranged(y, y_batch, y_sum, False)
    return (left @ right).reshape(eqn.outvars[0].aval.shape)


RULES: dict[str, Rule] = {
    "add": _elementwise(np.add),
    "add_any": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "div": _division,
    "neg": _elementwise(np.negative),
    "max": _floats(np.maximum),
    "min": _floats(np.minimum),
    "abs": _floats(np.abs),
    "floor": _floats(np.floor),
    "ceil": _floats(np.ceil),
    "exp": _floats(np.exp),
    "exp2": _floats(np.exp2),
    "log": _floats(np.log),
    "log1p": _floats(np.log1p),
    "expm1": _floats(np.expm1),
    "tanh": _floats(np.tanh),
    "sqrt": _floats(np.sqrt),
    "rsqrt": _floats(lambda x: x.dtype.type(1) / np.sqrt(x)),
    "sin": _floats(np.sin),
    "cos": _floats(np.cos),
    "square": _floats(np.square),
    "logistic": _floats(lambda x: 1 / (1 + np.exp(-x))),
    "is_finite": _floats(np.isfinite),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "gt": _real(np.greater),
    "ge": _real(np.greater_equal),
    "lt": _real(np.less),
    "le": _real(np.less_equal),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _not,
    "shift_left": _unsigned(np.left_shift),
    "shift_right_logical": _unsigned(np.right_shift),
    "select_n": _select,
    "clamp": _elementwise(lambda low, x, high: np.minimum(np.maximum(low, x), high)),
    "convert_element_type": _convert,
    "reshape": _reshape,
    "squeeze": _resized,
    "expand_dims": _resized,
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "dot_general": _dot,
    "iota": _iota,
    "pad": _pad,
    "round": _round,
    "bitcast_convert_type": _bitcast,
    "copy": lambda eqn, x: x,
    "copy_p": lambda eqn, x: x,
    "name": lambda eqn, x: x,
    "stop_gradient": lambda eqn, x: x,
    "jaxact_rounded": lambda eqn, x: x,  # marks a value to be rounded
    "reduce_sum": _sum,
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
}

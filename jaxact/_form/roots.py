"""Roots and other powers in the factors that a program multiplies rows with."""

from typing import NamedTuple

from jaxact._jaxpr.primitives import CASTS, COPIES, EXPONENTIALS
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Atom, Producers, Var

# Operations that leave elements, and their order.
_IN_ORDER = frozenset("broadcast_in_dim reshape squeeze expand_dims".split())
# Results that are an operand, or near it.
_BOUNDING = frozenset("mul add max min clamp select_n".split())
_LOGARITHMS = frozenset(["log", "log2"])


class Root(NamedTuple):
    """A root, or another power: a deviation, or its inverse.

    `is_factor_inverse`: whether the factor that it is found in falls where deviations
    grow.
    """

    variable: Var
    is_inverse: bool
    is_factor_inverse: bool


def root_in(factor: Var, producers: Producers) -> Root | None:
    """The deviation in a factor, which may hold a gain or a bound too.

    Flax multiplies rsqrt(variance + epsilon) with the gain first. Others divide by
    max(size, 1e-6), or size + 1e-6, or by 1 where a size is small.
    """
    todo: list[tuple[Atom, bool]] = [(factor, False)]
    seen: set[Atom] = set()
    while todo:
        v, is_over = todo.pop()  # is the factor a number over it
        eqn = None if is_literal(v) else producers.get(v)
        if eqn is None or v in seen or v.aval.size != factor.aval.size:
            continue
        if not eqn.invars:  # as of an iota
            continue
        seen.add(v)
        name, inputs = eqn.primitive.name, eqn.invars
        last = inputs[-1]
        falls = _is_falling_power(v, producers)
        if falls is not None:
            return Root(v, falls, falls != is_over)
        if name in _BOUNDING | _IN_ORDER | CASTS | COPIES:
            todo += [(u, is_over) for u in inputs]
        elif name == "div":
            todo += [(inputs[0], is_over), (last, not is_over)]
        elif name == "integer_pow" and eqn.params["y"] == -1:
            todo.append((last, not is_over))
    return None


def _is_falling_power(v: Var, producers: Producers) -> bool | None:
    """Whether a power has a negative exponent; None for any other value."""
    eqn = producers[v]
    name, last = eqn.primitive.name, eqn.invars[-1]
    if name in ("sqrt", "cbrt", "rsqrt"):
        return name == "rsqrt"
    if name == "pow" and is_literal(last):
        return bool(last.val < 0)
    return _is_negative_logarithm(last, producers) if name in EXPONENTIALS else None


def _is_negative_logarithm(v: Atom, producers: Producers) -> bool | None:
    """The sign in exp(-0.5 * log(s)), a power; None where there is no logarithm."""
    is_negative = False
    while not is_literal(v) and v in producers:
        eqn = producers[v]
        name, inputs = eqn.primitive.name, eqn.invars
        if name in _LOGARITHMS:
            return is_negative
        if name in ("mul", "div") and any(map(is_literal, inputs)):
            number = next(u for u in inputs if is_literal(u))
            is_negative ^= bool(number.val < 0)
            if name == "div" and is_literal(inputs[0]):
                return None
            v = next(u for u in inputs if u is not number)
        elif name == "neg" or name in _IN_ORDER | CASTS | COPIES:
            is_negative ^= name == "neg"
            v = inputs[0]
        else:
            return None
    return None

"""Read the parts of a traced program."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeGuard

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import AxisType

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import (
    CALL_BODIES,
    CHEAP,
    ELEMENTWISE,
    HELD_PROGRAMS,
    LINEAR,
    MOVES,
    PIECEWISE,
    STEPS,
)
from jaxact._jaxpr.types import (
    Atom,
    Aval,
    ClosedJaxpr,
    Dtype,
    Eqn,
    Jaxpr,
    Literal,
    Producers,
    Var,
)

# Those that bfloat16 stores.
_MANTISSA_BITS = 7


def is_literal(v: Atom) -> TypeGuard[Literal]:
    return isinstance(v, jex.Literal)


def variables_in(atoms: Sequence[Atom]) -> list[Var]:
    """The variables among variables and literals."""
    return [v for v in atoms if not is_literal(v)]


def equations_behind(
    v: Var, producers: Producers, is_passed: Callable[[Eqn], bool]
) -> Iterator[Eqn]:
    """The equations that `v` is computed by, each once, back to those not passed."""
    todo, seen = [v], {v}
    while todo:
        eqn = producers.get(todo.pop())
        if eqn is None or not is_passed(eqn):
            continue
        yield eqn
        new = [u for u in variables_in(eqn.invars) if u not in seen]
        todo += new
        seen.update(new)


def producers_of(eqns: Sequence[Eqn]) -> Producers:
    """For each variable that equations compute, the one that does."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def readers_of(eqns: Sequence[Eqn]) -> dict[Var, list[Eqn]]:
    """For each variable the equations that read it, each once, in order."""
    readers: dict[Var, list[Eqn]] = {}
    for eqn in eqns:
        for v in set(variables_in(eqn.invars)):
            readers.setdefault(v, []).append(eqn)
    return readers


def is_float(v: Atom) -> bool:
    """Whether a variable can have a gradient."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def num_bytes(v: Atom) -> int:
    """The memory that an array takes."""
    return v.aval.size * v.aval.dtype.itemsize


def is_complex(v: Atom) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.complexfloating)


def is_split_explicitly(aval: Aval) -> bool:
    """Whether a type says how the array is split over a mesh."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def literal_key(v: Atom) -> Hashable:
    """Equal for equal literals, and for the same variable."""
    if not is_literal(v):
        return v
    return v.aval.shape, v.aval.dtype, np.asarray(v.val).tobytes()


def call_body(eqn: Eqn) -> ClosedJaxpr | None:
    """A call equation's body, if its inputs and outputs map one to one."""
    key = CALL_BODIES.get(eqn.primitive.name)
    closed = None if key is None else eqn.params.get(key)
    if closed is None:
        return None
    jaxpr, _ = open_jaxpr(closed)
    same = len(jaxpr.invars) == len(eqn.invars)
    return closed if same and len(jaxpr.outvars) == len(eqn.outvars) else None


def held_programs(eqn: Eqn) -> Sequence[ClosedJaxpr]:
    """The programs in an equation that JAX differentiates as they are.

    They have the equation's outputs, and its inputs but for a branch's number.
    """
    name = HELD_PROGRAMS.get(eqn.primitive.name)
    if name is None:
        return ()
    held = eqn.params[name]
    return held if isinstance(held, tuple) else (held,)


def is_of_platforms(eqn: Eqn) -> bool:
    """Whether it is a `lax.platform_dependent`.

    JAX lowers the branch for this platform alone, and the others may be of kernels that
    it has not.
    """
    return eqn.params.get("branches_platforms") is not None


def programs_in(eqn: Eqn) -> list[Jaxpr]:
    """The programs in an equation's parameters."""
    found: list[Jaxpr] = []
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(one, "eqns"):
                found.append(open_jaxpr(one)[0])
    return found


def names_inside(eqn: Eqn) -> frozenset[str]:
    """The primitives that an equation evaluates, also inside calls.

    Without broadcasts of one number: `jnp.where(mask, 0, x)` has one.
    """
    return _names_inside(eqn, set())


def _names_inside(eqn: Eqn, constant: set[Var]) -> frozenset[str]:
    """The primitives; adds outputs that are one number everywhere to `constant`."""
    inputs = [not v.aval.shape or v in constant for v in eqn.invars]
    is_constant = bool(inputs) and all(inputs)
    if is_constant:
        constant.update(eqn.outvars)
    name, body = eqn.primitive.name, call_body(eqn)
    if body is None:
        is_broadcast = is_constant and name == "broadcast_in_dim"
        return frozenset() if is_broadcast else frozenset([name])
    jaxpr, _ = open_jaxpr(body)
    pairs = zip(jaxpr.invars, inputs, strict=True)
    numbers = {v for v, is_number in pairs if is_number}
    return frozenset().union(*(_names_inside(e, numbers) for e in jaxpr.eqns))


def is_elementwise(eqn: Eqn) -> bool:
    """Whether each element in the one output depends on its own elements alone."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    name = eqn.primitive.name
    if name == "custom_jvp_call":
        return names_inside(eqn) <= ELEMENTWISE
    return name in ELEMENTWISE


def keeps_elements(eqn: Eqn) -> bool:
    """Whether it is elementwise, or moves or copies elements."""
    return is_elementwise(eqn) or eqn.primitive.name in MOVES


def is_cheap(eqn: Eqn) -> bool:
    """Whether evaluating it again in the backward pass costs next to nothing.

    A barrier around one value keeps roundings apart in a special function, as in the
    inverse of a normal's distribution; those around several hold other values back.
    """
    is_single = eqn.primitive.name == "optimization_barrier" and len(eqn.outvars) == 1
    return is_single or eqn.primitive.name in CHEAP


def contracts(eqn: Eqn) -> bool:
    """Whether a product sums: `einsum("td,t->td", x, rstd)` does not."""
    if eqn.primitive.name != "dot_general":
        return True
    (axes, _), _ = eqn.params["dimension_numbers"]
    return len(axes) > 0


def is_backward(eqn: Eqn) -> bool:
    """Whether JAX has named it as one in the backward pass of a gradient."""
    return "transpose(" in str(eqn.source_info.name_stack)


def sums_rows(eqn: Eqn) -> bool:
    """Whether a product gives a number for each row: `einsum("bi,bi->b", x, y)`."""
    if eqn.primitive.name != "dot_general" or not contracts(eqn):
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return len(batch) == len(eqn.outvars[0].aval.shape)


def scales_rows(eqn: Eqn, x: Var) -> bool:
    """Whether a product multiplies each row of `x` with a number, in their order."""
    if eqn.primitive.name != "dot_general" or contracts(eqn):
        return False
    left, right = eqn.invars
    _, (left_axes, right_axes) = eqn.params["dimension_numbers"]
    axes, others, factor = (
        (left_axes, right_axes, right) if left is x else (right_axes, left_axes, left)
    )
    # The result has the common axes first, and then those of `x` alone.
    leading = tuple(range(factor.aval.ndim))
    return tuple(axes) == leading == tuple(others)


def is_square(eqn: Eqn) -> bool:
    """Whether it multiplies a value with itself."""
    name, operands = eqn.primitive.name, eqn.invars
    if name == "mul":
        return operands[0] is operands[1]
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def is_piecewise_linear(eqn: Eqn) -> bool:
    """Whether its derivative, where it has one, is a constant or an exact choice."""
    return names_inside(eqn) <= LINEAR | PIECEWISE | STEPS


def loses_precision(eqn: Eqn) -> bool:
    """Whether it rounds a value to fewer significant bits than bfloat16 has.

    Fake quantization and float8 training do: a function with large steps, which is not
    affine in its operand.
    """
    name = eqn.primitive.name
    if name == "reduce_precision":
        return eqn.params["mantissa_bits"] < _MANTISSA_BITS
    if name != "convert_element_type" or not is_float(eqn.invars[0]):
        return False
    dtype = eqn.outvars[0].aval.dtype
    return not jnp.issubdtype(dtype, jnp.inexact) or (
        jnp.finfo(dtype).nmant < _MANTISSA_BITS
    )


def is_widened(narrow: Dtype, wide: Dtype) -> bool:
    """Whether every value of one floating type is one of the other."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (narrow, wide)):
        return False
    a, b = jnp.finfo(narrow), jnp.finfo(wide)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp

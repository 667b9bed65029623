"""What the primitives of a traced program do to exactness and to linearity."""

from typing import Any

from jaxact import _compat
from jaxact._program import is_float as is_float

# Equations that only move, copy or convert values.
MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type name "
    "copy copy_p stop_gradient rev reduce_precision sharding_constraint".split()
)
# Moves that keep a part of their operand.
SELECTIONS = frozenset("slice dynamic_slice gather split".split())
# Affine in all of their floating operands together.
SUMS = frozenset("add sub add_any neg concatenate pad select_n".split()) | MOVES
COMPARISONS = frozenset("gt lt ge le eq ne".split())
# Piecewise linear: the derivative takes a few values, told apart by exact bits.
PIECEWISE = COMPARISONS | frozenset("max min select_n clamp abs".split())
# One output element for each element of the operands, by a smooth function.
SMOOTH = frozenset(
    "mul div exp exp2 log log1p expm1 tanh logistic integer_pow pow sqrt rsqrt cbrt "
    "erf erfc erf_inv lgamma digamma sin cos tan asin acos atan atan2 sinh cosh asinh "
    "acosh atanh square one_minus_square".split()
)
# Piecewise constant.
STEPS = frozenset("sign round floor ceil is_finite stop_gradient".split()) | COMPARISONS
_INTEGER = frozenset(
    "and or not xor shift_left shift_right_logical shift_right_arithmetic rem "
    "population_count clz".split()
)
LINEAR = frozenset(
    "add sub neg add_any convert_element_type copy copy_p stop_gradient "
    "reduce_precision name".split()
)
ELEMENTWISE = LINEAR | PIECEWISE | SMOOTH | STEPS | _INTEGER
# Cheap to evaluate again in the backward pass.
CHEAP = ELEMENTWISE | SUMS | SELECTIONS | {"iota", "bitcast_convert_type"}
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin "
    "reduce".split()
)

# The backward pass solves with what these are given, or divides by differences of what
# they return: that is no product, and with a rounded matrix it can be unbounded.
SOLVERS = frozenset("triangular_solve custom_linear_solve tridiagonal_solve".split())
FACTORIZATIONS = frozenset("lu cholesky eigh eig qr geqrf svd schur hessenberg".split())


def names_inside(eqn: Any) -> frozenset[str]:
    """The primitives that an equation evaluates, also inside calls."""
    body = _compat.call_body(eqn)
    if body is None:
        return frozenset([eqn.primitive.name])
    jaxpr, _ = _compat.open_jaxpr(body)
    return frozenset().union(*map(names_inside, jaxpr.eqns))


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of the one output depends on its own elements alone."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    name = eqn.primitive.name
    if name == "custom_jvp_call":
        return names_inside(eqn) <= ELEMENTWISE
    return name in ELEMENTWISE


def is_piecewise_linear(eqn: Any) -> bool:
    """Whether its derivative, where it has one, is a constant or an exact choice."""
    return names_inside(eqn) <= LINEAR | PIECEWISE | STEPS

"""JAX's primitives by name: what each does to values, to exactness and to linearity.

The one table: everything that asks about a primitive derives its sets from these.
"""

# Change where an element lies, or how often it is there; never its value.
RESHAPES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims rev".split()
)
# Change neither.
COPIES = frozenset("copy copy_p stop_gradient name sharding_constraint".split())
# Change the type of an element, or only its precision.
CASTS = frozenset("convert_element_type reduce_precision".split())
# Recomputing these costs next to nothing.
MOVES = RESHAPES | COPIES | CASTS
# Keep a part of their first operand.
SELECTIONS = frozenset("slice dynamic_slice gather split".split())
# Elements of the first operand, moved or selected. A gather is none: the rows that
# indices take out of an embedding are an activation.
VIEWS = MOVES | SELECTIONS - {"gather"}
JOINS = frozenset("concatenate pad".split())
# Affine in all of their floating operands together.
SUMS = frozenset("add sub add_any neg select_n".split()) | JOINS | MOVES

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
# Elementwise and linear. A sharding constraint is for a whole array: no part of a cell.
LINEAR = (
    frozenset("add sub neg add_any".split()) | CASTS | COPIES - {"sharding_constraint"}
)
ELEMENTWISE = LINEAR | PIECEWISE | SMOOTH | STEPS | _INTEGER
# What XLA computes where it is read, and not in memory. A kernel would put it there:
# with kernels for everything a step of ResNet-50 moves 40.9 GB and takes 834 MiB, with
# these fused 29.0 GB and 521 MiB, with no kernel 29.3 and 520 (operands and results of
# every instruction compiled for an H100, batch 64, 2 bits).
FUSED = ELEMENTWISE - MOVES
# Cheap to evaluate again in the backward pass.
CHEAP = ELEMENTWISE | SUMS | SELECTIONS | {"iota", "bitcast_convert_type"}
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin "
    "reduce".split()
)
MATMULS = frozenset(["dot_general", "conv_general_dilated"])

# The backward pass solves with what these are given, or divides by differences of what
# they return: that is no product, and with a rounded matrix it can be unbounded.
SOLVERS = frozenset("triangular_solve custom_linear_solve tridiagonal_solve".split())
FACTORIZATIONS = frozenset("lu cholesky eigh eig qr geqrf svd schur hessenberg".split())

# Calls. `pjit` and `closed_call` are 0.10 names, `eval_jaxpr` is what 0.12 leaves after
# partial evaluation.
JITS = frozenset(["jit", "pjit"])
CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])
CUSTOM_VJPS = frozenset(["custom_vjp_call", "custom_vjp_call_jaxpr"])
# The parameter with the body of a call, whose inputs and outputs are the call's own.
CALL_BODIES = {
    **dict.fromkeys([*JITS, "eval_jaxpr", *CHECKPOINTS], "jaxpr"),
    **dict.fromkeys(["closed_call", "core_call"], "call_jaxpr"),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

"""JAX's primitives by name: their effect on values, on exactness and on linearity.

The one table: a set that one algorithm alone asks for is beside it, made from these.
"""

# Change where an element lies, or how often it is there; never its value.
RESHAPES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims rev tile".split()
)
# Identities that only label their operand: `checkpoint_name`.
LABELS = frozenset(["name"])
# Change neither.
COPIES = LABELS | frozenset(
    "copy copy_p stop_gradient pvary jaxact_decoded_again".split()
)
# Say on which devices an array is; the values are the same. To evaluate one again may
# send the array again, so it is no copy: its result is stored, as JAX does.
PLACEMENTS = frozenset("sharding_constraint reshard mesh_cast device_put".split())
# Change an element's type, or only its precision.
CASTS = frozenset("convert_element_type reduce_precision".split())
# Let values wait for one another.
BARRIERS = frozenset("optimization_barrier jaxact_lone_barrier".split())
# Where a value comes from is read through these; `jax.checkpoint` puts the second two
# around the values that it saves.
TRANSPARENT = (
    LABELS
    | BARRIERS
    | frozenset("reduce_precision jaxact_residual jaxact_rounded".split())
)
# Recomputing these costs next to nothing.
MOVES = RESHAPES | COPIES | CASTS
# Keep a part of their first operand.
SELECTIONS = frozenset("slice dynamic_slice gather split unstack".split())
# Move or select elements from the first operand. A gather is none: the rows that
# indices take from an embedding are an activation.
VIEWS = MOVES | SELECTIONS - {"gather"}
JOINS = frozenset("concatenate pad stack".split())
# Affine in all floating operands together.
SUMS = frozenset("add sub add_any neg select_n jaxact_centered".split()) | JOINS | MOVES

EXPONENTIALS = frozenset(["exp", "exp2"])
COMPARISONS = frozenset("gt lt ge le eq ne".split())
# Piecewise linear: the derivative takes a few values, told apart by exact bits.
PIECEWISE = COMPARISONS | frozenset("max min select_n clamp abs".split())
# One output element for each operand element, by a smooth function.
SMOOTH = frozenset(
    "mul div exp exp2 log log2 log1p expm1 tanh logistic integer_pow pow sqrt rsqrt "
    "cbrt erf erfc erf_inv lgamma digamma polygamma sin cos tan asin acos atan atan2 "
    "sinh cosh asinh acosh atanh igamma igammac regularized_incomplete_beta "
    "bessel_i0e bessel_i1e square one_minus_square polynomial".split()
)
# With a pole, or with a slope that has one, where their operand's domain ends.
POLES = {
    **dict.fromkeys("log log2 sqrt rsqrt cbrt lgamma digamma".split(), 0.0),
    "log1p": -1.0,
    "acosh": 1.0,
}
# At both ends, too. Angles of a classifier (ArcFace) are far from both: their cosines
# are packed, but a sum over each row, the cosine of a rotation, is exact.
WITH_POLES = frozenset(POLES) | frozenset("pow div asin acos".split())
# Piecewise constant.
STEPS = frozenset("sign round floor ceil is_finite stop_gradient".split()) | COMPARISONS
_INTEGER = frozenset(
    "and or not xor shift_left shift_right_logical shift_right_arithmetic rem "
    "population_count clz".split()
)
# Elementwise and linear. `pvary` is about types in a shard_map: no part of a cell.
LINEAR = frozenset("add sub neg add_any".split()) | CASTS | COPIES - {"pvary"}
ELEMENTWISE = LINEAR | PIECEWISE | SMOOTH | STEPS | _INTEGER
# XLA may compute these where their result is read, and not in memory (`fusion.py`). A
# kernel would not: with kernels for everything a ResNet-50 step moves 40.9 GB and takes
# 834 MiB, with these fused 29.0 GB and 521 MiB, with no kernel 29.3 and 520 (every
# instruction's operands and results, compiled for an H100, batch 64, 2 bits).
FUSED = ELEMENTWISE - MOVES
# Elementwise operations that XLA writes to memory rather than computes twice.
COSTLY = SMOOTH - frozenset("mul div integer_pow square one_minus_square".split())
# Cheap to evaluate again in the backward pass.
CHEAP = ELEMENTWISE | SUMS | SELECTIONS | {"iota", "bitcast_convert_type"}
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin "
    "reduce".split()
)
WINDOWS = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min".split()
)
# Equal to an operand's element, along an axis or up to a place on it.
EXTREMES = frozenset(["reduce_max", "reduce_min"])
RUNNING_EXTREMES = frozenset(["cummax", "cummin"])
# Reductions of segments (their updates have more elements than the result), such as
# the sums of a softmax over a graph's edges.
SEGMENT_EXTREMES = frozenset("scatter-max scatter_max scatter-min scatter_min".split())
SCATTERS = SEGMENT_EXTREMES | frozenset(
    "scatter-add scatter_add scatter-mul scatter_mul".split()
)
# Of each element the sum or an extreme over devices, or over a mapped axis.
COLLECTIVES = frozenset("psum psum2 psum_invariant pmax pmin".split())
MATMULS = frozenset(["dot_general", "conv_general_dilated"])
# Those of groups of rows, as experts have, too.
PRODUCTS = MATMULS | {"ragged_dot_general"}
# Of `jax.experimental.sparse`; indices are operands too. Graph networks have them.
SPARSE_PRODUCTS = frozenset(
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general "
    "coo_matmat coo_matvec csr_matmat csr_matvec".split()
)
SPARSE_MOVES = frozenset(
    "bcoo_extract bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose "
    "bcsr_extract bcsr_todense coo_todense csr_todense".split()
)

# The backward pass solves with a solver's operands, and divides by differences between
# a factorization's results: that is no product, and with a rounded matrix it can be
# unbounded.
# Lineax's is the last one.
SOLVERS = frozenset(
    "triangular_solve custom_linear_solve tridiagonal_solve linear_solve".split()
)
FACTORIZATIONS = frozenset("lu cholesky eigh eig qr geqrf svd schur hessenberg".split())

# Calls. `pjit` and `closed_call` are 0.10 names; `eval_jaxpr` remains in 0.12 after
# partial evaluation.
JITS = frozenset(["jit", "pjit"])
CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])
CUSTOM_VJPS = frozenset(["custom_vjp_call", "custom_vjp_call_jaxpr"])
# The parameter with a call's body, whose inputs and outputs are the call's own.
CALL_BODIES = {
    **dict.fromkeys([*JITS, *CHECKPOINTS], "jaxpr"),
    **dict.fromkeys(["closed_call", "core_call", "eval_jaxpr"], "call_jaxpr"),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# The parameter with the programs that JAX differentiates as they are: what they keep
# becomes outputs of the equation. (Scans are differentiated with compressed bodies.)
HELD_PROGRAMS = {"cond": "branches", **dict.fromkeys(["shard_map", *JITS], "jaxpr")}

# Linear in all floating operands together.
LINEAR_IN_ALL = (
    frozenset(
        "add sub neg add_any select_n reduce_sum cumsum reduce_window_sum real imag "
        "conj complex fft dynamic_update_slice scatter scatter-add scatter_add psum "
        "psum_invariant all_gather all_to_all ppermute reduce_scatter pbroadcast tile "
        "jaxact_pick jaxact_residual jaxact_rounded".split()
    )
    | MOVES
    | PLACEMENTS
    | JOINS
    | SELECTIONS
    | SPARSE_MOVES
)
# Linear in each of two floating operands; others are integers.
BILINEAR = PRODUCTS | SPARSE_PRODUCTS | {"mul"}

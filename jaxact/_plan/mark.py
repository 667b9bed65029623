"""Identities that mark, inside a traced program, residuals and compressed calls.

The mark on the arrays that store a residual carries the decision about it, so a table
can be read back from any program that contains compressed calls, however deep inside
jit, scan or vmap they are and whatever JAX had cached. Another, on a value that will be
rounded, stops second-order differentiation, which would otherwise silently
differentiate through the rounding; it knows no path, as alike calls share the program
that it is in. The mark on a call says how it is compressed, so that it can be evaluated
in another way, for measuring. Marks compile to nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._decision import Decision
from jaxact._flat import Flat
from jaxact._jaxpr.compat import CALL_MARK
from jaxact._jaxpr.types import Array, Axes, Eqn, PyTree, Shape, Tangent
from jaxact._policy import Policy

mark_p = jex.Primitive("jaxact_residual")
mark_p.multiple_results = True
rounded_p = jex.Primitive("jaxact_rounded")
call_p = jex.Primitive(CALL_MARK)


@dataclasses.dataclass(frozen=True, eq=False)
class CompressedCall:
    """A compressed call: the function, and how its residuals are stored.

    Attributes:
      prefix: its module path.
    """

    flat: Flat
    policy: Policy
    prefix: str


def mark_call(seed: Array, call: CompressedCall | None) -> jax.Array:
    """A compressed call's seed, marked as such; None: it is not to be replaced."""
    return call_p.bind(seed, call=call)


def mark(
    stored: PyTree,
    decision: Decision,
    shape: Shape,
    policy: Policy,
    used_rules: tuple[int, ...],
) -> PyTree:
    """`stored`, marked as a residual that `policy` decided about.

    See `jaxact.residuals`.

    Args:
      stored: the arrays that store the residual.
      shape: the residual's.
    """
    leaves, tree = jax.tree.flatten(stored)
    if not leaves:
        return stored
    marked = mark_p.bind(
        *leaves, decision=decision, shape=shape, policy=policy, used_rules=used_rules
    )
    return jax.tree.unflatten(tree, marked)


def copies_of(eqn: Eqn, around: Sequence[Eqn]) -> int:
    """How many arrays a mark stands for, given the equations around it.

    A scan stacks one for each step. In a `shard_map` every device has its own, as in
    tensor parallelism; where JAX knows that some devices have the same, it counts once.
    """
    varying: set[Any] = set()
    for v in eqn.outvars:
        varying |= set(v.aval.manual_axis_type.varying)
    copies = 1
    for outer in around:
        copies *= outer.params.get("length", 1)
        if outer.primitive.name == "shard_map":
            axes = set(outer.params["newly_manual_axes"])
            split = axes & varying if outer.params["check_vma"] else axes
            copies *= math.prod(outer.params["mesh"].shape[axis] for axis in split)
    return copies


def will_be_rounded(x: jax.Array, decision: Decision) -> jax.Array:
    """`x`, which has no derivative from here on if the decision is to round it."""
    if decision.action.is_differentiable:
        return x
    return rounded_p.bind(x, decision=decision)


def _batch_mark(
    args: Sequence[Array], dims: Axes, *, shape: Shape, **params: object
) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return mark_p.bind(*args, shape=(size, *shape), **params), dims


def _differentiate_mark(
    primals: Sequence[Array], tangents: Sequence[Tangent], **params: object
) -> tuple[Any, Any]:
    return mark_p.bind(*primals, **params), list(tangents)


def _refuse(
    primals: Sequence[Array], tangents: Sequence[Tangent], *, decision: Decision
) -> NoReturn:
    raise TypeError(
        "jaxact: second-order differentiation of a compressed function. Its "
        f"residual {decision.residual} is stored by {decision.action}, whose "
        "rounding has no derivative. Use the uncompressed function for the inner "
        "derivative, or compress with Policy(default=Exact()). Where the outer one is "
        "to stop there, as in first-order MAML, apply jax.lax.stop_gradient to the "
        "inner gradient's arguments, not to the gradient. jaxact.residuals, "
        "sensitivity and telemetry take the loss, not its gradient; "
        "residuals(step, ..., argnums=()) reads a whole step."
    )


mark_p.def_impl(lambda *xs, **_: list(xs))
mark_p.def_abstract_eval(lambda *avals, **_: list(avals))
# JAX would make and keep a function for each mark, of which no two are alike.
mlir.register_lowering(mark_p, lambda ctx, *xs, **_: xs, cacheable=False)
batching.primitive_batchers[mark_p] = _batch_mark
ad.primitive_jvps[mark_p] = _differentiate_mark


def identity(primitive: Any) -> None:
    """Give a primitive with one operand the rules of an identity."""

    def batch(args: tuple[Array], dims: Axes, **params: object) -> tuple[Any, Any]:
        return primitive.bind(*args, **params), dims[0]

    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x], cacheable=False)
    batching.primitive_batchers[primitive] = batch


identity(call_p)
identity(rounded_p)
ad.primitive_jvps[rounded_p] = _refuse

"""A function with a derivative rule whose residuals depend on what is differentiated.

Before 0.12 JAX keeps one record of the residuals' structure for a `custom_vjp` call in
a program, and the last use writes it. A program is used again where a jitted block is
two layers of a network, or a checkpoint is differentiated twice: if one use
differentiates other arguments, its backward pass reads the residuals by the other's
structure. The gradient is silently wrong where both have as many arrays.

There the function is a `custom_jvp`, whose rule JAX evaluates for each use. It returns
the outputs and, as their tangents, a linear map that has only a transpose.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING, VJP_OPTIONS
from jaxact._jaxpr.types import Array, Aval, PyTree

Function = Callable[..., list[jax.Array]]
# From residuals and outputs' cotangents to those of the active arguments, None for 0.
_Transpose = Callable[[Sequence[Array], Sequence[Any]], list[Array | None]]

linear_p = jex.Primitive("jaxact_linear")
linear_p.multiple_results = True


def with_rule(
    call: Function, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Function:
    """`call` with the rule of `jax.custom_vjp`, arguments' zero tangents symbolic."""
    if HAS_GENERIC_BATCHING:
        function = jax.custom_vjp(call)
        function.defvjp(forward, backward, **VJP_OPTIONS)
        return function
    differentiable = jax.custom_jvp(call)
    rule = functools.partial(_differentiate, forward, backward)
    differentiable.defjvp(rule, symbolic_zeros=True)
    return differentiable


def _differentiate(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    primals: tuple[PyTree, ...],
    tangents: tuple[PyTree, ...],
) -> tuple[list[jax.Array], list[Any]]:
    """Outputs and their tangents."""
    values, tree = jax.tree.flatten(primals)
    directions = tree.flatten_up_to(tangents)
    is_active = [
        _is_float(jax.typeof(x)) and not isinstance(t, SymbolicZero)
        for x, t in zip(values, directions, strict=True)
    ]
    arguments = map(CustomVJPPrimal, values, is_active)
    outputs, residuals = forward(*jax.tree.unflatten(tree, arguments))
    arrays, residual_tree = jax.tree.flatten(residuals)
    avals = [jax.typeof(x) for x in outputs]

    def transpose(
        arrays: Sequence[Array], cotangents: Sequence[Any]
    ) -> list[Array | None]:
        own = iter(cotangents)
        full = [next(own) if _is_float(a) else _no_cotangent(a) for a in avals]
        found = backward(jax.tree.unflatten(residual_tree, arrays), full)
        return _chosen(tree.flatten_up_to(found), is_active)

    results = linear_p.bind(
        *arrays,
        *_chosen(directions, is_active),
        count=len(arrays),
        transpose=transpose,
        outputs=tuple(aval for aval in avals if _is_float(aval)),
    )
    own = iter(results)
    return outputs, [
        next(own) if _is_float(aval) else np.zeros(aval.shape, jax.dtypes.float0)
        for aval in avals
    ]


def vmap_along(
    axis: Any, f: Callable[..., Any], in_axes: Any, out_axes: Any = 0
) -> Callable[..., Any]:
    """`jax.vmap` along an axis as JAX describes it to batching rules: name, size."""
    return jax.vmap(
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_size=axis.size,
        axis_name=axis.name if isinstance(axis.name, str | tuple) else None,
        spmd_axis_name=axis.spmd_name,
    )


def _chosen(values: Sequence[Any], is_chosen: Sequence[bool]) -> list[Any]:
    return [value for value, chosen in zip(values, is_chosen, strict=True) if chosen]


def _is_float(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _no_cotangent(aval: Aval) -> SymbolicZero:
    return SymbolicZero(aval.to_tangent_aval())


def _refuse(*args: object, **params: object) -> Any:
    raise TypeError(
        "jaxact: forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) of a "
        "compressed function: use jax.vjp, jax.grad or jax.jacrev, or the uncompressed "
        "function."
    )


def _transpose(
    cotangents: Sequence[Any],
    *args: Any,
    count: int,
    transpose: _Transpose,
    outputs: Sequence[Aval],
) -> list[Any]:
    full = [
        SymbolicZero(aval) if isinstance(ct, ad.Zero) else ct
        for ct, aval in zip(cotangents, outputs, strict=True)
    ]
    return [None] * count + transpose(args[:count], full)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batched:
    """The transpose of a linear map over a batch, the first axis of all outputs.

    Attributes:
      transpose, outputs: one example's.
      axis: JAX's description: name, size.
      residual_dims: each residual's batch axis; None: it has none.
      tangent_dims: the same for each active argument.
    """

    transpose: _Transpose
    outputs: Sequence[Aval]
    axis: Any
    residual_dims: Sequence[int | None]
    tangent_dims: Sequence[int | None]

    def __call__(
        self, residuals: Sequence[Array], cotangents: Sequence[Any]
    ) -> list[Array | None]:
        is_known = [not isinstance(ct, SymbolicZero) for ct in cotangents]

        def of_one(residuals: Sequence[Array], known: Sequence[Array]) -> list[Any]:
            own, full = iter(known), []
            for aval, is_array in zip(self.outputs, is_known, strict=True):
                full.append(next(own) if is_array else SymbolicZero(aval))
            return self.transpose(residuals, full)

        mapped = vmap_along(self.axis, of_one, (list(self.residual_dims), 0))
        found = mapped(list(residuals), _chosen(cotangents, is_known))
        return [
            _of_argument(ct, dim)
            for ct, dim in zip(found, self.tangent_dims, strict=True)
        ]


def _of_argument(cotangents: jax.Array | None, dim: int | None) -> jax.Array | None:
    """An argument's cotangent, from those of the examples; None where it is zero.

    Examples share an argument without the axis: its cotangents are summed.
    """
    if cotangents is None:
        return None
    return (
        jnp.sum(cotangents, axis=0) if dim is None else jnp.moveaxis(cotangents, 0, dim)
    )


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    count: int,
    transpose: _Transpose,
    outputs: Sequence[Aval],
) -> tuple[Any, list[int | None]]:
    dims = [d if isinstance(d, int) else None for d in dims]
    if all(d is None for d in dims):  # JAX asks for these too
        out = linear_p.bind(*args, count=count, transpose=transpose, outputs=outputs)
        return out, [None] * len(out)
    out = linear_p.bind(
        *args,
        count=count,
        transpose=_Batched(transpose, outputs, axis, dims[:count], dims[count:]),
        outputs=tuple(_with_axis(aval, axis.size) for aval in outputs),
    )
    return out, [0] * len(out)


def _with_axis(aval: Aval, size: int) -> Aval:
    """The type of a batch of such arrays."""
    spec = PartitionSpec(None, *aval.sharding.spec)
    sharding = aval.sharding.update(spec=spec)
    return aval.update(shape=(size, *aval.shape), sharding=sharding)


linear_p.def_impl(_refuse)
linear_p.def_abstract_eval(lambda *_, outputs, **__: list(outputs))
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, _refuse)

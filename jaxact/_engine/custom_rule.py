"""A function with a derivative rule whose residuals depend on what is differentiated.

Before 0.12 JAX keeps one record of the residuals' structure for a `custom_vjp` call in
a program, and the last use writes it. A program is used again where a jitted block is
two layers of a network, or a checkpoint is differentiated twice: if one use
differentiates other arguments, its backward pass reads the residuals by the other's
structure. The gradient is silently wrong where both have as many arrays.

There the function is a `custom_jvp`, whose rule JAX evaluates for each use, and the
rule differentiates a `custom_vjp` of that use alone. The linear map that remains, which
JAX names `custom_lin`, has no batching rule; this adds one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING, VJP_OPTIONS
from jaxact._jaxpr.types import Array, Aval, PyTree

Function = Callable[..., list[jax.Array]]


def with_rule(call: Function, forward: Callable[..., Any], backward: Any) -> Function:
    """`call` with the rule of `jax.custom_vjp`, arguments' zero tangents symbolic."""
    if HAS_GENERIC_BATCHING:
        return _custom_vjp(call, forward, backward)
    _add_batching()
    function = jax.custom_jvp(call)

    def differentiate(
        primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        own = _custom_vjp(call, forward, backward)
        values, tree = jax.tree.flatten(primals)
        directions = tree.flatten_up_to(tangents)
        active = [
            i for i, t in enumerate(directions) if not isinstance(t, SymbolicZero)
        ]

        def of_active(*xs: jax.Array) -> list[jax.Array]:
            full = list(values)
            for i, x in zip(active, xs, strict=True):
                full[i] = x
            return own(*jax.tree.unflatten(tree, full))

        at = [values[i] for i in active]
        return jax.jvp(of_active, at, [directions[i] for i in active])

    function.defjvp(differentiate, symbolic_zeros=True)
    return function


def _custom_vjp(call: Function, forward: Callable[..., Any], backward: Any) -> Function:
    function = jax.custom_vjp(call)
    function.defvjp(forward, backward, **VJP_OPTIONS)
    return function


@dataclasses.dataclass(frozen=True, eq=False)
class _Batched:
    """The transpose of a linear map over a batch, which is the first axis of all.

    Attributes:
      backward: JAX's function from (*residuals, *cotangents) to a cotangent for each
        argument.
      axis: JAX's description: name, size.
      residual_dims: each residual's batch axis; None: it has none.
      is_zero: for each argument whether its tangent is zero: it needs no cotangent.
      is_batched: for each of the others whether its tangent has the batch axis.
      outputs: the types of one example's.
    """

    backward: Any
    axis: Any
    residual_dims: list[int | None]
    is_zero: Sequence[bool]
    is_batched: Sequence[bool]
    outputs: Sequence[Aval]

    @property
    def debug_info(self) -> Any:
        """JAX prints the name in it."""
        return self.backward.debug_info

    def call_wrapped(self, *args: Any) -> list[Any]:
        """Cotangents for the arguments; the name is that of JAX's own functions."""
        count = len(self.residual_dims)
        residuals, cotangents = args[:count], args[count:]
        known = [
            i for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)
        ]

        def of_one(residuals: Sequence[Array], own: Sequence[Array]) -> list[Any]:
            full: list[Any] = [SymbolicZero(aval) for aval in self.outputs]
            for i, ct in zip(known, own, strict=True):
                full[i] = ct
            found = self.backward.call_wrapped(*residuals, *full)
            pairs = zip(found, self.is_zero, strict=True)
            return [_as_array(ct) for ct, is_zero in pairs if not is_zero]

        name = self.axis.name
        mapped = jax.vmap(
            of_one,
            in_axes=(self.residual_dims, 0),
            axis_size=self.axis.size,
            axis_name=name if isinstance(name, str | tuple) else None,
            spmd_axis_name=self.axis.spmd_name,
        )
        results = iter(mapped(list(residuals), [cotangents[i] for i in known]))
        batched = iter(self.is_batched)
        return [
            None if is_zero else _summed(next(results), next(batched))
            for is_zero in self.is_zero
        ]


def _as_array(cotangent: Any) -> Array:
    if isinstance(cotangent, jax.Array | np.ndarray | np.generic):
        return cotangent
    return jnp.zeros(cotangent.aval.shape, cotangent.aval.dtype)


def _summed(cotangent: jax.Array, is_batched: bool) -> jax.Array:
    """For an argument that all examples share, the sum over them."""
    return cotangent if is_batched else jnp.sum(cotangent, axis=0)


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    num_res: int,
    bwd: Any,
    out_avals: Sequence[Aval],
    in_zeros: Sequence[bool],
    **params: Any,
) -> tuple[Any, list[int | None]]:
    dims = [d if isinstance(d, int) else None for d in dims]
    if all(d is None for d in dims):
        own = {"num_res": num_res, "bwd": bwd, "out_avals": out_avals}
        results = _linear_map().bind(*args, **own, in_zeros=in_zeros, **params)
        return results, [None] * len(results)
    tangents = [
        t if d is None else jnp.moveaxis(t, d, 0)
        for t, d in zip(args[num_res:], dims[num_res:], strict=True)
    ]
    is_batched = [d is not None for d in dims[num_res:]]
    results = _linear_map().bind(
        *args[:num_res],
        *tangents,
        num_res=num_res,
        bwd=_Batched(bwd, axis, dims[:num_res], in_zeros, is_batched, out_avals),
        out_avals=[_with_axis(aval, axis.size) for aval in out_avals],
        in_zeros=in_zeros,
        **params,
    )
    return results, [0] * len(results)


def _with_axis(aval: Aval, size: int) -> Aval:
    """The type of a batch of such arrays."""
    spec = PartitionSpec(None, *aval.sharding.spec)
    sharding = aval.sharding.update(spec=spec)
    return aval.update(shape=(size, *aval.shape), sharding=sharding)


@functools.cache
def _linear_map() -> Any:
    """JAX's primitive for the linear map that remains of a `custom_vjp`."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, ()), lambda _, ct: (ct,))
    derivative = lambda x, t: jax.jvp(identity, (x,), (t,))[1]
    eqns = jax.make_jaxpr(derivative)(1.0, 1.0).eqns
    return next(e.primitive for e in eqns if e.primitive.name == "custom_lin")


@functools.cache
def _add_batching() -> None:
    batching.fancy_primitive_batchers[_linear_map()] = _batch

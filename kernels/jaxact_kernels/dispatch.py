"""One call for all implementations: lowering to a platform decides between them.

A traced program holds one equation for an operation, with the definition inside.
Lowered for a CPU, it is the definition; lowered for an NVIDIA GPU, it is the kernel
that `choose` names. A kernel costs nothing where it does not run, not even its trace:
`lax.platform_dependent` traces every branch, ten times the work.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact_kernels import compat
from jaxact_kernels.choice import REFERENCE, choose, implementations
from jaxact_kernels.device import device_of, here
from jaxact_kernels.operation import Operation, Vmaps, over_vmapped_axes

Operand = jax.Array | tuple[jax.Array, ...]

operation_p = jex.Primitive("packed_operation")
operation_p.multiple_results = True


# Jitted so that a program that stores many arrays traces each shape once, and so that
# eager calls run fused.
@functools.partial(jax.jit, static_argnums=0, static_argnames="implementation")
def run(
    operation: Operation, *operands: Operand, implementation: str | None = None
) -> Any:
    """Compute an operation by an implementation that the platform has.

    Args:
        operation: to compute.
        *operands: arrays and tuples of arrays, in the definition's order.
        implementation: the only one to use; lowering for a platform or device that it
            does not support fails.

    Raises:
        ValueError: no implementation has that name.
    """
    implementations(operation, implementation)  # refuses a wrong name anywhere
    return _bind(operation.reference, operands, operation, implementation, ())


def _bind(
    definition: Callable[..., Any],
    operands: Sequence[Operand],
    operation: Operation,
    implementation: str | None,
    vmaps: Vmaps,
) -> Any:
    # One jitted function: lowering then evaluates one equation and traces no more.
    called = jax.jit(definition)
    traced, out = jax.make_jaxpr(called, return_shape=True)(*operands)
    results = operation_p.bind(
        *jax.tree.leaves(operands),
        definition=traced,
        operation=operation,
        implementation=implementation,
        vmaps=vmaps,
        needs_devices=compat.needs_devices(),
    )
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _evaluate(
    *arrays: jax.Array, definition: compat.Program, operation: Operation, **_: object
) -> list[jax.Array]:
    with jax.named_scope(operation.scope):
        return jex.jaxpr_as_fun(definition)(*arrays)


def _batch(
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    definition: compat.Program,
    operation: Operation,
    implementation: str | None,
    vmaps: Vmaps,
    **_: object,
) -> tuple[list[jax.Array], list[int]]:
    arrays = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(arrays, dims, strict=True)
    ]
    is_mapped = tuple(dim is not None for dim in dims)
    evaluate = jex.jaxpr_as_fun(definition)
    mapped = over_vmapped_axes(evaluate, (is_mapped,))
    vmaps = (is_mapped, *vmaps)
    results = _bind(mapped, arrays, operation, implementation, vmaps)
    return results, [0] * len(results)


def _lower(
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    implementation: str | None,
    lower: Callable[..., Sequence[mlir.ir.Value]],
    **params: Any,
) -> Sequence[mlir.ir.Value]:
    if implementation not in (None, REFERENCE):
        raise NotImplementedError(
            f"{implementation} was asked for and runs on NVIDIA GPUs alone; this "
            "program is lowered for another platform: pass implementation=None"
        )
    return lower(ctx, *values, **params)


def _lower_on_cpu(
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    operation: Operation,
    **params: Any,
) -> Sequence[mlir.ir.Value]:
    lower = _lower_called if operation.is_called_on_cpu else _lower_definition
    return _lower(ctx, *values, lower=lower, operation=operation, **params)


def _lower_on_gpu(
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    definition: compat.Program,
    operation: Operation,
    implementation: str | None,
    vmaps: Vmaps,
    **_: object,
) -> Sequence[mlir.ir.Value]:
    devices = compat.lowering_devices(ctx)
    # Devices on another platform lower for a GPU that is described, not attached.
    is_gpu = len(devices) > 0 and devices[0].platform == "gpu"
    device = device_of(devices[0]) if is_gpu else here()
    mapped = tuple(ctx.avals_out[0].shape[: len(vmaps)])
    whole = dataclasses.replace(operation, mapped=mapped)
    choice = choose(whole, device, implementation)
    if choice.implementation == REFERENCE:
        can_constrain = len(devices) <= 1 or compat.LAYOUTS_KEEP_SHARDINGS
        in_rows = can_constrain and not compat.is_exported(ctx)
        lower = _lower_in_rows if in_rows else _lower_definition
        return lower(ctx, *values, definition=definition, operation=operation)
    assert device is not None  # or every kernel had declined
    # Imported here because Pallas takes a third of a second to import.
    from jaxact_kernels.partition import sharded_kernel, single_device_kernel

    make = sharded_kernel if len(devices) > 1 else single_device_kernel
    kernel = make(operation, choice.implementation, vmaps, device)
    scoped = jax.named_scope(operation.scope)(kernel)
    return mlir.lower_fun(scoped, multiple_results=True)(ctx, *values)


def _called(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    """The definition, in a function that XLA:CPU calls and does not inline.

    Inlined, codecs are most of a step's program, and many of XLA's passes take time
    with the square of a function's size: 36 layers compile in 20 s then and in 15 this
    way. XLA would also compute an array again in each of an encoding's passes, and
    decode a mask again for each place where it is read: a step of a small ResNet takes
    1.15 times the time of an uncompressed one then, and 0.93 times this way.
    """
    # The definition is one jitted function, traced before: this marks its call alone.
    with set_xla_metadata(inlineable="false"):
        return _evaluate(*arrays, **params)


def _in_rows(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    """The definition's results, the last axis innermost in memory.

    XLA:GPU would choose layouts in which a group's elements are far apart: a norm's
    sums along rows become sums along columns, and a scan transposes its whole stack of
    words (a step of ViT-B's first two layers is predicted to take 1.30 instead of 1.37
    times as long as an uncompressed one on an H100).
    """
    return [
        with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        for x in _evaluate(*arrays, **params)
    ]


_lower_called = mlir.lower_fun(_called, multiple_results=True)
_lower_in_rows = mlir.lower_fun(_in_rows, multiple_results=True)
_lower_definition = mlir.lower_fun(_evaluate, multiple_results=True)


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """Of packed words, which have no derivative, the results have none.

    JAX 0.10 asks for it where a gradient's own derivative by a loss's weight is taken.
    """
    kinds = [t.dtype for t in tangents if not isinstance(t, ad.Zero)]
    if any(kind != jax.dtypes.float0 for kind in kinds):
        raise NotImplementedError(
            "packing has no derivative of its own: it is stored for a backward pass, "
            "which jaxact differentiates once, in reverse mode"
        )
    results = operation_p.bind(*primals, **params)
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


operation_p.def_impl(_evaluate)
ad.primitive_jvps[operation_p] = _differentiate
operation_p.def_abstract_eval(lambda *_, definition, **params: definition.out_avals)
mlir.register_lowering(operation_p, functools.partial(_lower, lower=_lower_definition))
mlir.register_lowering(operation_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(operation_p, _lower_on_gpu, platform="cuda")
batching.primitive_batchers[operation_p] = _batch

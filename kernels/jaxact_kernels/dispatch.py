"""One call for all implementations: which one it is, lowering to a platform decides.

A program that is traced once holds one equation for an operation, with the definition
inside. Lowered for a CPU, it is the definition; lowered for an NVIDIA GPU, it is the
kernel that `choose` names. A kernel costs nothing where it does not run, not even its
trace: `lax.platform_dependent` traces every branch, ten times the work.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jaxact_kernels.choice import REFERENCE, choose
from jaxact_kernels.device import device_of, here
from jaxact_kernels.operation import Operation

operation_p = jex.Primitive("packed_operation")
operation_p.multiple_results = True


def run(operation: Operation, *arrays: Any, implementation: str | None = None) -> Any:
    """Compute an operation by whichever implementation the platform has.

    Args:
        operation: what to compute.
        *arrays: its operands.
        implementation: the only one to use; lowering for a platform or device that it
            does not support fails.
    """
    return _run(operation, implementation, *arrays)


# Jitted so that a program that stores many arrays traces each shape once, and so that
# eager calls run fused.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(operation: Operation, implementation: str | None, *arrays: Any) -> Any:
    return _bind(operation.reference, arrays, operation, implementation, ())


def _bind(reference: Any, arrays: Any, operation: Any, implementation: Any, lanes: Any):
    definition, out = jax.make_jaxpr(reference, return_shape=True)(*arrays)
    results = operation_p.bind(
        *arrays,
        definition=definition,
        operation=operation,
        implementation=implementation,
        lanes=lanes,
        devices=_asks_for_devices(),
    )
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _evaluate(*arrays: Any, definition: Any, **_: Any) -> list[Any]:
    return jex.jaxpr_as_fun(definition)(*arrays)


def _batch(
    arrays: Any, dims: Any, *, definition, operation, implementation, lanes, **_
):
    arrays = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(arrays, dims, strict=True)
    ]
    is_mapped = tuple(dim is not None for dim in dims)
    evaluate = functools.partial(_evaluate, definition=definition)
    mapped = over_lanes(evaluate, (is_mapped,))
    lanes = (is_mapped, *lanes)
    results = _bind(mapped, arrays, operation, implementation, lanes)
    return results, [0] * len(results)


def over_lanes(f: Any, lanes: tuple[tuple[bool, ...], ...]) -> Any:
    """Map `f` over leading axes, one a `vmap`: outermost first, the operands it has."""
    for is_mapped in reversed(lanes):
        f = jax.vmap(f, in_axes=tuple(0 if mapped else None for mapped in is_mapped))
    return f


def _lower(ctx: Any, *values: Any, implementation: Any, **params: Any) -> Any:
    if implementation not in (None, REFERENCE):
        raise NotImplementedError(
            f"{implementation} was asked for and runs on NVIDIA GPUs alone; this "
            "program is lowered for another platform: pass implementation=None"
        )
    return _lower_definition(ctx, *values, **params)


def _lower_on_gpu(ctx: Any, *values: Any, definition, operation, **params: Any) -> Any:
    devices = _devices(ctx)
    # Devices of another platform lower for a GPU that is described, not attached.
    is_gpu = devices and devices[0].platform == "gpu"
    device = device_of(devices[0]) if is_gpu else here()
    # What limits a kernel is the size of all lanes together.
    lanes = ctx.avals_out[0].shape[: len(params["lanes"])]
    whole = operation.at((*lanes, *operation.shape))
    choice = choose(whole, device, params["implementation"])
    if choice.implementation == REFERENCE:
        return _lower_definition(ctx, *values, definition=definition)
    assert device is not None  # or every kernel had declined
    # Imported here because Pallas takes a third of a second to import.
    from jaxact_kernels.partition import kernel_call, sharded_call

    call = sharded_call if devices and len(devices) > 1 else kernel_call
    kernel = call(operation, choice.implementation, params["lanes"], device)
    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *values)


def _devices(ctx: Any) -> Any:
    """The devices that a program is lowered for, or None."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return (
        getattr(axes, "device_assignment", None) if mesh is None else mesh.devices.flat
    )


@functools.cache
def _asks_for_devices() -> Any:
    """A program that JAX does not lower without knowing the devices.

    It lowers what has one among its parameters the same way: a lowering rule cannot
    otherwise learn which GPU it is for, nor partition a call over several.
    """
    asks = custom_partitioning(lambda x: x)
    asks.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(asks)(jax.ShapeDtypeStruct((1,), np.uint32))


_lower_definition = mlir.lower_fun(_evaluate, multiple_results=True)
operation_p.def_impl(_evaluate)
operation_p.def_abstract_eval(lambda *_, definition, **params: definition.out_avals)
mlir.register_lowering(operation_p, _lower)
mlir.register_lowering(operation_p, _lower_on_gpu, platform="cuda")
batching.primitive_batchers[operation_p] = _batch

"""Run a kernel on each shard where it lies, with no communication.

XLA cannot look into a kernel and would gather its operands. It is told that an
operation keeps every axis that groups do not cross: each device runs the operation on
its shard, whose groups keep the numbers that they have in the whole array.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxact_kernels.cuts import MeshAxes, num_parts, with_other
from jaxact_kernels.device import Device, lowering_for
from jaxact_kernels.numbering import Numbering, box, row_major
from jaxact_kernels.operation import (
    GROUP_AXIS,
    Axes,
    Axis,
    Operation,
    Vmaps,
    over_vmapped_axes,
)

Kernel = Callable[..., tuple[jax.Array, ...]]
Cut = dict[str, MeshAxes]  # for each axis that is cut, by name: over which mesh axes

kernel_p = jex.Primitive("packed_operation_kernel")
kernel_p.multiple_results = True


@functools.cache
def sharded_kernel(
    operation: Operation, implementation: str, vmaps: Vmaps, device: Device
) -> Kernel:
    """The kernel for an operation under `vmaps`, shard by shard."""
    return _Sharded(operation, implementation, vmaps, device).function()


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where the running device's groups are in the whole array.

    Attributes:
        numbering: of its groups, counted from its first.
        steps: (mesh axes, by how much a step along them raises the first number).
    """

    numbering: Numbering
    steps: tuple[tuple[MeshAxes, int], ...]

    def first(self) -> jax.Array:
        """The number of the first group, `uint32[]`."""
        number = lax.full((), 0, np.uint32)
        for mesh_axes, step in self.steps:
            position = lax.convert_element_type(lax.axis_index(mesh_axes), np.uint32)
            number = lax.add(number, lax.mul(position, np.uint32(step % 2**32)))
        return number


def single_device_kernel(
    operation: Operation,
    implementation: str,
    vmaps: Vmaps,
    device: Device,
    shard: Shard | None = None,
) -> Kernel:
    """The kernel for an operation under `vmaps`, on one device.

    It is one equation with its own lowering rule, because only a trace inside the rule
    sees the device, and nothing of the mesh around the call.
    """
    kernel = operation.kernel(implementation, shard and shard.numbering)

    def mapped(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # A shard's first group has the same number at every index of a vmapped axis.
        first = (shard.first(),) if shard else ()
        call = lambda *operands: tuple(kernel(*operands, *first))
        return over_vmapped_axes(call, vmaps)(*arrays)

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        with lowering_for(device):
            results = jax.eval_shape(mapped, *shapes)
        results = tuple(core.ShapedArray(r.shape, r.dtype) for r in results)
        return tuple(kernel_p.bind(*arrays, f=mapped, device=device, results=results))

    return call


def _lower_kernel(
    ctx: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    f: Kernel,
    device: Device,
    results: tuple[core.ShapedArray, ...],
) -> Sequence[mlir.ir.Value]:
    plain = [_without_sharding(operand) for operand in ctx.avals_in]
    ctx = ctx.replace(avals_in=plain, avals_out=results)
    with lowering_for(device):
        return mlir.lower_fun(f, multiple_results=True)(ctx, *values)


def _without_sharding(array: Any) -> core.ShapedArray:
    return core.ShapedArray(array.shape, array.dtype)


kernel_p.def_abstract_eval(lambda *_, results, **params: results)
mlir.register_lowering(kernel_p, _lower_kernel)


class _Sharded:
    """One kernel call, with names for all its operands' axes."""

    def __init__(
        self, operation: Operation, implementation: str, vmaps: Vmaps, device: Device
    ):
        self.operation = operation
        self.kernel = functools.partial(
            single_device_kernel,
            implementation=implementation,
            vmaps=vmaps,
            device=device,
        )
        names = [f"vmap{level}" for level in range(len(vmaps))]
        mapped = zip(*vmaps, strict=True) if vmaps else itertools.repeat(())
        self.inputs = [
            (*itertools.compress(names, is_mapped), *axes)
            for is_mapped, axes in zip(mapped, operation.inputs, strict=False)
        ]
        self.outputs = [(*names, *axes) for axes in operation.outputs]

    def function(self) -> Kernel:
        """The call, ready for XLA's partitioner."""
        called = custom_partitioning(self.kernel(self.operation))
        called.def_partition(
            partition=self._partition,
            infer_sharding_from_operands=self._infer,
            decode_shardings=False,
            sharding_rule=self._rule(),
            **self._compound_sizes(),
        )
        return called

    def _rule(self) -> str:
        """How axes correspond, in Shardy's notation."""
        sides = (self.inputs, self.outputs)
        inputs, outputs = (", ".join(map(_factors, side)) for side in sides)
        return f"{inputs} -> {outputs}"

    def _compound_sizes(self) -> dict[str, int]:
        """Sizes for the names that are nowhere a whole axis: Shardy asks for those."""
        axes = [axis for side in self.inputs + self.outputs for axis in side]
        names = {name for axis in axes if isinstance(axis, tuple) for name in axis}
        return {name: self.operation.sizes[name] for name in names.difference(axes)}

    def _partition(
        self, mesh: Mesh, operands: Sequence[Any], results: object
    ) -> tuple[Mesh, Kernel, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        cut = self._cut(mesh, operands)
        shard = functools.partial(_sharding, mesh, cut)
        outputs, inputs = (
            tuple(map(shard, self.outputs)),
            tuple(map(shard, self.inputs)),
        )
        return mesh, self._local(mesh, cut), outputs, inputs

    def _infer(
        self, mesh: Mesh, operands: Sequence[Any], results: object
    ) -> tuple[NamedSharding, ...]:
        cut = self._cut(mesh, operands)
        return tuple(_sharding(mesh, cut, axes) for axes in self.outputs)

    def _cut(self, mesh: Mesh, operands: Sequence[Any]) -> Cut:
        """Mesh axes over which each named axis is cut, by the first operand.

        Where groups would cross a cut, another axis is cut instead: devices exchange
        their parts of the array, and only packed words are gathered.
        """
        cut: Cut = {}
        left: MeshAxes = ()
        mesh_axes = _mesh_axes(mesh, operands[0])
        for axis, names in zip(self.inputs[0], mesh_axes, strict=True):
            name = _outermost(axis)
            parts = num_parts(mesh, names)
            is_whole = name.startswith(("vmap", "lead"))
            keeps_groups = name == GROUP_AXIS and self._keeps_groups(parts)
            if parts > 1 and (is_whole or keeps_groups):
                cut[name] = names
            elif parts > 1:
                left += names
        lead = {axis: self.operation.sizes[axis] for axis in self.operation.lead_axes}
        return with_other(cut, lead, left, mesh) if left else cut

    def _keeps_groups(self, count: int) -> bool:
        """Whether a row cut in `count` parts has the whole row's groups."""
        operation = self.operation
        if operation.sizes[GROUP_AXIS] % count:
            return False
        *lead, length = operation.shape
        local = operation.at((*lead, length // count)).layout
        whole = operation.layout
        return local.lead == whole.lead and local.group == whole.group

    def _local(self, mesh: Mesh, cut: Cut) -> Kernel:
        """The function that one device runs."""
        operation = self.operation
        parts = {k: num_parts(mesh, names) for k, names in cut.items()}
        names = map(_outermost, operation.unpacked_axes)
        dims = zip(names, operation.shape, strict=True)
        local = operation.at(tuple(-(-size // parts.get(k, 1)) for k, size in dims))
        axes = (*operation.lead_axes, GROUP_AXIS)
        whole = tuple(operation.sizes[k] for k in axes)
        sizes = tuple(local.sizes[k] for k in axes)
        strides = zip(axes, sizes, row_major(whole), strict=True)
        steps = tuple((cut[k], n * stride) for k, n, stride in strides if k in cut)
        shard = Shard(box(sizes, whole), steps) if steps else None
        return self.kernel(local, shard=shard)


def _outermost(axis: Axis) -> str:
    return axis[0] if isinstance(axis, tuple) else axis


def _factors(axes: Axes) -> str:
    return " ".join(f"({' '.join(a)})" if isinstance(a, tuple) else a for a in axes)


def _sharding(mesh: Mesh, cut: Cut, axes: Axes) -> NamedSharding:
    spec = PartitionSpec(*(cut.get(_outermost(a)) for a in axes))
    return NamedSharding(mesh, spec)


def _mesh_axes(mesh: Mesh, operand: Any) -> list[MeshAxes]:
    """For each axis of an operand, the mesh axes that it is cut over.

    Read from where the parts are, as the sharding that XLA chose may have no name: it
    may cut an axis over a part of a mesh axis, which counts as whole here.
    """
    uncut: list[MeshAxes] = [()] * len(operand.shape)
    if mesh.empty:  # inside a shard_map that is manual over some axes only
        return uncut
    try:
        parts = operand.sharding.devices_indices_map(operand.shape)
    except ValueError:  # parts that differ in size
        return uncut
    starts = [
        [parts[d][axis].start or 0 for d in mesh.devices.flat]
        for axis in range(len(operand.shape))
    ]
    return [_axes_of(mesh, np.unique(s, return_inverse=True)[1]) for s in starts]


def _axes_of(mesh: Mesh, part: np.ndarray) -> MeshAxes:
    """The mesh axes, outermost first, whose row-major number is each device's part."""
    part = part.reshape(mesh.devices.shape)
    strides = {
        name: int(np.take(part, 1, axis).min())
        for axis, (name, size) in enumerate(mesh.shape.items())
        if size > 1 and (np.take(part, 1, axis) != np.take(part, 0, axis)).any()
    }
    names = tuple(sorted(strides, key=strides.__getitem__, reverse=True))
    sizes = [mesh.shape[name] for name in names]
    coordinates = dict(zip(mesh.axis_names, np.indices(part.shape), strict=True))
    if names:
        number = np.ravel_multi_index([coordinates[name] for name in names], sizes)
        return names if (number == part).all() else ()
    return ()

"""Parts of JAX that dispatch needs and no documented, stable interface gives."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex
from jax.interpreters.mlir import LoweringRuleContext

# A traced program with its constants. Newer JAX has the name for old callers alone.
Program = jex.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# Before, a layout constraint gathers an array that is sharded.
LAYOUTS_KEEP_SHARDINGS = jax.__version_info__ >= (0, 12)


@functools.cache
def needs_devices() -> Program:
    """A program that JAX does not lower without knowing the devices.

    JAX lowers an equation that has one among its parameters the same way. A lowering
    rule cannot otherwise learn its GPU's model, nor partition a call over several GPUs.
    """
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((1,), np.uint32))


def num_devices(ctx: LoweringRuleContext) -> int:
    """For how many devices a program is lowered, known or not."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)  # in a `shard_map`
    return getattr(axes, "num_devices", 1) if mesh is None else mesh.size


def is_exported(ctx: LoweringRuleContext) -> bool:
    """Whether a program is lowered to be kept: `jax.export` refuses layouts in one."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def lowering_devices(ctx: LoweringRuleContext) -> Sequence[Any]:
    """The devices that a program is lowered for; none where they are unknown."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "device_assignment", None) or ()
    return tuple(mesh.devices.flat)

"""Refuse a call that cannot be differentiated, in place of an error from inside it."""

from collections.abc import Sequence

import jax

from jaxact._jaxpr.types import Array, PyTree
from jaxact._plan.storage import StoragePlan


def require_sizes(name: str, values: Sequence[Array]) -> None:
    """Refuse shapes with symbols, as `jax.export` takes them.

    Raises:
      ValueError: one has a symbol.
    """
    for x in values:
        shape = getattr(x, "shape", ())  # a number has none
        if not all(isinstance(size, int) for size in shape):
            raise ValueError(
                f"jaxact: the compressed {name} is differentiated at an argument of "
                f"shape {shape}. How residuals are packed depends on their sizes, "
                "which have to be numbers: export the step for each size that it runs "
                "with, or the uncompressed one."
            )


def require_common_key(name: str, plan: StoragePlan, stored: Sequence[PyTree]) -> None:
    """Refuse a key that differs between devices which hold the same residual.

    In a `shard_map` that checks types these would decode unlike arrays, and JAX finds a
    type in the backward pass that it does not expect.

    Raises:
      ValueError: stored arrays vary over mesh axes over which their residual does not.
    """
    for (v, decision), arrays in zip(plan.decisions.items(), stored, strict=True):
        own = v.aval.manual_axis_type.varying
        axes = {a for x in jax.tree.leaves(arrays) for a in _varying(x)} - {*own}
        if axes:
            write = ", ".join(f"jax.lax.axis_index({a!r})" for a in sorted(own))
            raise ValueError(
                f"jaxact: the rounding_key in {name} varies over {sorted(axes)}, along "
                f"which all devices have the same {decision.residual.key}, and have to "
                "round it alike. Fold into the key the indices along axes that the "
                f"activations are split over, and no others: {write or 'here none'}."
            )


def _varying(x: jax.Array) -> Sequence[str]:
    return tuple(jax.typeof(x).manual_axis_type.varying)

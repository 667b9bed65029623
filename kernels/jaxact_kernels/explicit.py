"""Arrays whose type says how they are split over a mesh: over its Explicit axes.

JAX does not reshape such an array where that would cut it elsewhere, and a cut may go
through groups: 12 heads of 64 on four devices, a hidden layer of 768.
"""

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxact_kernels.cuts import num_parts, with_other


def with_whole_groups(
    x: jax.Array, num_lead: int, num_groups: int, is_padded: bool
) -> jax.Array:
    """`x`, with its axes after the leading ones cut between groups, or not at all.

    A leading axis is cut in place of those, if the devices can share one.

    Args:
        num_lead: leading axes. The others together are a row.
        num_groups: in a row.
        is_padded: whether a row's last group is.
    """
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return x
    spec = [_names(entry) for entry in sharding.spec]
    lead, row = spec[:num_lead], spec[num_lead:]
    names = tuple(name for entry in row for name in entry)
    parts = num_parts(mesh, names)
    is_cut_once = not any(row[1:]) and not is_padded
    # An axis with one device is no cut, but JAX refuses the same reshapes for its name.
    if not names or (is_cut_once and num_groups % parts == 0):
        return x
    sizes = dict(enumerate(x.shape[:num_lead]))
    cut = with_other(dict(enumerate(lead)), sizes, names, mesh)
    entries = [cut[i] or None for i in range(num_lead)]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def with_whole_parts(x: jax.Array, parts: int) -> jax.Array:
    """`x`, with its first axis on every device if a cut goes through one of the parts.

    Args:
        parts: equal parts of the first axis.
    """
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return x
    first, *others = sharding.spec
    if parts % num_parts(mesh, _names(first)) == 0:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(None, *others)))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a specification names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry

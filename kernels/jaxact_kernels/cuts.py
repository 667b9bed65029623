"""Axes of an array that are cut over axes of a mesh."""

import math
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from jax.sharding import AbstractMesh, Mesh

MeshAxes: TypeAlias = tuple[str, ...]
Axis = TypeVar("Axis")


def num_parts(mesh: Mesh | AbstractMesh, names: MeshAxes) -> int:
    """How many parts there are of an axis that is cut over these mesh axes."""
    return math.prod(mesh.shape[name] for name in names)


def with_other(
    cut: Mapping[Axis, MeshAxes],
    sizes: Mapping[Axis, int],
    names: MeshAxes,
    mesh: Mesh | AbstractMesh,
) -> dict[Axis, MeshAxes]:
    """`cut`, with one more axis over `names` too: the one that has most left.

    Args:
        cut: the mesh axes over which axes are cut.
        sizes: of the axes to choose from. As before if none can be shared evenly.
    """
    wanted = {axis: (*cut.get(axis, ()), *names) for axis in sizes}
    left = {
        axis: sizes[axis] // num_parts(mesh, own)
        for axis, own in wanted.items()
        if sizes[axis] % num_parts(mesh, own) == 0
    }
    if not left:
        return dict(cut)
    axis = max(left, key=left.__getitem__)
    return {**cut, axis: wanted[axis]}

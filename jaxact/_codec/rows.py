"""Rows that are too short to pack."""

import math
from typing import Protocol

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxact_kernels.layout import Layout, layout_of

_METADATA_BYTES = 4  # for a group


class Grouped(Protocol):
    """A codec that packs groups along rows."""

    @property
    def bits(self) -> float: ...

    @property
    def group_size(self) -> int: ...


def short_rows(codec: Grouped, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why groups would take no fewer bytes than the array; None where they do.

    A group has at least 32 elements, all from one row along axis 0: points with three
    coordinates, `[65536, 3]`, would take 20 bytes a row at 4 bits, not 12.
    """
    layout = layout_of(shape, codec.group_size)
    group_bytes = layout.group * codec.bits / 8 + _METADATA_BYTES
    itemsize = jnp.dtype(dtype).itemsize
    exact = math.prod(shape) * itemsize
    if layout.total_groups * group_bytes < exact or not exact:
        return None
    if group_bytes < layout.group * itemsize:
        return no_smaller(layout)
    return (
        f"codes with {codec.bits:g} bits, and {_METADATA_BYTES} bytes for each "
        f"{layout.group}, would be no smaller than {dtype}; take fewer bits"
    )


def no_smaller(layout: Layout) -> str:
    """Why an array with this layout is not packed."""
    return (
        f"rows of {layout.length} elements, padded to {layout.group}, would be no "
        "smaller packed; give such arrays longer rows"
    )

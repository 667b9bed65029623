"""Sums along columns, as XLA's kernels for NVIDIA GPUs compute them.

Each block of threads takes 64 columns, and all its warps go from row to row in step:
they wait for memory, then compute, so that both times add up. Where there are few
columns and no other axis to split, few multiprocessors have a block at all.
"""

import math

from jaxact._time.hlo import Computation, Instruction

_COLUMNS = 64  # two a thread, 32 threads side by side


def column_blocks(kernel: Instruction, body: Computation) -> int | None:
    """How many blocks of threads sum columns; None for another kernel.

    A kernel with several sums goes by the largest array that it sums.
    """
    if not kernel.find(r"\bkind=(kInput)"):  # a loop over the results adds a few rows
        return None
    counts = {
        summed.elements: _blocks(summed.arrays[0].sizes, _axes(made))
        for made in body.values()
        if made.opcode == "reduce"
        for summed in [body[made.operands[0]]]
        if len(summed.arrays[0].sizes) - 1 not in _axes(made)
    }
    return counts[max(counts)] if counts else None


def _axes(reduce: Instruction) -> list[int]:
    listed = reduce.find(r"\bdimensions=\{([\d,]*)\}")
    return [int(axis) for axis in listed.split(",") if axis]


def _blocks(sizes: tuple[int, ...], axes: list[int]) -> int:
    """For an array whose last axes are summed rows, and columns."""
    last = max(axes)
    outer = math.prod(n for axis, n in enumerate(sizes[:last]) if axis not in axes)
    return outer * math.ceil(math.prod(sizes[last + 1 :]) / _COLUMNS)

"""Where an array's axes are in arrays that are made from it.

A label for each axis, None for those that have none.
"""

from collections.abc import Sequence
from typing import TypeAlias

from jaxact._jaxpr.types import Eqn, Shape

Labels: TypeAlias = tuple[int | None, ...]
# For an axis that has a part of one with a label, or several in one.
MIXED = -2


def moved(eqn: Eqn, labels: Sequence[int | None]) -> Labels:
    """Labels after a move, or a slice, of the first operand, which has `labels`."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if before == after and eqn.primitive.name not in ("transpose", "rev"):
        return tuple(labels)
    found: list[int | None] = [None] * len(after)
    if eqn.primitive.name == "broadcast_in_dim":
        for i, k in zip(labels, eqn.params["broadcast_dimensions"], strict=True):
            found[k] = i
    elif eqn.primitive.name == "transpose":
        found = [labels[k] for k in eqn.params["permutation"]]
    elif [n for n in before if n > 1] == [n for n in after if n > 1]:
        long = [i for i, n in zip(labels, before, strict=True) if n > 1]
        rest = iter(long)
        found = [next(rest) if n > 1 else None for n in after]
    else:  # a slice, or a reshape that joins or splits some axes
        mixed: list[int | None] = [MIXED if n > 1 else None for n in after]
        first = _num_alike(before, after)
        last = min(_num_alike(before[::-1], after[::-1]), len(after) - first)
        middle = mixed[first : len(after) - last]
        found = [*labels[:first], *middle, *labels[len(labels) - last :]]
    return tuple(found)


def multiplied(eqn: Eqn, side: int, labels: Sequence[int | None]) -> Labels:
    """Labels after a product, a `dot_general`, whose operand on a side has `labels`."""
    contracted, batch = eqn.params["dimension_numbers"]
    found = [labels[i] for i in batch[side]]
    for other, operand in enumerate(eqn.invars):
        inside = (*contracted[other], *batch[other])
        free = [i for i in range(operand.aval.ndim) if i not in inside]
        found += [labels[i] if other == side else None for i in free]
    return tuple(found)


def _num_alike(sizes: Shape, others: Shape) -> int:
    """How many sizes are equal before the first that is not."""
    pairs = enumerate(zip(sizes, others, strict=False))
    shorter = min(len(sizes), len(others))
    return next((k for k, (n, m) in pairs if n != m), shorter)

"""Values that are nowhere above another: a maximum over them, or a positive sum.

Along an axis, as in a softmax, or of two values, as in a recurrence that keeps a
running maximum: the mLSTM's decays exp(d - max(d)) (Beck et al., xLSTM, 2024).
"""

from jaxact._jaxpr.primitives import COPIES
from jaxact._jaxpr.read import is_literal
from jaxact._jaxpr.types import Atom, Axes, Eqn, Producers


def is_at_most(
    x: Atom, y: Atom, producers: Producers, reduction: str = "reduce_max"
) -> bool:
    """Whether each element of `y` is a maximum over some that `x` has there.

    Args:
      reduction: along axes; "reduce_sum" for an `x` that is nowhere below zero.
    """
    # With the axis of x that each axis of a smaller array belongs to.
    todo = [(y, tuple(range(len(y.aval.shape))))]
    while todo:
        v, axes = todo.pop()
        if v is x and axes == tuple(range(len(x.aval.shape))):
            return True
        if not is_literal(v) and v in producers:
            todo += _smaller(producers[v], axes, reduction)
    return False


def _smaller(
    eqn: Eqn, axes: Axes, reduction: str
) -> list[tuple[Atom, tuple[int, ...]]]:
    """Operands that the result is a maximum over, or a copy of, and their axes."""
    name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
    if name in COPIES:
        return [(operands[0], tuple(axes))]
    if name == "max":
        shape = eqn.outvars[0].aval.shape
        return [(v, tuple(axes)) for v in operands if v.aval.shape == shape]
    if name == "broadcast_in_dim":
        return [(operands[0], tuple(axes[d] for d in params["broadcast_dimensions"]))]
    if name == reduction:
        full = tuple(range(len(operands[0].aval.shape)))
        kept = tuple(d for d in full if d not in params["axes"])
        return [(operands[0], full)] if kept == axes else []
    return []

"""Integers that a program bounds, and that fit in a few bits.

Where in its window each maximum of a pool was, which expert is each token's.
"""

import jax.numpy as jnp

from jaxact._codec import Bitfield
from jaxact._form.intervals import interval_of, intervals_in
from jaxact._jaxpr.types import Var
from jaxact._plan.program import Program
from jaxact._policy import SMALL_SIZE

MOST_BITS = 8


def integer_widths(program: Program, small_size: int) -> dict[Var, int]:
    """The bits that hold each element, for integers that a bit field makes smaller.

    Args:
      small_size: arrays with at most this many elements are kept as they are.
    """
    least = max(small_size + 1, SMALL_SIZE)
    computed = [
        v
        for eqn in program.jaxpr.eqns
        for v in eqn.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.integer) and v.aval.size >= least
    ]
    if not computed:
        return {}
    intervals, widths = intervals_in(program), {}
    for v in computed:
        low, high = interval_of(v, intervals)
        if 0 <= low and high < 1 << MOST_BITS:
            width = max(int(high).bit_length(), 1)
            if Bitfield(width).declines(v.aval.shape, v.aval.dtype) is None:
                widths[v] = width
    return widths

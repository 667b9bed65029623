"""Workspace for checkpoints inside a call, such as attention's scores."""

from jaxact._jaxpr.primitives import CHECKPOINTS, MATMULS
from jaxact._jaxpr.read import num_bytes, programs_in
from jaxact._jaxpr.types import Jaxpr


def largest_recomputed(program: Jaxpr, is_inside: bool = False) -> int:
    """The largest product in the checkpoints that a program has, in bytes.

    Those in loops and branches count too.
    """
    largest = 0
    for eqn in program.eqns:
        if is_inside and eqn.primitive.name in MATMULS:
            largest = max([largest, *map(num_bytes, eqn.outvars)])
        inner = is_inside or eqn.primitive.name in CHECKPOINTS
        for body in programs_in(eqn):
            largest = max(largest, largest_recomputed(body, inner))
    return largest

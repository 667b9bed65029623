"""Workspace for checkpoints inside a call, such as attention's scores."""

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import CHECKPOINTS, MATMULS
from jaxact._jaxpr.read import call_body
from jaxact._jaxpr.types import Jaxpr


def largest_recomputed(program: Jaxpr, is_inside: bool = False) -> int:
    """The largest product in the checkpoints that a program has, in bytes."""
    largest = 0
    for eqn in program.eqns:
        if is_inside and eqn.primitive.name in MATMULS:
            sizes = [v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars]
            largest = max([largest, *sizes])
        body = call_body(eqn)
        if body is not None:
            inner = is_inside or eqn.primitive.name in CHECKPOINTS
            jaxpr, _ = open_jaxpr(body)
            largest = max(largest, largest_recomputed(jaxpr, inner))
    return largest

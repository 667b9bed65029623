"""Operations of a traced program, counted from the shapes of its matrix products.

XLA's own count (`compiled.cost_analysis()`) takes the body of a loop once, however
often it runs, and has none for a GPU that is not attached.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import BARRIERS
from jaxact._jaxpr.read import programs_in, variables_in
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Var
from jaxact._memory.compiling import trace
from jaxact._written_as import written_as

_LOOPS = ("scan", "while")  # where an output can be an input of the next iteration


@written_as("count_flops(step, params, batch)")
def count_flops(step: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Additions and multiplications in a step's matrix products and convolutions.

    Nothing is compiled and nothing runs. Products count that a result needs, recomputed
    ones each time; those that XLA merges because a step has them twice count twice. The
    body of a scan counts as often as it runs, of a `cond` the largest branch, of a
    `while` one iteration. A Pallas kernel counts by its own estimate, or else as one
    program for each point of its grid.

    Args:
      step: a function; if it is jitted its static arguments count.
      *args: its arguments, as for `memory`.
      **kwargs: its keyword arguments.

    Raises:
      TypeError: `step` is no function.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> x = jax.ShapeDtypeStruct((100, 100), jnp.float32)
      >>> jaxact.count_flops(lambda x: x @ x, x)
      2000000
    """
    return flops_of(trace(step, args, kwargs).jaxpr)


def flops_of(program: ClosedJaxpr) -> int:
    """The same for a program that is traced already."""
    jaxpr, _ = open_jaxpr(program)
    return _needed(jaxpr, [True] * len(jaxpr.outvars))[0]


def _needed(jaxpr: Jaxpr, outputs: Sequence[bool]) -> tuple[int, list[bool]]:
    """Operations for some outputs of a jaxpr, and which of its inputs those need."""
    alive = _chosen(jaxpr.outvars, outputs)
    count = 0
    for eqn in reversed(jaxpr.eqns):
        outputs = [v in alive for v in eqn.outvars]
        if any(outputs) or eqn.effects:
            here, inputs = _of_equation(eqn, outputs)
            count += here
            alive |= _chosen(eqn.invars, inputs)
    return count, [v in alive for v in jaxpr.invars]


def _chosen(atoms: Sequence[Atom], which: Sequence[bool]) -> set[Var]:
    """Those of the atoms, without literals."""
    pairs = zip(atoms, which, strict=True)
    return set(variables_in([atom for atom, is_chosen in pairs if is_chosen]))


def _of_equation(eqn: Eqn, outputs: list[bool]) -> tuple[int, list[bool]]:
    """Operations for some outputs of an equation, and which inputs those need."""
    name, every_input = eqn.primitive.name, [True] * len(eqn.invars)
    if name in BARRIERS:
        return 0, outputs
    count = _COUNTS.get(name)
    if count is not None:
        return count(eqn), every_input
    inside = programs_in(eqn)
    if name == "cond":
        return max(map(flops_of, inside)), every_input
    is_call = name not in _LOOPS and len(inside) == 1
    if is_call and len(inside[0].invars) == len(every_input):
        return _needed(inside[0], outputs)
    return eqn.params.get("length", 1) * sum(map(flops_of, inside)), every_input


def _dot(eqn: Eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _product(eqn, contracted)


def _ragged_dot(eqn: Eqn) -> int:
    """Rows of one operand in groups; each row meets the other of its group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    total = _product(eqn, contracted)
    # Where the sum is over rows, each group has a result of its own, from its rows.
    is_sum = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return total // eqn.outvars[0].aval.shape[0] if is_sum else total


def _product(eqn: Eqn, contracted: Sequence[int]) -> int:
    left = eqn.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(eqn.outvars[0].aval.shape) * depth


def _convolution(eqn: Eqn) -> int:
    _, *axes = eqn.params["dimension_numbers"].rhs_spec  # but that of the output
    kernel = eqn.invars[1].aval.shape
    depth = math.prod(kernel[axis] for axis in axes)
    zeros = math.prod(eqn.params["lhs_dilation"])  # between elements of the image
    return 2 * math.prod(eqn.outvars[0].aval.shape) * depth // zeros


def _kernel(eqn: Eqn) -> int:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return estimate.flops
    grid = eqn.params["grid_mapping"].grid
    return math.prod(grid) * sum(map(flops_of, programs_in(eqn)))


_COUNTS: dict[str, Callable[[Eqn], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "pallas_call": _kernel,
}

"""Operations of a traced program, counted from the shapes of its matrix products.

XLA's own count (`compiled.cost_analysis()`) takes the body of a loop once, however
often it runs, and has none for a GPU that is not attached.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

LOOPS = ("scan", "while")  # where an output can be an input of the next iteration


def flops(program: Any) -> int:
    """Additions and multiplications of a jaxpr's matrix products and convolutions.

    Only those that an output needs: XLA removes the others. The body of a scan counts
    as often as it runs, of a `cond` its largest branch, of a `while` one iteration.
    """
    program = getattr(program, "jaxpr", program)
    return needed(program, [True] * len(program.outvars))[0]


def needed(program: Any, outputs: Sequence[bool]) -> tuple[int, list[bool]]:
    """Operations for some outputs of a jaxpr, and which of its inputs those need."""
    alive = chosen(program.outvars, outputs)
    count = 0
    for equation in reversed(program.eqns):
        outputs = [variable in alive for variable in equation.outvars]
        if any(outputs):
            here, inputs = of_equation(equation, outputs)
            count += here
            alive |= chosen(equation.invars, inputs)
    return count, [variable in alive for variable in program.invars]


def chosen(atoms: Sequence[Any], which: Sequence[bool]) -> set[Any]:
    """Those of the atoms, without literals."""
    pairs = zip(atoms, which, strict=True)
    return {atom for atom, is_chosen in pairs if is_chosen and not hasattr(atom, "val")}


def of_equation(equation: Any, outputs: list[bool]) -> tuple[int, list[bool]]:
    name, params = equation.primitive.name, equation.params
    every_input = [True] * len(equation.invars)
    if name == "optimization_barrier":
        return 0, outputs
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        depth = math.prod(left[axis] for axis in contracted)
        return 2 * math.prod(equation.outvars[0].aval.shape) * depth, every_input
    if name == "conv_general_dilated":
        _, *axes = params["dimension_numbers"].rhs_spec  # but that of the output
        kernel = equation.invars[1].aval.shape
        depth = math.prod(kernel[axis] for axis in axes)
        zeros = math.prod(params["lhs_dilation"])  # between elements of the image
        size = math.prod(equation.outvars[0].aval.shape)
        return 2 * size * depth // zeros, every_input
    is_program = lambda value: hasattr(value, "eqns")
    leaves = jax.tree.leaves(list(params.values()), is_leaf=is_program)
    inside = [getattr(leaf, "jaxpr", leaf) for leaf in leaves if is_program(leaf)]
    if name == "cond":
        return max(map(flops, inside)), every_input
    is_call = name not in LOOPS and len(inside) == 1
    if is_call and len(inside[0].invars) == len(every_input):
        return needed(inside[0], outputs)
    return params.get("length", 1) * sum(map(flops, inside)), every_input

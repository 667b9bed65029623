"""The smallest program that still fails in the same way."""

from collections.abc import Callable

from fuzz.programs import Program, smaller


def shrink(program: Program, fails: Callable[[Program], bool], tries: int) -> Program:
    """Take away parts of `program` while `fails` holds, with at most `tries` calls."""
    improved = True
    while improved:
        improved = False
        for candidate in smaller(program):
            if tries == 0:
                return program
            if _size(candidate) >= _size(program):
                continue
            tries -= 1
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _size(program: Program) -> tuple[int, ...]:
    return (
        sum(1 + len(s.body) for s in program.steps),
        len(program.outputs),
        sum(i.dtype != "float32" or i.data != "normal" for i in program.inputs),
        program.activations is not None,
        len(program.source()),
    )

"""The smallest program that still fails in the same way."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from fuzz.programs import Program, Step


def shrink(program: Program, fails: Callable[[Program], bool], tries: int) -> Program:
    """Take away parts of `program` while `fails` holds, with at most `tries` calls."""
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(program):
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


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    if len(program.outputs) > 1:
        for name in program.outputs:
            rest = tuple(n for n in program.outputs if n != name)
            yield _trimmed(dataclasses.replace(program, outputs=rest))
    for number, step in reversed([*enumerate(program.steps)]):
        before, after = program.steps[:number], program.steps[number + 1 :]
        if step.body:  # the body alone
            x = re.findall(r"\b[xwv]\d+\b", step.code.replace(f"f{step.target}", ""))
            inner = tuple(_renamed(s, step.argument, x[-1]) for s in step.body)
            last = _renamed(inner[-1], inner[-1].target, step.target)
            steps = (*before, *inner[:-1], last, *after)
            yield _trimmed(dataclasses.replace(program, steps=steps))
            for index in range(len(step.body)):
                for value in _operands(step.body[index]):
                    body = _without(step.body, index, value)
                    if body:
                        new = dataclasses.replace(step, body=body)
                        yield _trimmed(
                            dataclasses.replace(program, steps=(*before, new, *after))
                        )
        for value in _operands(step):
            steps = (*before, *(_renamed(s, step.target, value) for s in after))
            outputs = tuple(value if n == step.target else n for n in program.outputs)
            outputs = tuple(dict.fromkeys(outputs))
            yield _trimmed(dataclasses.replace(program, steps=steps, outputs=outputs))
        if step.code.startswith("("):
            bare = re.sub(r"^\((.*)\) \* [0-9.e-]+$", r"\1", step.code)
            if bare != step.code:
                new = dataclasses.replace(step, code=bare)
                yield dataclasses.replace(program, steps=(*before, new, *after))
    for number, item in enumerate(program.inputs):
        plain = dataclasses.replace(item, dtype="float32", data="normal")
        if plain != item:
            inputs = (*program.inputs[:number], plain, *program.inputs[number + 1 :])
            yield dataclasses.replace(program, inputs=inputs)
    if program.activations is not None:
        yield dataclasses.replace(program, activations=None)


def _operands(step: Step) -> list[str]:
    return sorted(step.reads())


def _without(body: tuple[Step, ...], index: int, value: str) -> tuple[Step, ...]:
    target = body[index].target
    after = tuple(_renamed(s, target, value) for s in body[index + 1 :])
    return (*body[:index], *after)


def _renamed(step: Step, old: str, new: str) -> Step:
    change = lambda text: re.sub(rf"\b{old}\b", new, text)
    return Step(
        change(step.target),
        change(step.code),
        tuple(_renamed(s, old, new) for s in step.body),
        step.argument,
    )


def _trimmed(program: Program) -> Program:
    """Without steps and inputs that no output needs."""
    needed, kept = {*program.outputs}, []
    for step in reversed(program.steps):
        if step.target in needed:
            kept.append(step)
            needed |= step.reads()
    inputs = tuple(i for i in program.inputs if i.name in needed)
    activations = program.activations
    if activations is not None:
        names = {program.inputs[n].name for n in activations}
        activations = tuple(n for n, i in enumerate(inputs) if i.name in names) or None
    return Program(
        program.seed, inputs, tuple(reversed(kept)), program.outputs, activations
    )

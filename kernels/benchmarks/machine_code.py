"""A kernel's machine code: its instructions, and those that ordinary elements run."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import assembler

PIPES = {
    "fma": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "imad": "IMAD",
    "special": "MUFU F2I I2F F2F POPC FLO BREV",
    "memory": "LD ST LDG STG LDS STS LDL STL LDSM STSM SHFL ATOM ATOMS RED",
    "reduction": "REDUX",
    "issue": "ACQBULK BAR BRA BSSY BSYNC CS2R DEPBAR EXIT LDC MEMBAR NOP PREEXIT R2UR "
    "S2R S2UR VOTEU WARPSYNC",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}


class Instruction(NamedTuple):
    is_conditional: bool
    operation: str
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def pipe(self) -> str:
        """Where it runs; `issue` if no pipe but the schedulers is at stake."""
        return PIPE_OF.get(self.name, "issue" if self.name.startswith("U") else "alu")

    @property
    def loaded_bytes(self) -> int:
        """Bytes a thread reads from global memory."""
        return self._bytes if self.name in ("LD", "LDG") else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes a thread writes to global memory."""
        return self._bytes if self.name in ("ST", "STG") else 0

    @property
    def _bytes(self) -> int:
        width = re.search(r"\.[US]?(8|16|64|128)\b", self.operation)
        return int(width[1]) // 8 if width else 4


LOOP = Instruction(False, "LOOP", "")  # stands for a repetition by a branch back


class Code(NamedTuple):
    """A kernel's instructions, and where labels point."""

    instructions: list[Instruction]
    labels: dict[str, int]


def disassemble(kernel) -> Code:
    nvdisasm = assembler.tool("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        command = [str(nvdisasm), "--print-code", file.name]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    code = Code([], {})
    is_kernel = False
    for line in ran.stdout.splitlines():
        if line.startswith(".text."):
            is_kernel = line == f".text.{kernel.name}:"
        if not is_kernel:
            continue
        if label := re.match(r"(\.L_\w+):", line):
            code.labels[label[1]] = len(code.instructions)
        if match := re.match(r"\s+/\*\w+\*/\s+(@!?\w+ )?\s*([A-Z][\w.]*)(.*?);", line):
            code.instructions.append(Instruction(bool(match[1]), match[2], match[3]))
    return code


def ordinary_path(
    code: Code, *, is_shorter: bool, bytes_in_loop: int = 0
) -> list[Instruction]:
    """Instructions from the entry to the exit, by branches that store most, load least.

    Among branches that do the same, the longer, as some threads run it, or the shorter.
    `bytes_in_loop`: what a loop without branches loads in all, which tells how often it
    runs.
    """
    sign = 1 if is_shorter else -1

    def rank(side: tuple[Instruction, ...]) -> tuple[bool, int, int, int]:
        return LOOP in side, -stored_bytes(side), loaded_bytes(side), sign * len(side)

    @functools.cache
    def path_from(start: int) -> tuple[Instruction, ...]:
        path = []
        for number in range(start, len(code.instructions)):
            instruction = code.instructions[number]
            path.append(instruction)
            target = target_of(code, number)
            if instruction.name == "EXIT":
                sides = [()]
            elif target is None:
                continue
            elif number in reached_from(code, target):
                body = code.instructions[target : number + 1]
                loaded = loaded_bytes(body) if is_straight(code, target, number) else 0
                if loaded and bytes_in_loop and not bytes_in_loop % loaded:
                    path += body * (bytes_in_loop // loaded - 1)
                    continue
                path.append(LOOP)
                break
            else:
                sides = [path_from(target)]
            if instruction.is_conditional:
                sides.append(path_from(number + 1))
            path += min(sides, key=rank)
            break
        return tuple(path)

    path = list(path_from(0))
    if LOOP in path:
        raise NotImplementedError("a loop: how often it runs is not known")
    return path


def is_straight(code: Code, start: int, end: int) -> bool:
    """Whether nothing but a conditional branch, its last instruction, leaves a loop."""
    return code.instructions[end].is_conditional and all(
        code.instructions[number].name != "EXIT" and target_of(code, number) is None
        for number in range(start, end)
    )


def target_of(code: Code, number: int) -> int | None:
    """Where an instruction branches to; None where it does not branch."""
    instruction = code.instructions[number]
    if instruction.name in ("BRX", "CALL", "JMP", "RET"):
        raise NotImplementedError(f"{instruction} leads where no label says")
    # BRA.DIV is for warps whose threads are apart, which these never are.
    if instruction.name != "BRA" or ".DIV" in instruction.operation:
        return None
    return code.labels[re.search(r"\((\.L_\w+)\)", instruction.operands)[1]]


def reached_from(code: Code, start: int) -> set[int]:
    """The branches that may run after an instruction."""
    found, seen, waiting = set(), set(), [start]
    while waiting:
        first = number = waiting.pop()
        if first in seen:
            continue
        seen.add(first)
        while number < len(code.instructions):
            instruction, target = code.instructions[number], target_of(code, number)
            if target is not None:
                found.add(number)
                waiting.append(target)
            ends = target is not None or instruction.name == "EXIT"
            if ends and not instruction.is_conditional:
                break
            number += 1
    return found


def in_flight(path: list[Instruction]) -> int:
    """Bytes that a thread asks for before it waits for the first of them."""
    waited: set[str] = set()
    total = 0
    for instruction in path:
        registers = re.findall(r"\bR(\d+)\b", instruction.operands)
        sources = registers[1:] if instruction.loaded_bytes else registers
        if not waited.isdisjoint(sources):
            break
        if instruction.loaded_bytes:
            total += instruction.loaded_bytes
            size = max(1, instruction.loaded_bytes // 4)
            waited |= {str(int(registers[0]) + i) for i in range(size)}
    return total


def loaded_bytes(path: Iterable[Instruction]) -> int:
    return sum(i.loaded_bytes for i in path)


def stored_bytes(path: Iterable[Instruction]) -> int:
    return sum(i.stored_bytes for i in path)

"""The instructions of a compiled program, and the line that each comes from.

Field numbers are those of xla/service/hlo.proto, in the messages HloModuleProto,
HloComputationProto, HloInstructionProto, OpMetadata and StackFrameIndexProto.
`jaxact._time.hlo` has a `Program` with an `Instruction` too: the same compiled module,
read as text for shapes and fusions; this one knows lines and buffers by number.
"""

import os
import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxact._jaxpr.labels import visible
from jaxact._jaxpr.source import is_in_library
from jaxact._memory import wire
from jaxact._memory.wire import Message

# Parts of an operation's name that no module and no named scope gave.
_STRUCTURE = frozenset(
    "while body cond branch closed_call eval_jaxpr checkpoint rematted_computation "
    "remat scan custom_vjp_call custom_jvp_call pjit shard_map".split()
)
# Instructions that hold another's value, and the operand that has it.
_PASSES = {
    "bitcast": 0,
    "copy": 0,
    "copy-start": 0,
    "copy-done": 0,
    "get-tuple-element": 0,
    "opt-barrier": 0,
    "async-done": 0,
    "reshape": 0,
    "transpose": 0,
    "convert": 0,
    "dynamic-update-slice": 1,  # a scan's stack: the value that it stacks
}
# Their own name says less than that of the value which they hold.
_HOLLOW = frozenset(["fusion", "async-start", *_PASSES])
# XLA's PrimitiveType, by number.
_DTYPES = {
    **{1: "bool", 2: "i8", 3: "i16", 4: "i32", 5: "i64"},
    **{6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16"},
    **{11: "f32", 12: "f64", 15: "c64", 16: "bf16", 18: "c128"},
}


# An instruction's id, and which part of the tuple that it makes.
_Part: TypeAlias = tuple[int, tuple[int, ...]]


class Origin(NamedTuple):
    """Where a value of the program comes from.

    Attributes:
      path: module path and named scopes.
      source: 'file.py:line (function)'.
      operation: the JAX primitive, or XLA's opcode where JAX named none.
      phase: 'forward', 'backward', 'recomputed' or ''.
    """

    path: str = ""
    source: str = ""
    operation: str = ""
    phase: str = ""


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of the compiled program.

    Attributes:
      computation: id of the computation that it is in.
      called: ids of the computations that it calls.
      number: a parameter's position; which part a get-tuple-element takes.
      name: as the user's program has it: 'jit(step)/jvp(Net)/block0/up/dot_general'.
      frame: number of its stack frame; 0 for none.
    """

    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    number: int
    shape: Message
    name: str
    frame: int


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled module.

    Attributes:
      instructions: by id.
      roots: for each computation's id, the id of its result.
      callers: for each computation's id, the instruction that calls it.
      frames: the table of stack frames.
    """

    instructions: dict[int, Instruction]
    roots: dict[int, int]
    callers: dict[int, int]
    frames: "_Frames"

    @classmethod
    def read(cls, module: Message) -> "Program":
        """From an HloModuleProto."""
        instructions: dict[int, Instruction] = {}
        roots: dict[int, int] = {}
        for computation in wire.messages(module, 3):
            number = wire.integer(computation, 5)
            roots[number] = wire.integer(computation, 6)
            for message in wire.messages(computation, 2):
                made = _instruction(message, number)
                instructions[wire.integer(message, 35)] = made
        callers = {c: i for i, made in instructions.items() for c in made.called}
        return cls(instructions, roots, callers, _Frames(wire.message(module, 17)))

    def origin(self, identity: int, index: tuple[int, ...] = ()) -> Origin:
        """Where a value comes from: the instruction's, or an operand's it passes on.

        Args:
          identity: the instruction's id.
          index: which part of a tuple.
        """
        best = Origin()
        seen: set[_Part] = set()
        while identity in self.instructions and (identity, index) not in seen:
            seen.add((identity, index))
            made = self.instructions[identity]
            if made.name and made.opcode != "dynamic-update-slice":
                best = self._named(made)
            step = self._before(made, index, seen)
            if step is None or (best.path and made.opcode not in _HOLLOW):
                break
            identity, index = step
        return best

    def _before(
        self, made: Instruction, index: tuple[int, ...], seen: set[_Part]
    ) -> _Part | None:
        """The instruction whose value this one holds, and which part of it.

        In a loop that is the body's result, or the initial value of one that the body
        passes on.
        """
        if made.opcode in ("fusion", "call", "async-start") and made.called:
            root = self.roots[made.called[0]]
            is_async = made.opcode == "async-start" and index[:1] == (1,)
            return root, index[1:] if is_async else index
        if made.opcode == "tuple" and index:
            return made.operands[index[0]], index[1:]
        if made.opcode == "get-tuple-element":
            return made.operands[0], (made.number, *index)
        if made.opcode == "parameter" and made.computation in self.callers:
            caller = self.instructions[self.callers[made.computation]]
            if caller.opcode == "while":
                result = (self.roots[made.computation], index)
                is_body = self.instructions[result[0]].opcode == "tuple"
                is_new = is_body and result not in seen
                return result if is_new else (caller.operands[0], index)
            is_plain = caller.opcode in ("fusion", "call", "async-start")
            return (caller.operands[made.number], index) if is_plain else None
        position = _PASSES.get(made.opcode)
        return None if position is None else (made.operands[position], index)

    def _named(self, made: Instruction) -> Origin:
        path, operation, phase = _parsed(made.name)
        return Origin(path, self.frames.source(made.frame), operation, phase)

    def dtype_and_shape(self, identity: int, index: tuple[int, ...]) -> str:
        """A value's type, as 'f32[64,256]'; '' for a tuple or an unknown dtype."""
        shape = self.instructions[identity].shape
        for part in index:
            shape = list(wire.messages(shape, 4))[part]
        dtype = _DTYPES.get(wire.integer(shape, 2), "")
        sizes = ",".join(map(str, wire.integers(shape, 3)))
        return f"{dtype}[{sizes}]" if dtype else ""


def _instruction(message: Message, computation: int) -> Instruction:
    metadata = wire.message(message, 7)
    opcode = wire.text(message, 2)
    is_part = opcode == "get-tuple-element"
    return Instruction(
        opcode=opcode,
        computation=computation,
        operands=tuple(wire.integers(message, 36)),
        called=tuple(wire.integers(message, 38)),
        number=wire.integer(message, 13 if is_part else 9),
        shape=wire.message(message, 3),
        name=wire.text(metadata, 2),
        frame=wire.integer(metadata, 15),
    )


def _parsed(name: str) -> tuple[str, str, str]:
    """The module path, primitive and phase in 'jit(f)/transpose(jvp(Net))/up/mul'."""
    parts = name.split("/")
    phase = ""
    if "jvp(" in name:
        phase = "backward" if "transpose(" in name else "forward"
    if "rematted_computation" in parts:
        phase = "recomputed"
    scopes = [
        re.sub(r"\w+\(|\)", "", part)
        for part in parts[:-1]
        if not part.startswith(("jit(", "pjit("))
    ]
    path = "/".join(scope for scope in scopes if scope and scope not in _STRUCTURE)
    return visible(path), parts[-1], phase


class _Frames:
    """A StackFrameIndexProto: stack frames by number, from 1."""

    def __init__(self, message: Message):
        self.files, self.functions = wire.texts(message, 1), wire.texts(message, 2)
        self.locations = list(wire.messages(message, 3))
        self.frames = list(wire.messages(message, 4))

    def source(self, frame: int) -> str:
        """'file.py:line (function)' of the innermost frame that is the user's.

        Where all are a library's it is the innermost that is not jaxact's.
        """
        innermost = ""
        while 0 < frame <= len(self.frames):
            entry = self.frames[frame - 1]
            location = self.locations[wire.integer(entry, 1) - 1]
            file = self.files[wire.integer(location, 1) - 1]
            if not _is_ours(file):
                function = self.functions[wire.integer(location, 2) - 1]
                line = wire.integer(location, 3)
                source = f"{os.path.basename(file)}:{line} ({function})"
                if not is_in_library(file):
                    return source
                innermost = innermost or source
            parent = wire.integer(entry, 2)
            if parent == frame:
                break
            frame = parent
        return innermost


_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _is_ours(file: str) -> bool:
    return file.startswith(_FOLDER + os.sep) or "jaxact_kernels" in file.split(os.sep)

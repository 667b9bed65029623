"""Optimized HLO, read from its text: `jax.stages.Compiled.as_text` gives it.

A module is a list of computations, a computation one of instructions, one a line:

    %name = type opcode(%operand, ...), attribute=value, ...

A type is `bf16[64,256]{1,0}` or a tuple of such. Each operand comes before its reader.
`jaxact._memory.program` has a `Program` with an `Instruction` too: the same compiled
module, read as a protocol buffer, for lines and buffers that the text does not number.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxact._time.opcodes import ALLOCATE, END, FREE

_HEAD = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|(?:true|false)_computation)"
    r"=(%[^\s,{}]+|\{[^}]*\})"
)
# The memory space of arrays in host memory, as a layout names it.
_HOST = "S(5)"


@dataclass(frozen=True)
class Array:
    """An array that an instruction makes, or one part of the tuple.

    Attributes:
      dtype: as HLO writes it, such as 'bf16'.
    """

    dtype: str
    sizes: tuple[int, ...]
    is_on_host: bool

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def element_bytes(self) -> float:
        """Less than 1 where elements share a byte."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) / 8 if bits else 1.0  # of pred

    @property
    def bytes(self) -> float:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      arrays: that it makes: several for a tuple, none for a token.
      operands: names of instructions in the same computation.
      attributes: the text behind the operands.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(array.bytes for array in self.arrays)

    @property
    def elements(self) -> int:
        """Those of the largest array."""
        return max((array.elements for array in self.arrays), default=0)

    @functools.cached_property
    def op_name(self) -> str:
        """The scopes and the primitive that JAX gave, or ''."""
        return self.find(r'op_name="((?:[^"\\]|\\.)*)"')

    @functools.cached_property
    def target(self) -> str:
        """The function that a custom call names, or ''."""
        return self.find(r'custom_call_target="([^"]*)"')

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, without a loop's condition."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for text in found for name in _OPERAND.findall(text))

    @property
    def launches(self) -> bool:
        """Whether it is a kernel or a copy by itself."""
        is_free = self.opcode in FREE or self.opcode.endswith(END)
        return not is_free and self.target != ALLOCATE

    @property
    def is_async(self) -> bool:
        """Whether it runs beside the kernels that follow, until its other half."""
        return self.opcode.endswith("-start")

    @property
    def trips(self) -> int:
        """How often a loop runs its body, where the compiler knows; else 1."""
        return int(self.find(r'known_trip_count\D*"n":"(\d+)"') or 1)

    def find(self, pattern: str) -> str:
        """The pattern's group in the attributes, or ''."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation: TypeAlias = Mapping[str, Instruction]


@dataclass(frozen=True)
class Program:
    """A compiled module.

    Attributes:
      computations: by name, each with its instructions by name, as scheduled.
      entry: the name of that which starts.
    """

    computations: Mapping[str, Computation]
    entry: str

    def body(self, instruction: Instruction) -> Computation:
        """The computation that a fusion stands for; empty for another instruction."""
        if instruction.opcode not in ("fusion", "fusion-start"):
            return {}
        return self.computations[instruction.called[0]]


def parse(text: str) -> Program:
    """Read a module.

    Raises:
      ValueError: the text has no entry, so it is no HLO.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif parts := _LINE.match(line):
            made = _instruction(parts[2], parts[3], bool(parts[1]))
            current[made.name] = made
    if not entry:
        raise ValueError("no HLO: the text has no line that starts with ENTRY")
    return Program(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    """From `type opcode(operands), attributes`."""
    opcode = _OPCODE.search(text)
    if opcode is None:
        raise ValueError(f"no HLO instruction: %{name} = {text[:80]}")
    end = _closing(text, opcode.end())
    return Instruction(
        name=name,
        opcode=opcode[1],
        arrays=tuple(
            Array(dtype, tuple(int(n) for n in sizes.split(",") if n), _HOST in layout)
            for dtype, sizes, layout in _ARRAY.findall(text[: opcode.start()])
        ),
        operands=tuple(_OPERAND.findall(text[opcode.end() : end])),
        attributes=text[end:],
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` closes."""
    depth = 1
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)

"""When the compiler's arrays live: its own simulation of the heap, read back.

XLA places arrays in memory by simulating the schedule, loops included: an array is
allocated, shares the memory of another one (a loop's results are written over its
carry), is freed. Memory is taken while any array that shares it lives. Field numbers
are those of BufferAssignmentProto and of the messages in it, in xla/service/hlo.proto.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxact._memory import wire
from jaxact._memory.program import Origin, Program
from jaxact._memory.wire import Message

_ALLOCATE, _FREE, _SHARE = range(3)
_HOST = 5  # the memory space of arrays in host memory
# These say where a value is kept, not where it is from.
_EMPTY = frozenset(
    ["", "broadcast", "broadcast_in_dim", "iota", "while", "scan", "parameter"]
)


@dataclass(frozen=True)
class Buffer:
    """Memory that is taken for a while, by one array or several in turn.

    Attributes:
      size: bytes.
      type: as 'f32[64,256]'.
      kind: 'argument', 'donated argument', 'output' or 'temporary'.
    """

    size: int
    type: str
    kind: str
    origin: Origin


@dataclass(frozen=True)
class Heap:
    """The memory of a compiled program, over its instructions.

    Attributes:
      fixed: buffers that are taken all the time: arguments and outputs.
      curve: bytes of the other buffers, each time that one is allocated or shared.
      gradients: bytes among these in backward's arrays with the type that an argument
        and a result have: a weight, and its gradient or what it is updated to.
      residuals: bytes among these in arrays that live across the beginning of
        backward, and are no gradients.
      at_peak: those that are taken when the curve is highest.
      backward_start: where in the curve a backward pass begins; None if there is none.
    """

    fixed: tuple[Buffer, ...]
    curve: tuple[int, ...]
    gradients: tuple[int, ...]
    residuals: tuple[int, ...]
    at_peak: tuple[Buffer, ...]
    backward_start: int | None


@dataclass(frozen=True)
class _Array:
    """A logical buffer: the place in the program that defines it, and its bytes."""

    size: int
    instruction: int
    index: tuple[int, ...]


@dataclass(eq=False)
class _Life:
    """Memory from when it is taken until it is free.

    Attributes:
      start, end: in the curve; at `end` it is free.
      members: the arrays that are in it, in turn or sharing it.
      moments: for each, where in the curve it comes.
    """

    size: int
    start: int
    end: int = 0
    members: list[int] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)


def read_heap(proto: Message) -> Heap:
    """The memory of a compiled program, from its HloProto."""
    program = Program.read(wire.message(proto, 1))
    assignment = wire.message(proto, 3)
    arrays = {
        wire.integer(message, 1): _array(message)
        for message in wire.messages(assignment, 1)
    }
    allocations = list(wire.messages(assignment, 3))
    fixed = [_fixed(a, arrays, program) for a in allocations]
    traces = [
        trace
        for trace in wire.messages(assignment, 4)
        if wire.integer(allocations[wire.integer(trace, 3)], 8) != _HOST
    ]
    simulated = [_simulate(trace, arrays) for trace in traces]
    curve, lives = max(
        simulated, key=lambda each: max(each[0], default=0), default=([], [])
    )
    length = len(curve)
    start = _backward_start(lives, arrays, program, length)
    buffers = {life: _described(life, arrays, program) for life in lives}
    updated = updated_types((b.kind, b.type) for b in fixed if b is not None)
    is_gradient = lambda life: _is_gradient(buffers[life], updated)
    peak = curve.index(max(curve)) if curve else 0
    return Heap(
        fixed=tuple(buffer for buffer in fixed if buffer is not None),
        curve=tuple(curve),
        gradients=_sum([life for life in lives if is_gradient(life)], length),
        residuals=_sum(
            [
                life
                for life in lives
                if start is not None and life.start < start < life.end
                if not is_gradient(life)
            ],
            length,
        ),
        at_peak=tuple(buffers[l] for l in lives if l.start <= peak < l.end),
        backward_start=start,
    )


def _described(life: _Life, arrays: dict[int, _Array], program: Program) -> Buffer:
    members = [arrays[number] for number in life.members]
    return _buffer(life.size, "temporary", members, program)


def updated_types(kinds: Iterable[tuple[str, str]]) -> set[str]:
    """Types that an argument and a result have.

    A batch may have the type that a network's own arrays have, and is no result.

    Args:
      kinds: each array's kind and type.
    """
    pairs = set(kinds)
    given = {type for kind, type in pairs if "argument" in kind}
    return given & {t for kind, t in pairs if kind in ("output", "donated argument")}


def _is_gradient(buffer: Buffer, updated: set[str]) -> bool:
    """Whether backward makes it, with a weight's type."""
    return buffer.origin.phase == "backward" and buffer.type in updated


def _array(message: Message) -> _Array:
    defined = wire.message(message, 3)
    return _Array(
        size=wire.integer(message, 2),
        instruction=wire.integer(defined, 4),
        index=tuple(wire.integers(defined, 3)),
    )


def _fixed(
    allocation: Message, arrays: dict[int, _Array], program: Program
) -> Buffer | None:
    """An argument or an output; None for other allocations."""
    is_argument = wire.integer(allocation, 5)
    is_output = wire.integer(allocation, 7)
    if not (is_argument or is_output) or wire.integer(allocation, 3):
        return None
    kind = "argument" if is_argument else "output"
    if is_argument and is_output:
        kind = "donated argument"
    size = wire.integer(allocation, 2)
    assigned = [wire.integer(part, 1) for part in wire.messages(allocation, 9)]
    same = [number for number in assigned if arrays[number].size == size]
    members = [arrays[number] for number in same or assigned]
    if is_argument:
        members = [m for m in members if _is_argument(m, program)] or members
    return _buffer(size, kind, members, program)


def _is_argument(array: _Array, program: Program) -> bool:
    made = program.instructions[array.instruction]
    return made.opcode == "parameter" and made.computation not in program.callers


def _simulate(
    trace: Message, arrays: dict[int, _Array]
) -> tuple[list[int], list[_Life]]:
    """A simulation's curve, and the lives that it sums up."""
    owner: dict[int, int] = {}  # of the memory that an array is in
    users: dict[int, int] = {}  # by owner, how many arrays in its memory live
    living: dict[int, _Life] = {}  # by owner
    lives: list[_Life] = []
    curve: list[int] = []
    taken = 0
    for event in wire.messages(trace, 1):
        kind, number = wire.integer(event, 1), wire.integer(event, 2)
        if kind == _FREE:
            first = owner[number]
            users[first] -= 1
            if users[first] == 0:
                taken -= arrays[first].size
                living.pop(first).end = len(curve)
            continue
        first = number
        if kind == _SHARE:
            first = owner.get(wire.integer(event, 5), wire.integer(event, 5))
        owner[number] = first
        users[first] = users.get(first, 0) + 1
        if users[first] == 1:
            taken += arrays[first].size
            living[first] = _Life(arrays[first].size, len(curve))
            lives.append(living[first])
        living[first].members.append(number)
        living[first].moments.append(len(curve))
        curve.append(taken)
    for life in living.values():
        life.end = len(curve)
    return curve, lives


def _backward_start(
    lives: list[_Life], arrays: dict[int, _Array], program: Program, length: int
) -> int | None:
    """Where backward begins: fewest arrays are on the wrong side of it.

    XLA computes a constant for backward early, and the loss late.
    """
    forward, backward = [0] * length, [0] * length
    for life in lives:
        for moment, number in zip(life.moments, life.members, strict=True):
            made = program.instructions.get(arrays[number].instruction)
            name = "" if made is None else made.name
            if "transpose(jvp(" in name:
                backward[moment] = 1
            elif "jvp(" in name:
                forward[moment] = 1
    if not any(backward):
        return None
    wrong = sum(forward)
    least, start = wrong, 0
    for moment in range(length):
        if wrong < least:
            least, start = wrong, moment
        wrong += backward[moment] - forward[moment]
    return start


def _sum(lives: list[_Life], length: int) -> tuple[int, ...]:
    """The curve for some lives."""
    changes = [0] * (length + 1)
    for life in lives:
        changes[life.start] += life.size
        changes[life.end] -= life.size
    return tuple(itertools.accumulate(changes[:length]))


def _buffer(size: int, kind: str, members: list[_Array], program: Program) -> Buffer:
    """A buffer, described by the array in it that says most."""
    same = [m for m in members if m.size == size] or members
    described = [(m, program.origin(m.instruction, m.index)) for m in same]
    array, origin = max(
        described,
        key=lambda pair: (
            pair[1].operation not in _EMPTY,
            bool(pair[1].path),
            bool(pair[1].source),
        ),
    )
    return Buffer(
        size=size,
        type=program.dtype_and_shape(array.instruction, array.index),
        kind=kind,
        origin=origin,
    )

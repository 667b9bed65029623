"""When the compiler's arrays live: its own simulation of the heap, read back.

XLA places arrays in memory by simulating the schedule, loops included: an array is
allocated, shares the memory of another one (a loop's results are written over its
carry), is freed. Memory is taken while any array that shares it lives. Field numbers
are those of BufferAssignmentProto and of the messages in it, in xla/service/hlo.proto.
"""

from dataclasses import dataclass

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
      at_peak: those that are taken when the curve is highest.
      backward_start: where in the curve the first array of a backward pass is; None
        if there is none.
    """

    fixed: tuple[Buffer, ...]
    curve: tuple[int, ...]
    at_peak: tuple[Buffer, ...]
    backward_start: int | None


@dataclass(frozen=True)
class _Array:
    """A logical buffer: the place in the program that defines it, and its bytes."""

    size: int
    instruction: int
    index: tuple[int, ...]


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
    found = [_simulate(trace, arrays, program) for trace in traces]
    curve, at_peak, start = max(
        found, key=lambda each: max(each[0], default=0), default=([], [], None)
    )
    return Heap(
        fixed=tuple(buffer for buffer in fixed if buffer is not None),
        curve=tuple(curve),
        at_peak=tuple(at_peak),
        backward_start=start,
    )


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
    trace: Message, arrays: dict[int, _Array], program: Program
) -> tuple[list[int], list[Buffer], int | None]:
    """The curve of a simulation, the buffers at its peak, where backward begins."""
    owner: dict[int, int] = {}  # of the memory that an array is in
    users: dict[int, int] = {}  # by owner, the arrays in its memory that live
    members: dict[int, list[int]] = {}  # by owner, all arrays so far
    curve: list[int] = []
    taken = peak = 0
    at_peak: list[int] = []
    start = None
    for event in wire.messages(trace, 1):
        kind, number = wire.integer(event, 1), wire.integer(event, 2)
        if kind == _FREE:
            users[owner[number]] -= 1
            if users[owner[number]] == 0:
                taken -= arrays[owner[number]].size
            continue
        first = number
        if kind == _SHARE:
            first = owner.get(wire.integer(event, 5), wire.integer(event, 5))
        owner[number] = first
        members.setdefault(first, []).append(number)
        users[first] = users.get(first, 0) + 1
        if users[first] == 1:
            taken += arrays[first].size
        curve.append(taken)
        if taken > peak:
            peak = taken
            at_peak = [each for each, count in users.items() if count]
        if start is None and _is_backward(arrays[number], program):
            start = len(curve) - 1
    buffers = [
        _buffer(
            arrays[each].size,
            "temporary",
            [arrays[member] for member in members[each]],
            program,
        )
        for each in at_peak
    ]
    return curve, buffers, start


def _is_backward(array: _Array, program: Program) -> bool:
    made = program.instructions.get(array.instruction)
    return made is not None and "transpose(jvp(" in made.name


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

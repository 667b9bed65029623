"""The bytes that a kernel moves between the chip and memory.

Each operand is read once and each result written once, whatever a cache keeps. Of an
operand that a fusion only slices, the slice is read; of a result that it updates in
place, the update is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxact._time.hlo import Computation, Instruction
from jaxact._time.needed import needed_elements
from jaxact._time.opcodes import SLICES


@dataclass(frozen=True)
class Traffic:
    """Bytes of one run of a kernel.

    Attributes:
      host: those among the others that cross the link to host memory.
    """

    read: float
    written: float
    host: float = 0.0


def traffic(kernel: Instruction, around: Computation, body: Computation) -> Traffic:
    """The bytes of a kernel.

    Args:
      around: the computation that the kernel is in.
      body: that which it stands for, if it is a fusion.
    """
    operands = [around[name] for name in kernel.operands]
    if body:
        read, written = _read(body), _written(body)
    else:
        read, written = _unfused(kernel, operands)
    arrays = [a for made in (kernel, *operands) for a in made.arrays]
    on_host = any(a.is_on_host for a in arrays)
    # Of the two sides of a copy one is on the host.
    return Traffic(read, written, max(read, written) if on_host else 0.0)


def _unfused(
    kernel: Instruction, operands: Sequence[Instruction]
) -> tuple[float, float]:
    if kernel.opcode in SLICES:
        return kernel.bytes, kernel.bytes
    if kernel.opcode == "dynamic-update-slice":
        return operands[1].bytes, operands[1].bytes
    if kernel.opcode == "copy-start":  # a tuple of both sides
        return operands[0].bytes, operands[0].bytes
    return sum(made.bytes for made in operands), kernel.bytes


def _read(body: Computation) -> float:
    """Bytes of a fusion's parameters, as far as its results need them."""
    needed = needed_elements(body)
    return sum(
        needed[made.name] * array.element_bytes
        for made in body.values()
        if made.opcode == "parameter"
        for array in made.arrays
    )


def _written(body: Computation) -> float:
    (root,) = [made for made in body.values() if made.is_root]
    names = dict.fromkeys(root.operands) if root.opcode == "tuple" else [root.name]
    return sum(_stored(body[name], body) for name in names)


def _stored(made: Instruction, body: Computation) -> float:
    """Bytes written for one result of a fusion."""
    viewed = made
    while viewed.opcode in ("bitcast", "reshape"):
        viewed = body[viewed.operands[0]]
    if viewed.opcode == "dynamic-update-slice":
        return body[viewed.operands[1]].bytes
    if viewed.opcode == "scatter":
        return 2 * body[viewed.operands[-1]].bytes  # added to those that are there
    return made.bytes

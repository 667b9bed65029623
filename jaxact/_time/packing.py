"""The arithmetic of jaxact's own kernels, which a compiled program shows as calls."""

from jaxact._time.cause import DECODE, SCOPE
from jaxact._time.hlo import Computation, Instruction
from jaxact._time.work import Slots

# Instructions an element that run where integers do, for at most 2 bits and for more:
# in machine code for an H100 (kernels/benchmarks/count.py). The encoder for `Adaptive`,
# a rotated format too, has up to 1.6 times as many.
_INTEGERS = {
    ("affine", "encode"): (9.4, 9.6),
    ("affine", "decode"): (3.6, 3.4),
    ("rotated", "encode"): (19.1, 39.6),
    ("rotated", "decode"): (12.5, 17.1),
}


def packing_slots(kernel: Instruction, around: Computation) -> Slots:
    """Operations by which a kernel packs or unpacks numbers; none for another."""
    scope = SCOPE.search(kernel.op_name)
    if scope is None or not kernel.target:
        return Slots()
    counts = _INTEGERS.get((scope[1], scope[2]))
    if counts is None:
        return Slots()
    numbers, words = around[kernel.operands[0]].arrays[0], kernel.arrays[0]
    if scope[2] == DECODE:
        numbers, words = words, numbers
    is_wide = 8 * words.bytes > 3 * numbers.elements
    return Slots(integers=counts[is_wide] * numbers.elements)

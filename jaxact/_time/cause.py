"""The cause of a kernel: what of a step it is there for, read off operations' names.

Kernels that encode and decode are named in the compiled program after their format, as
'jaxact.affine.encode', and parts of them 'extremes' and 'metadata'. A kernel is for its
largest result. So a decode that XLA fuses into its reader belongs to the reader.
"""

import re

from jaxact._time.hlo import Computation, Instruction
from jaxact._time.opcodes import MOVES

PRODUCTS = "products"
ENCODE, DECODE = "encode", "decode"
EXTREMES, METADATA = "extremes", "metadata"
MASKS, COPIES, OTHER = "masks", "copies", "other"
CAUSES = (PRODUCTS, ENCODE, EXTREMES, METADATA, DECODE, MASKS, COPIES, OTHER)

# A format, and its operation.
SCOPE = re.compile(r"jaxact\.(\w+)\.(encode|decode)")
# One bit for a comparison, a few for a position: no format for numbers.
_MASK_FORMATS = frozenset(["mask", "index"])
# They change how a value is written, not what computes it.
_PASSING = MOVES | {"convert"}


def cause_of(kernel: Instruction, body: Computation, has_products: bool) -> str:
    """One of `CAUSES`.

    Args:
      body: the computation that the kernel stands for, if it is a fusion.
      has_products: whether it computes a matrix product or a convolution.
    """
    if has_products:
        return PRODUCTS
    # Single elements are computed to say which ones to copy.
    working = [
        made
        for made in body.values() or [kernel]
        if made.elements > 1 or made.opcode == "reduce"
    ]
    if all(made.opcode in MOVES for made in working):
        return COPIES
    # A fusion may have a name where its operations have none.
    name = (_source(body).op_name if body else "") or kernel.op_name
    scope = SCOPE.search(name)
    if scope is None:
        return OTHER
    if scope[1] in _MASK_FORMATS:
        return MASKS
    inside = name[scope.end() :].split("/")
    for part in (EXTREMES, METADATA):
        if part in inside:
            return part
    return scope[2]


def _source(body: Computation) -> Instruction:
    """The instruction that computes a fusion's largest result."""
    (made,) = [each for each in body.values() if each.is_root]
    if made.opcode == "tuple":
        made = max((body[name] for name in made.operands), key=lambda each: each.bytes)
    while made.opcode in _PASSING and made.operands:
        # Of an update in place the update.
        position = 1 if made.opcode == "dynamic-update-slice" else 0
        made = body[made.operands[position]]
    return made

"""The elements that a fusion computes: those that its results need, and no others."""

import collections
from collections.abc import Mapping

from jaxact._time.hlo import Computation, Instruction
from jaxact._time.opcodes import SLICES


def needed_elements(body: Computation) -> Mapping[str, int]:
    """How many elements of each value in a fusion its results need.

    Slices of one value count as different elements, all other readers as readers of
    the same.
    """
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    needed: dict[str, int] = {}
    for made in reversed(list(body.values())):
        slices = others = 0
        for user in users[made.name]:
            if user.operands[0] != made.name:
                others = max(others, _by(user, made, needed))
            elif user.opcode in SLICES:
                slices += needed[user.name]
            elif user.opcode != "dynamic-update-slice":  # which is in place
                others = max(others, _by(user, made, needed))
        total = made.elements if made.is_root else slices + others
        needed[made.name] = min(total, made.elements)
        for name in dict.fromkeys(made.operands):
            users[name].append(made)
    return needed


def _by(user: Instruction, made: Instruction, needed: Mapping[str, int]) -> int:
    """The elements that one reader needs."""
    if user.elements == made.elements:  # elementwise, or in other places
        return needed[user.name]
    if user.opcode == "reduce" and user.operands[0] == made.name:
        return needed[user.name] * made.elements // user.elements
    return made.elements

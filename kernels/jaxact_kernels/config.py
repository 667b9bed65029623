"""Block sizes: how many groups a program takes, and how many threads."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """A kernel's block size.

    Attributes:
        groups: in a block; a power of two.
        num_warps: warps, 32 threads each, that work on a block; a power of two.
    """

    groups: int = 32
    num_warps: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1 or value & (value - 1):
                raise ValueError(
                    f"got {field.name}={value!r}; it is a positive power of two, as "
                    f"Triton's arrays are; pass for example {field.default}"
                )


def heuristic(group: int, item_bytes: int) -> Config:
    """Choose a block for groups with `group` elements, each `item_bytes` bytes.

    Each thread in four warps then holds 128 bytes: 16 at a time are the widest load,
    eight loads in flight hide the memory's latency, and together with the program's
    other values they fit 96 registers, so that five programs share a multiprocessor.
    """
    num_warps = 4
    groups = num_warps * 32 * 128 // (group * item_bytes)
    return Config(max(1, 1 << max(groups, 1).bit_length() - 1), num_warps)

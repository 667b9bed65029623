"""The arithmetic of a kernel: matrix products, and all other operations.

A matrix product counts as if a good library ran it: the compiler's own choice, made
with no device to time it on, is no guide to the one that will run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxact._time.hlo import Computation, Instruction, Program
from jaxact._time.needed import needed_elements
from jaxact._time.opcodes import FLOATS, LOOKUPS, MOVES

# Dtypes of HLO by the names that `Gpu.peak_flops` has.
_DTYPES = {
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"},
    **{"s8": "int8", "f8e4m3fn": "float8", "f8e5m2": "float8"},
}
# The dtype of products that no tensor core takes: float32 in full precision.
LANES = "lanes"


@dataclass(frozen=True)
class Slots:
    """Operations outside tensor cores, by the units that take them.

    Attributes:
      floats: float additions and multiplications.
      integers: operations on integers, comparisons, selections, conversions.
      lookups: of functions such as exp.
    """

    floats: float = 0.0
    integers: float = 0.0
    lookups: float = 0.0

    def __add__(self, other: "Slots") -> "Slots":
        return Slots(
            self.floats + other.floats,
            self.integers + other.integers,
            self.lookups + other.lookups,
        )

    def times(self, count: float) -> "Slots":
        return Slots(self.floats * count, self.integers * count, self.lookups * count)


def products(
    kernel: Instruction, around: Computation, body: Computation
) -> Mapping[str, float]:
    """Operations of a kernel's matrix products and convolutions, by dtype."""
    found: dict[str, float] = {}
    for made, names in [(kernel, around), *((made, body) for made in body.values())]:
        flops = _product_flops(made, names)
        if flops:
            dtype = _DTYPES.get(names[made.operands[0]].arrays[0].dtype, LANES)
            is_full = made.find(r"operand_precision=\{(highest)") and dtype == "float32"
            dtype = LANES if is_full else dtype
            found[dtype] = found.get(dtype, 0.0) + flops
    return found


def _product_flops(made: Instruction, names: Computation) -> float:
    if made.opcode == "dot" or made.target.startswith("__cublas"):
        axes = made.find(r"lhs_contracting_dim(?:ension)?s\D*([\d\", ]*)")
        left = names[made.operands[0]].arrays[0].sizes
        depth = math.prod(left[int(a)] for a in axes.replace('"', "").split(",") if a)
        return 2.0 * math.prod(made.arrays[0].sizes) * depth
    labels = made.find(r"dim_labels=(\S+?)->")
    return _convolution_flops(made, names, labels) if labels else 0.0


def _convolution_flops(made: Instruction, names: Computation, labels: str) -> float:
    """Of a convolution, or a library's gradient of one, which is as much work.

    A library's call has the dimensions of the forward convolution: its result is the
    first operand of the gradient for the input, its filter the result of that for the
    filter.
    """
    first, second = (names[name].arrays[0].sizes for name in made.operands[:2])
    out, filters = made.arrays[0].sizes, second
    if made.target.endswith("BackwardInput"):
        out = first
    elif made.target.endswith("BackwardFilter"):
        out, filters = second, made.arrays[0].sizes
    features = filters[labels.split("_")[1].index("o")]
    zeros = math.prod(int(n) for n in made.find(r"lhs_dilate=([\dx]+)").split("x") if n)
    return 2.0 * math.prod(out) * math.prod(filters) / features / zeros


def slots(body: Computation, program: Program) -> Slots:
    """The other operations of a fusion."""
    total, needed = Slots(), needed_elements(body)
    for made in body.values():
        if made.opcode in ("reduce", "reduce-window", "scatter"):
            joined = program.computations[made.called[0]]
            one = _sum([_slots_of(each) for each in joined.values()])
            total += one.times(needed[made.operands[0]])
        elif made.opcode not in ("dot", "convolution"):
            total += _slots_of(made).times(needed[made.name])
    return total


def _sum(parts: list[Slots]) -> Slots:
    return sum(parts, start=Slots())


def _slots_of(made: Instruction) -> Slots:
    """For one element."""
    if made.opcode in MOVES or not made.arrays:
        return Slots()
    is_float = made.arrays[0].dtype.startswith(("f", "bf"))
    if is_float and made.opcode in LOOKUPS:
        return Slots(floats=2.0, lookups=LOOKUPS[made.opcode])
    # An integer product is a multiply-add of the float units at half their rate.
    if made.opcode == "multiply" and not is_float:
        return Slots(floats=2.0)
    is_sum = is_float and made.opcode in FLOATS
    return Slots(floats=1.0) if is_sum else Slots(integers=1.0)

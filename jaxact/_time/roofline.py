"""The time that the kernels of a compiled program are predicted to take.

A kernel takes the longest of its bytes by the memory's bandwidth, its matrix products
by the tensor cores' rate and its other operations by their units' rate (the roofline of
Williams, Waterman and Patterson 2009, doi.org/10.1145/1498765.1498785), and a launch.
Where it sums columns, bytes and operations take their times in turn. Kernels run one
after another; asynchronous copies run beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxact._memory.targets import Gpu
from jaxact._saved import Saved
from jaxact._time.cause import cause_of
from jaxact._time.columns import column_blocks
from jaxact._time.hlo import Instruction, Program
from jaxact._time.opcodes import CALLS
from jaxact._time.packing import packing_slots
from jaxact._time.traffic import Traffic, traffic
from jaxact._time.work import Slots, products, slots

# Fractions of peaks that large kernels reach. An H100 copies 3.0 of 3.35 TB/s; its
# clock falls under the load of matrix products, of which cuBLAS computes 650 of 989
# TFLOP/s in bfloat16; 1.755 of 1.98 GHz is its boost clock under power. Assumed of all
# targets: ratios of times on one hardly depend on them.
_MEMORY_REACHED = 0.9
_PRODUCTS_REACHED = 0.66
_CLOCK_REACHED = 0.89
_LINK_REACHED = 0.8  # of PCIe, whose packets have headers
# Seconds between the ends of two short kernels in one stream.
LAUNCH_SECONDS = 2e-6
# Lanes for looked-up functions, as a part of those for integers: 16 of 64.
_LOOKUP_LANES = 0.25
# Bytes that a multiprocessor receives or sends in a clock, which limits kernels that
# keep few of them busy.
_CORE_BYTES = 64

MEMORY, PRODUCTS, ARITHMETIC = "memory", "products", "arithmetic"
LAUNCH, LINK = "launch", "host link"


@dataclass(frozen=True)
class Kernel(Saved):
    """A kernel of a compiled program; numbers are those of one of its runs.

    Attributes:
      name: in the optimized HLO.
      operation: the scopes and the JAX primitive, where the compiler kept them.
      cause: its purpose, see `PredictedTime`.
      runs: how often it is launched; more than once in loops.
      read_bytes, written_bytes: moved between chip and memory.
      flops: of its matrix products and convolutions.
      seconds: with its launch.
      bound: the longest part: 'memory', 'products', 'arithmetic', 'launch' or 'host
        link'.
      is_beside: whether it is a copy that runs beside other kernels.
    """

    name: str
    operation: str
    cause: str
    runs: int
    read_bytes: float
    written_bytes: float
    flops: float
    seconds: float
    bound: str
    is_beside: bool

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes


def timed_kernels(program: Program, gpu: Gpu) -> tuple[Kernel, ...]:
    """The kernels of a program, as scheduled; a loop's body once."""
    return tuple(_walk(program, program.entry, 1, gpu))


def _walk(program: Program, name: str, runs: int, gpu: Gpu) -> Iterator[Kernel]:
    for made in program.computations[name].values():
        if made.opcode == "conditional":  # the branch that takes longest
            branches = [list(_walk(program, c, runs, gpu)) for c in made.called]
            yield from max(branches, key=total_seconds, default=[])
        elif made.opcode in CALLS:
            for called in made.called:
                yield from _walk(program, called, runs * made.trips, gpu)
        elif made.launches:
            yield _kernel(program, name, made, runs, gpu)


def total_seconds(rows: Sequence[Kernel]) -> float:
    """Of all runs, one after another."""
    return sum(row.seconds * row.runs for row in rows)


def _kernel(
    program: Program, name: str, made: Instruction, runs: int, gpu: Gpu
) -> Kernel:
    around, body = program.computations[name], program.body(made)
    moved, flops = traffic(made, around, body), products(made, around, body)
    work = Slots() if flops else slots(body, program) + packing_slots(made, around)
    blocks = None if flops else column_blocks(made, body)
    used = 1.0 if blocks is None else min(1.0, blocks / gpu.cores)
    arithmetic = _arithmetic_seconds(work, gpu, in_turn=blocks is not None)
    parts = {
        MEMORY: _memory_seconds(moved, used, gpu),
        LINK: moved.host / (_LINK_REACHED * gpu.host_bytes_per_second),
        PRODUCTS: product_seconds(flops, gpu),
        ARITHMETIC: arithmetic / used,
    }
    longest = max(parts, key=parts.__getitem__)
    in_turn = [longest] if blocks is None else [MEMORY, ARITHMETIC]
    seconds = sum(parts[part] for part in in_turn)
    return Kernel(
        name=made.name,
        operation=made.op_name,
        cause=cause_of(made, body, bool(flops)),
        runs=runs,
        read_bytes=moved.read,
        written_bytes=moved.written,
        flops=sum(flops.values()),
        seconds=seconds + LAUNCH_SECONDS,
        bound=longest if seconds > LAUNCH_SECONDS else LAUNCH,
        is_beside=made.is_async and moved.host > 0,
    )


def product_seconds(flops: Mapping[str, float], gpu: Gpu) -> float:
    """Seconds for matrix products, given their operations by dtype."""
    rates = gpu.peak_flops
    return sum(
        count / (_PRODUCTS_REACHED * rates[dtype])
        if dtype in rates
        else count / (_CLOCK_REACHED * gpu.alu_flops)
        for dtype, count in flops.items()
    )


def _memory_seconds(moved: Traffic, used: float, gpu: Gpu) -> float:
    """Where this part of the multiprocessors is busy."""
    through_cores = _CORE_BYTES * _CLOCK_REACHED * gpu.clocks * used
    rate = min(_MEMORY_REACHED * gpu.bytes_per_second, through_cores)
    return (moved.read + moved.written) / rate


def _arithmetic_seconds(work: Slots, gpu: Gpu, *, in_turn: bool) -> float:
    """The units work side by side; one instruction at a time is issued to any.

    `in_turn`: they wait for one another, as where columns are summed, see `columns.py`.
    On an H200 the 585 such kernels in steps of ResNet-50 and GPT-2 small took 10.6 ms;
    these times are 11.0 ms, and by bytes alone 6.0 ms.
    """
    lookups = work.lookups / _LOOKUP_LANES
    if in_turn:
        operations = work.floats + work.integers + lookups
    else:
        floats = gpu.alu_flops / 2  # a multiply-add is one instruction
        operations = max(
            work.integers, lookups, work.floats * gpu.integer_operations / floats
        )
    return operations / (_CLOCK_REACHED * gpu.integer_operations)

"""The time predicted for a step on a GPU, also on one that is not attached."""

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled

from jaxact._memory.compiling import compile_step
from jaxact._memory.memory import Memory, measure
from jaxact._memory.targets import TARGETS, Gpu, gpu_of
from jaxact._saved import Saved
from jaxact._tabular import Column, Tabular, bytes_text
from jaxact._time.cause import CAUSES
from jaxact._time.hlo import parse
from jaxact._time.roofline import (
    LAUNCH,
    LAUNCH_SECONDS,
    Kernel,
    timed_kernels,
    total_seconds,
)
from jaxact._written_as import written_as


@dataclass(frozen=True)
class CauseTime(Saved):
    """The kernels that a step has for one cause; see `PredictedTime.by_cause`.

    Attributes:
      kernels: launched.
      bytes: moved between the chip and its memory.
      flops: of matrix products and convolutions.
      seconds: all of them.
      bound: that most of the seconds are spent under.
    """

    cause: str
    kernels: int
    bytes: float
    flops: float
    seconds: float
    bound: str


@dataclass(frozen=True)
class PredictedTime(Tabular):
    """A prediction of a compiled step's time: `print` it, or show it in a notebook.

    Attributes:
      rows: kernels in the order that they are scheduled in, a loop's once.
      memory: of the same program, as `jaxact.memory` gives it.
    """

    derived = ("seconds", "kernels", "bytes", "flops", "bound")
    rows: tuple[Kernel, ...]
    memory: Memory

    @property
    def seconds(self) -> float:
        """Those of all kernels, or of the copies beside them if those take longer."""
        return max(total_seconds(self._in_turn), total_seconds(self._beside))

    @property
    def kernels(self) -> int:
        """How many are launched."""
        return sum(row.runs for row in self.rows)

    @property
    def bytes(self) -> float:
        """Moved between the chip and its memory."""
        return sum(row.bytes * row.runs for row in self.rows)

    @property
    def flops(self) -> float:
        """Additions and multiplications in matrix products and convolutions."""
        return sum(row.flops * row.runs for row in self.rows)

    @property
    def bound(self) -> str:
        """That most of the time is spent under.

        'memory', 'products' (tensor cores), 'arithmetic' (all other units), 'launch'
        or 'host link'.
        """
        if total_seconds(self._beside) > total_seconds(self._in_turn):
            return _bound(self._beside)
        return _bound(self._in_turn)

    @property
    def by_cause(self) -> Mapping[str, CauseTime]:
        """The kernels by the cause that they are there for; every cause has an entry.

        'products' (and convolutions), 'encode', 'extremes' (of groups, before they are
        encoded), 'metadata', 'decode', 'masks' (packed or unpacked), 'copies' (slices,
        transpositions, stacks of a scan, zeros) and 'other'. A kernel is for its
        largest result: a decode that the compiler makes one kernel with its reader is
        the reader's.
        """
        groups: dict[str, list[Kernel]] = {cause: [] for cause in CAUSES}
        for row in self.rows:
            groups[row.cause].append(row)
        return {cause: _cause_time(cause, rows) for cause, rows in groups.items()}

    def summary(self) -> str:
        """The totals, and their meaning."""
        return (
            f"{_milliseconds(self.seconds)} predicted on {self.memory.device}, mostly "
            f"{self.bound}: {self.kernels} kernels, {bytes_text(self.bytes)} moved, "
            f"{_teraflops(self.flops)} TFLOP\nfrom the compiled program, no "
            "measurement"
        )

    def _table(self) -> tuple[list[Column[Kernel]], tuple[Kernel, ...]]:
        return _COLUMNS, self.rows

    def _brief(self) -> tuple[list[Column[CauseTime]], list[CauseTime]]:
        rows = [row for row in self.by_cause.values() if row.kernels]
        return _BRIEF, sorted(rows, key=lambda row: -row.seconds)

    @property
    def _in_turn(self) -> list[Kernel]:
        return [row for row in self.rows if not row.is_beside]

    @property
    def _beside(self) -> list[Kernel]:
        return [row for row in self.rows if row.is_beside]


def _cause_time(cause: str, rows: Sequence[Kernel]) -> CauseTime:
    return CauseTime(
        cause=cause,
        kernels=sum(row.runs for row in rows),
        bytes=sum(row.bytes * row.runs for row in rows),
        flops=sum(row.flops * row.runs for row in rows),
        seconds=total_seconds(rows),
        bound=_bound(rows),
    )


def _bound(rows: Sequence[Kernel]) -> str:
    """That most of the kernels' time is spent under; '' without kernels."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for row in rows:
        seconds[LAUNCH] += row.runs * LAUNCH_SECONDS
        seconds[row.bound] += row.runs * (row.seconds - LAUNCH_SECONDS)
    return max(seconds, key=seconds.__getitem__, default="")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _teraflops(flops: float) -> str:
    return f"{flops / 1e12:.3g}"


_BRIEF: list[Column[CauseTime]] = [
    Column("cause", lambda row: row.cause),
    Column("kernels", lambda row: str(row.kernels), is_number=True),
    Column("bytes", lambda row: bytes_text(row.bytes), is_number=True),
    Column(
        "TFLOP",
        lambda row: _teraflops(row.flops) if row.flops else "",
        is_number=True,
    ),
    Column("time", lambda row: _milliseconds(row.seconds), is_number=True),
    Column("bound", lambda row: row.bound),
]
_COLUMNS: list[Column[Kernel]] = [
    Column("kernel", lambda row: row.name),
    Column("cause", lambda row: row.cause),
    Column("runs", lambda row: str(row.runs), is_number=True),
    Column("read", lambda row: bytes_text(row.read_bytes), is_number=True),
    Column("written", lambda row: bytes_text(row.written_bytes), is_number=True),
    Column("time", lambda row: _milliseconds(row.seconds), is_number=True),
    Column("bound", lambda row: row.bound),
    Column("operation", lambda row: row.operation),
]


@written_as("predicted_time(step, params, batch, target='h100')")
def predicted_time(
    step: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> PredictedTime:
    """Compile `step` for a GPU and predict the time that its program takes there.

    No measurement. Each kernel of the compiled program takes the longest of its bytes
    by the memory's bandwidth, its matrix products by the tensor cores' rate and its
    other operations by their units' rate, as large kernels reach them, and a launch
    (Williams, Waterman and Patterson 2009, the roofline). Where XLA sums columns, as
    for a bias or a batch norm, bytes and operations take their times in turn. Other
    kernels reach less, and autotuning on a device chooses other ones; nothing is found
    in a cache. So compare two steps by it: errors that both have cancel in the ratio.

    A kernel in another language, such as one by Pallas, counts by its bytes alone, as
    its arithmetic is not known, but for jaxact's own.
    Loops count as often as the compiler knows that they run, else once; of a `cond` the
    slowest branch. Matrix products count as if a good library ran them.

    Args:
      step: a function; if it is jitted its static and donated arguments count.
      *args: its arguments, as for `memory`.
      target: the GPU to compile for, as for `memory`; `None` is the local one.
      **kwargs: its keyword arguments.

    Raises:
      ValueError: no target where the local backend is no GPU, or one whose peak rates
        are not known; an unknown target.
      ImportError: as `memory`.
      NotImplementedError: as `memory`.

    Example::

      small = jaxact.predicted_time(step, state, batch, target="h100")
      small.seconds / jaxact.predicted_time(plain, state, batch, target="h100").seconds
    """
    gpu = gpu_for(target)
    if gpu is None:
        raise ValueError(_unknown())
    return predict(compile_step(step, args, kwargs, target), gpu)


def predict(compiled: Compiled, gpu: Gpu) -> PredictedTime:
    """The same for a step that is compiled already, for that GPU."""
    rows = timed_kernels(parse(compiled.as_text() or ""), gpu)
    return PredictedTime(rows, measure(compiled))


def gpu_for(target: str | None) -> Gpu | None:
    """The GPU that a target names; for None the local one, if its rates are known."""
    if target is not None:
        return gpu_of(target)
    kind = jax.local_devices()[0].device_kind
    return next((gpu for gpu in TARGETS.values() if gpu.name == kind), None)


def _unknown() -> str:
    kind = jax.local_devices()[0].device_kind
    return (
        f"jaxact.predicted_time: the local backend is {kind}, whose peak rates are not "
        "known. Name a GPU, which need not be there: predicted_time(..., "
        f"target='h100'), or one of {', '.join(sorted(TARGETS))}."
    )

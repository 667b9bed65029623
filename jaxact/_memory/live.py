"""The arrays that live when a compiled step takes most memory."""

import glob
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.stages import Compiled, Traced

from jaxact._codec.checks import checked_int
from jaxact._memory import wire
from jaxact._memory.buffers import Buffer, Heap, read_heap
from jaxact._memory.chart import chart, line_of, plot_parts
from jaxact._memory.compiling import trace_and_compile
from jaxact._memory.memory import Memory, measure
from jaxact._memory.size import Limited, checked_of, parsed
from jaxact._pyplot import new_axis
from jaxact._saved import Saved
from jaxact._tabular import SMALL_SHARE, Column, Tabular, bytes_text
from jaxact._written_as import written_as

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class LiveArray(Saved):
    """Memory that is taken at the peak of a compiled step.

    Attributes:
      bytes: its size.
      type: dtype and shape, as 'f32[64,256]'.
      kind: 'temporary', 'output', 'argument' or 'donated argument', which a result is
        written over.
      phase: 'forward', 'backward', 'recomputed' (by a `jax.checkpoint`) or ''.
      path: module path and named scopes; an argument's name.
      operation: the JAX primitive that computed it.
      source: 'file.py:line (function)'.
    """

    bytes: int
    type: str
    kind: str
    phase: str
    path: str
    operation: str
    source: str

    @property
    def place(self) -> str:
        """Its path and operation, '' without either."""
        return "/".join(part for part in (self.path, self.operation) if part)


@dataclass(frozen=True)
class Live(Tabular):
    """The arrays alive at a compiled step's peak, and the bytes over the step.

    Bytes are those of the arrays; what the compiler reserves, `memory`, is a little
    more where it cannot pack them without gaps.

    Attributes:
      rows: the largest first.
      curve: bytes in use each time that the step computes an array, first to last:
        arguments and outputs, which are reserved all the time, and temporaries.
      backward_start: index in `curve` where a backward pass begins; None if there is
        none.
      memory: the bytes that the compiler reserves.
      residual_curve: the part that are temporaries which live across the beginning
        of backward, and no gradients.
      gradient_curve: the part that are backward's temporaries with the type that an
        argument and a result have.
    """

    derived = ("peak_bytes", "fixed_bytes")
    rows: tuple[LiveArray, ...]
    curve: tuple[int, ...]
    backward_start: int | None
    memory: Memory
    residual_curve: tuple[int, ...]
    gradient_curve: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at once."""
        return max(self.curve)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments and results, which are in use all the time."""
        return sum(row.bytes for row in self.rows if row.kind != "temporary")

    def bytes_of(self, kind: str) -> int:
        """Bytes of the arrays of one kind at the peak, such as 'temporary'."""
        return sum(row.bytes for row in self.rows if row.kind == kind)

    def summary(self) -> str:
        """The peak by kind, and the bytes reserved."""
        kinds = dict.fromkeys(row.kind for row in self.rows)
        parts = [f"{bytes_text(self.bytes_of(kind))} {kind}" for kind in kinds]
        return (
            f"{bytes_text(self.peak_bytes)} live at the peak ({', '.join(parts)}); "
            f"{bytes_text(self.memory.peak_bytes)} reserved on {self.memory.device}"
        )

    def _table(self) -> tuple[list[Column[LiveArray]], tuple[LiveArray, ...]]:
        return _COLUMNS, self.rows

    def _brief(self) -> tuple[list[Column["_Group"]], list["_Group"]]:
        groups: dict[tuple[str, ...], list[LiveArray]] = {}
        for row in self.rows:
            key = (row.kind, row.type, row.phase, _place(row), row.source)
            is_fixed = row.kind != "temporary"
            groups.setdefault(key[:1] if is_fixed else key, []).append(row)
        least = SMALL_SHARE * self.peak_bytes
        sizes = {key: sum(r.bytes for r in rows) for key, rows in groups.items()}
        large = [_group(rows) for key, rows in groups.items() if sizes[key] >= least]
        small = [size for size in sizes.values() if size < least]
        large.sort(key=lambda group: -group.size)
        if small:
            large.append(_Group(sum(small), "", "", "smaller ones", ""))
        return _BRIEF, large

    def chart(
        self,
        budget: str | int | None = None,
        *,
        of: Limited = "temp",
        top: str | int | None = None,
        width: int = 64,
        height: int = 12,
    ) -> str:
        """The bytes in use over the step as text, stacked by part.

        From the bottom: arguments and results; residuals; gradients; other temporaries.
        A column shows the fullest moment in its share of the step.

        Args:
          budget: bytes or '12GiB', drawn as a line, such as `Plan.budget`.
          of: the memory that it limits, as `Plan.of`. A budget for temporaries is drawn
            above arguments and results, which it does not limit.
          top: bytes that the chart is high, so that two compare; None: the most that it
            shows.
          width, height: in characters, without the labels.

        Raises:
          TypeError, ValueError: an argument is no size, memory or number.

        Example:
          >>> import jax, jax.numpy as jnp, jaxact
          >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
          >>> found = jaxact.live(lambda x: (x @ x) @ x, x)
          >>> print(found.chart(height=3).splitlines()[0].split()[:2])
          ['12', 'MiB']
        """
        return chart(
            self,
            _bytes(budget, "Live.chart(budget"),
            checked_of("Live.chart", of),
            _bytes(top, "Live.chart(top"),
            _checked_length("width", width),
            _checked_length("height", height),
        )

    def plot(
        self,
        axis: "Axes | None" = None,
        label: str | None = None,
        *,
        budget: str | int | None = None,
        of: Limited = "temp",
    ) -> "Axes":
        """The bytes in use over the step, the peak, and where backward begins.

        Args:
          axis: to draw on, so that several steps compare; a new one when None.
          label: for a legend; without one the parts are stacked as in `chart`, and the
            largest arrays at the peak are named.
          budget, of: as in `chart`.

        Raises:
          ImportError: matplotlib is missing.
          TypeError, ValueError: `budget` is no size, or `of` no memory.
        """
        limit, of = _bytes(budget, "Live.plot(budget"), checked_of("Live.plot", of)
        if axis is None:
            axis = new_axis("Live.plot", 8, 4)
        positions = [i / max(1, len(self.curve) - 1) for i in range(len(self.curve))]
        heights = [size / 2**20 for size in self.curve]
        (line,) = axis.plot(positions, heights, label=label)
        color = line.get_color()
        if self.backward_start is not None:
            start = positions[self.backward_start]
            axis.axvline(start, color=color, linestyle=":", linewidth=1)
        if label is None:
            plot_parts(self, axis, positions)
            largest = [f"{bytes_text(r.bytes)} {_place(r)}" for r in self.rows[:4]]
            axis.set_title(
                f"peak {bytes_text(self.peak_bytes)}: {'; '.join(largest)}",
                fontsize="small",
                wrap=True,
            )
        else:
            axis.fill_between(positions, heights, color=color, alpha=0.15)
        if limit is not None:
            level = line_of(self, limit, of) / 2**20
            axis.axhline(level, color="tab:red", linestyle="--", label="budget")
        axis.set(xlim=(0, 1), ylim=(0, None), ylabel="bytes in use, MiB")
        axis.set_xlabel("arrays in the order they are computed; dotted: backward")
        return axis


def _bytes(size: str | int | None, argument: str) -> int | None:
    return None if size is None else parsed(size, argument).of(0)


def _checked_length(name: str, value: object) -> int:
    return checked_int(
        value,
        range(1, 1 << 16),
        f"Live.chart({name}={value!r}): a number of characters is required, such as "
        f"{name}=12.",
    )


@written_as("live(step, params, batch)")
def live(
    step: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> Live:
    """Compile `step` and list the arrays that live when it takes most memory.

    Nothing runs. The compiler's own simulation of the schedule is read back, loops
    included: the arrays that a scan stacks live from the scan on. An array carries
    the source line and the module of the operation that computed it, of a fusion the
    last one.

    Args:
      step: a function; if it is jitted its static and donated arguments count.
      *args: its arguments, as for `memory`.
      target: the GPU to compile for; `None` is the local backend.
      **kwargs: its keyword arguments.

    Raises:
      ValueError: as `memory`, and where the compiler describes no program.
      ImportError: as `memory`.
      NotImplementedError: as `memory`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> found = jaxact.live(lambda x: (x @ x) @ x, x)
      >>> [(row.kind, row.bytes >> 20) for row in found.rows]
      [('argument', 4), ('output', 4), ('temporary', 4)]
    """
    return describe(step, args, kwargs, target)[2]


def describe(
    step: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, Any],
    target: str | None,
) -> tuple[Traced, Compiled, Live]:
    """The step traced and compiled, and the arrays of the latter; see `live`."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
            # A program from JAX's persistent cache is not compiled, so not described.
            # The other options are not in its key; this one is, and matches no emitter.
            "xla_dump_emitter_re": folder,
        }
        traced, compiled = trace_and_compile(step, args, kwargs, target, options)
        files = glob.glob(os.path.join(folder, "*after_optimizations.hlo.pb"))
        if not files:
            raise ValueError(
                "jaxact.live: the compiler wrote no description of this program; "
                "jaxact.memory has its bytes."
            )
        with open(max(files, key=os.path.getsize), "rb") as file:
            heap = read_heap(wire.read(file.read()))
    return traced, compiled, _live(heap, measure(compiled))


def _live(heap: Heap, memory: Memory) -> Live:
    fixed = sum(buffer.size for buffer in heap.fixed)
    buffers = sorted([*heap.fixed, *heap.at_peak], key=lambda b: (-b.size, b.kind))
    return Live(
        rows=tuple(_row(buffer) for buffer in buffers),
        curve=tuple(fixed + size for size in heap.curve) or (fixed,),
        backward_start=heap.backward_start,
        memory=memory,
        residual_curve=heap.residuals or (0,),
        gradient_curve=heap.gradients or (0,),
    )


def _row(buffer: Buffer) -> LiveArray:
    origin = buffer.origin
    is_argument = "argument" in buffer.kind
    return LiveArray(
        bytes=buffer.size,
        type=buffer.type,
        kind=buffer.kind,
        phase="" if is_argument else origin.phase,
        path=origin.operation if is_argument else origin.path,
        operation="" if is_argument else origin.operation,
        source="" if is_argument else origin.source,
    )


def _place(row: LiveArray) -> str:
    """The module and the operation of an array; an argument's name."""
    return row.place or row.kind


class _Group(NamedTuple):
    """Arrays that are alike, as a line of the table shown by default."""

    size: int
    type: str
    kind: str
    array: str
    source: str


def _group(rows: Sequence[LiveArray]) -> _Group:
    first, count = rows[0], len(rows)
    size = sum(row.bytes for row in rows)
    if first.kind != "temporary":
        names = f"{count} arrays" if count > 1 else _place(first)
        return _Group(size, "" if count > 1 else first.type, first.kind, names, "")
    number = f"{count} x " if count > 1 else ""
    return _Group(
        size,
        number + first.type,
        first.phase or first.kind,
        _place(first),
        first.source.replace("<locals>.", ""),
    )


_BRIEF: list[Column[_Group]] = [
    Column("bytes", lambda group: bytes_text(group.size), is_number=True),
    Column("type", lambda group: group.type, is_number=True),
    Column("kind", lambda group: group.kind),
    Column("array", lambda group: group.array),
    Column("source", lambda group: group.source),
]
_COLUMNS: list[Column[LiveArray]] = [
    Column("bytes", lambda row: bytes_text(row.bytes), is_number=True),
    Column("type", lambda row: row.type),
    Column("kind", lambda row: row.kind),
    Column("phase", lambda row: row.phase),
    Column("path", lambda row: row.path),
    Column("operation", lambda row: row.operation),
    Column("source", lambda row: row.source.replace("<locals>.", "")),
]

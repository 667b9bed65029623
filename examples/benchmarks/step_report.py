"""The results of step.py as text, as Markdown and as a picture."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from step_ways import BASE

Record = dict[str, Any]
Cell = Callable[[Record, Record], str]  # of a row and the uncompressed one
NOTE = """\
time: of a step over that of the uncompressed one, taken in turns: median, quartiles;
items a second: of the uncompressed step, over that ratio;
temp: allocated by the compiled step besides arguments and results, gradients included,
and how many times less than uncompressed; peak: most that the device had allocated;
loss: of the last step; TFLOP: matrix products and convolutions of a step, and how many
of them are computed again. Predicted: no measurement, but the compiled program's time
by its bytes, its operations and its launches, over that of the uncompressed one;
kernels launched; bytes moved between chip and memory. Of policies about dots, only
dots_saveable saves convolutions; with accumulation a batch norm sees a piece of the
batch."""
BY_CAUSE = "Bytes moved, GB, by the cause of the kernels that move them"


def memory(key: str) -> Cell:
    def cell(row: Record, base: Record) -> str:
        if not row[key]:
            return "-"
        text = f"{row[key] / 2**20:.0f} MiB"
        return f"{text} ({base[key] / row[key]:.1f}x)" if base[key] else text

    return cell


def number(key: str, form: str, scale: float = 1.0) -> Cell:
    return lambda row, base: "-" if row[key] is None else format(row[key] / scale, form)


def predicted(row: Record, base: Record) -> str:
    seconds, first = row["predicted_seconds"], base["predicted_seconds"]
    if seconds is None:
        return "-"
    text = f"{seconds * 1e3:.1f} ms"
    return f"{seconds / first:.2f} ({text})" if first else text


def flops(row: Record, base: Record) -> str:
    if not row["flops"]:
        return "-"
    text = f"{row['flops'] / 1e12:.3g}"
    extra = row["flops"] / base["flops"] - 1 if base["flops"] else 0.0
    return f"{text} (+{extra:.0%})" if extra > 0.005 else text


def time(row: Record, base: Record) -> str:
    if row["ratio"] is None:
        return "-"
    low, high = row["quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def throughput(row: Record, base: Record) -> str:
    """Of the uncompressed step, over the ratio: both were taken in turns."""
    if row["ratio"] is None or not base["items_per_second"]:
        return "-"
    return f"{base['items_per_second'] / row['ratio']:.0f}"


def columns(rows: Sequence[Record]) -> dict[str, Cell]:
    """The columns that have numbers."""
    kind, target = rows[0]["device"].split(" (")[0], str(rows[0]["target"]).upper()
    every = {
        "ratio": ("time", time),
        "items_per_second": (f"{rows[0]['unit']}/s", throughput),
        "temp_bytes": (f"temp, {kind}", memory("temp_bytes")),
        "target_bytes": (f"temp, {target}", memory("target_bytes")),
        "peak_bytes": ("peak", memory("peak_bytes")),
        "predicted_seconds": (f"predicted time, {target}", predicted),
        "predicted_kernels": ("kernels", number("predicted_kernels", ".0f")),
        "predicted_bytes": ("GB", number("predicted_bytes", ".1f", 1e9)),
        "loss": ("loss", number("loss", ".3f")),
        "flops": ("TFLOP", flops),
    }
    has_numbers = lambda key: any(row[key] is not None for row in rows)
    return dict(column for key, column in every.items() if has_numbers(key))


def causes(rows: Sequence[Record]) -> list[list[str]]:
    """The table of bytes by cause: titles, then a line for each way that has them."""
    found = [row for row in rows if row["by_cause"]]
    if not found:
        return []
    names = list(found[0]["by_cause"])
    cell = lambda row, name: f"{row['by_cause'][name]['bytes'] / 1e9:.1f}"
    lines = [[row["way"], *(cell(row, name) for name in names)] for row in found]
    return [["", *names], *lines]


def by_network(rows: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    for name in dict.fromkeys(row["network"] for row in rows):
        yield name, [row for row in rows if row["network"] == name]


def cells(rows: Sequence[Record]) -> list[list[str]]:
    """The table of one network: a line of titles, then one for each way."""
    nothing = dict.fromkeys(rows[0])
    base = next((row for row in rows if row["way"] == BASE.name), nothing)
    found = columns(rows)
    lines = [
        [row["way"], *(cell(row, base) for cell in found.values())] for row in rows
    ]
    return [["", *found], *lines]


def reasons(rows: Sequence[Record]) -> list[str]:
    """Why cells are empty, each reason once for a way."""
    return [
        f"{row['way']}: {reason}"
        for row in rows
        for reason in dict.fromkeys(row["why"].values())
    ]


def tables(rows: Sequence[Record]) -> Iterator[Table]:
    for _, here in by_network(rows):
        table = in_rich(cells(here))
        table.title, table.caption = here[0]["about"], "\n".join(reasons(here))
        yield table
        if by_cause := causes(here):
            table = in_rich(by_cause)
            table.title = BY_CAUSE
            yield table


def in_rich(lines: Sequence[Sequence[str]]) -> Table:
    titles, *body = lines
    table = Table()
    for title in titles:
        table.add_column(title, justify="right" if title else "left")
    for line in body:
        table.add_row(*line)
    return table


def in_markdown(lines: Sequence[Sequence[str]]) -> str:
    titles, *body = lines
    rule = ["---", *(["---:"] * (len(titles) - 1))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *body))


def markdown(rows: Sequence[Record]) -> str:
    """All tables, and where, when and by which commands they were measured."""
    parts = ["# One training step, in several ways", NOTE]
    for name, here in by_network(rows):
        parts += [f"## {name}", f"{here[0]['about']}.", in_markdown(cells(here))]
        parts += ["\n".join(f"- {reason}" for reason in reasons(here))]
        if by_cause := causes(here):
            parts += [f"{BY_CAUSE}:", in_markdown(by_cause)]
    where = ("device", "python", "jax", "flax", "jaxact")
    described = (", ".join(f"{key} {row[key]}" for key in where) for row in rows)
    days = " and ".join(sorted({row["date"][:10] for row in rows}))
    commands = "\n".join(dict.fromkeys(f"    python {row['command']}" for row in rows))
    parts += ["; ".join(dict.fromkeys(described)), f"Measured on {days}, by", commands]
    return "\n\n".join(filter(None, parts)) + "\n"


def plot(rows: Sequence[Record], path: Path) -> None:
    """Time, or else predicted time, against memory; a panel a network."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    networks = list(by_network(rows))
    lines, across = math.ceil(len(networks) / 2), min(len(networks), 2)
    figure, axes = pyplot.subplots(
        lines,
        across,
        figsize=(5.5 * across, 4 * lines),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(networks) :]:
        axis.set_axis_off()
    for axis, (name, here) in zip(axes.flat, networks, strict=False):
        points = list(points_of(here))
        plot_points(axis, points) if points else plot_bars(axis, here)
        axis.set_title(name, fontsize=9)
    figure.savefig(path, dpi=150)


def color(row: Record) -> str:
    return "tab:red" if row["way"].startswith("jaxact") else "tab:gray"


@dataclasses.dataclass(frozen=True)
class Point:
    """A row in a picture: MiB, time over uncompressed, and quartiles of the latter."""

    row: Record
    memory: float
    time: float
    quartiles: tuple[float, float]


def points_of(rows: Sequence[Record]) -> Iterator[Point]:
    """The rows with a measured time, or if there are none those with a predicted."""
    timed = [row for row in rows if row["ratio"] and row["temp_bytes"]]
    for row in timed:
        low, high = row["quartiles"]
        yield Point(row, row["temp_bytes"] / 2**20, row["ratio"], (low, high))
    base = next((row for row in rows if row["way"] == BASE.name), None)
    if timed or base is None or not base["predicted_seconds"]:
        return
    for row in rows:
        if row["predicted_seconds"]:
            ratio = row["predicted_seconds"] / base["predicted_seconds"]
            yield Point(row, row["target_bytes"] / 2**20, ratio, (ratio, ratio))


def plot_points(axis: Any, points: Sequence[Point]) -> None:
    for point in points:
        low, high = point.quartiles
        spread = [[point.time - low], [high - point.time]]
        x, y, shade = point.memory, point.time, color(point.row)
        axis.errorbar(x, y, spread, color=shade, marker="o", capsize=3)
        offset = dict(xytext=(5, 4), textcoords="offset points")
        axis.annotate(point.row["way"], (x, y), fontsize=7, **offset)
    axis.axhline(1, color="gray", linewidth=0.5)
    axis.set_xscale("log")
    axis.margins(x=0.35, y=0.1)
    (least, most), sizes = axis.get_xlim(), [2**k for k in range(20)]
    sizes = [size for size in sizes if least <= size <= most]
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    is_measured = any(point.row["ratio"] for point in points)
    axis.set_xlabel("temp memory of the compiled step, MiB")
    kind = "time" if is_measured else "predicted time"
    axis.set_ylabel(f"{kind} of a step, uncompressed is 1")


def plot_bars(axis: Any, rows: Sequence[Record]) -> None:
    key = "target_bytes" if any(row["target_bytes"] for row in rows) else "temp_bytes"
    rows = [row for row in rows if row[key]][::-1]
    sizes = [row[key] / 2**20 for row in rows]
    bars = axis.barh([row["way"] for row in rows], sizes, color=list(map(color, rows)))
    axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    axis.set_xlabel("temp memory of the compiled step, MiB")

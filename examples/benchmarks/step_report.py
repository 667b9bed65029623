"""The results of step.py as text, as Markdown and as a picture."""

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
temp: allocated by the compiled step besides arguments and results, gradients included,
and how many times less than uncompressed; peak: most that the device had allocated;
loss: of the last step; TFLOP: matrix products and convolutions of a step. Of policies
about dots, only dots_saveable saves convolutions; with accumulation a batch norm sees
a piece of the batch."""


def memory(key: str) -> Cell:
    def cell(row: Record, base: Record) -> str:
        if not row[key]:
            return "-"
        text = f"{row[key] / 2**20:.0f} MiB"
        return f"{text} ({base[key] / row[key]:.1f}x)" if base[key] else text

    return cell


def number(key: str, form: str, scale: float = 1.0) -> Cell:
    return lambda row, base: "-" if row[key] is None else format(row[key] / scale, form)


def time(row: Record, base: Record) -> str:
    if row["ratio"] is None:
        return "-"
    low, high = row["quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def columns(rows: Sequence[Record]) -> dict[str, Cell]:
    """The columns that have numbers."""
    kind, target = rows[0]["device"].split(" (")[0], str(rows[0]["target"]).upper()
    every = {
        "ratio": ("time", time),
        "items_per_second": (f"{rows[0]['unit']}/s", number("items_per_second", ".0f")),
        "temp_bytes": (f"temp, {kind}", memory("temp_bytes")),
        "target_bytes": (f"temp, {target}", memory("target_bytes")),
        "peak_bytes": ("peak", memory("peak_bytes")),
        "loss": ("loss", number("loss", ".3f")),
        "flops": ("TFLOP", number("flops", ".3g", 1e12)),
    }
    has_numbers = lambda key: any(row[key] is not None for row in rows)
    return dict(column for key, column in every.items() if has_numbers(key))


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
        titles, *lines = cells(here)
        table = Table(title=here[0]["about"], caption="\n".join(reasons(here)))
        for title in titles:
            table.add_column(title, justify="right" if title else "left")
        for line in lines:
            table.add_row(*line)
        yield table


def markdown(rows: Sequence[Record]) -> str:
    """All tables, and where, when and by which commands they were measured."""
    parts = ["# One training step, in several ways", NOTE]
    for name, here in by_network(rows):
        titles, *lines = cells(here)
        rule = ["---", *(["---:"] * (len(titles) - 1))]
        table = [f"| {' | '.join(line)} |" for line in (titles, rule, *lines)]
        parts += [f"## {name}", f"{here[0]['about']}.", "\n".join(table)]
        parts += ["\n".join(f"- {reason}" for reason in reasons(here))]
    where = ("device", "python", "jax", "flax", "jaxact")
    described = (", ".join(f"{key} {row[key]}" for key in where) for row in rows)
    days = " and ".join(sorted({row["date"][:10] for row in rows}))
    commands = "\n".join(dict.fromkeys(f"    python {row['command']}" for row in rows))
    parts += ["; ".join(dict.fromkeys(described)), f"Measured on {days}, by", commands]
    return "\n\n".join(filter(None, parts)) + "\n"


def plot(rows: Sequence[Record], path: Path) -> None:
    """Time against memory where steps were timed, else memory; a panel a network."""
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
        timed = [row for row in here if row["ratio"] and row["temp_bytes"]]
        (plot_times if timed else plot_bars)(axis, timed or here)
        axis.set_title(name, fontsize=9)
    figure.savefig(path, dpi=150)


def color(row: Record) -> str:
    return "tab:red" if row["way"].startswith("jaxact") else "tab:gray"


def plot_times(axis: Any, rows: Sequence[Record]) -> None:
    for row in rows:
        x, y, (low, high) = row["temp_bytes"] / 2**20, row["ratio"], row["quartiles"]
        spread = [[y - low], [high - y]]
        axis.errorbar(x, y, spread, color=color(row), marker="o", capsize=3)
        offset = dict(xytext=(5, 4), textcoords="offset points")
        axis.annotate(row["way"], (x, y), fontsize=7, **offset)
    axis.axhline(1, color="gray", linewidth=0.5)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("temp memory of the compiled step, MiB")
    axis.set_ylabel("time of a step, uncompressed is 1")


def plot_bars(axis: Any, rows: Sequence[Record]) -> None:
    key = "target_bytes" if any(row["target_bytes"] for row in rows) else "temp_bytes"
    rows = [row for row in rows if row[key]][::-1]
    sizes = [row[key] / 2**20 for row in rows]
    bars = axis.barh([row["way"] for row in rows], sizes, color=list(map(color, rows)))
    axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    axis.set_xlabel("temp memory of the compiled step, MiB")

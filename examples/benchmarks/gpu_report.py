"""The results of gpu.py as one table."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

Record = dict[str, Any]
COLUMNS = ("", "measured", "predicted", "measured / predicted", "")


def table(results: Record) -> Table:
    """Kernels, then steps: measured, predicted, and the ratio of the two."""
    device, left_out = results["device"], results["left_out"]
    title = f"{device}, JAX {results['jax']}, jaxact {results['jaxact']}"
    late = f"{left_out} measurements were left out for lack of time" if left_out else ""
    found = Table(title=f"{title}, {results['date'][:10]}", caption=late)
    for number, name in enumerate(COLUMNS):
        is_text = number in (0, len(COLUMNS) - 1)
        found.add_column(name, justify="left" if is_text else "right")
    right = [row for row in results["checks"] if "error" not in row]
    if right:
        found.add_row("kernels with the bits of their definitions", f"{len(right)}")
    for row in results["checks"] + results["kernels"]:
        if "error" in row:
            kind = "failed" if row.get("failed") else "wrong bits"
            found.add_row(row["shape"], kind, "", "", difference(row))
    found.add_section()
    for row in results["kernels"]:
        if "error" not in row and row.get("implementation") != "naive":
            found.add_row(*kernel(row))
    found.add_section()
    bases = {r["network"]: r for r in results["steps"] if r["way"] == "uncompressed"}
    for row in results["steps"]:
        for line in step(row, bases.get(row["network"], {})):
            found.add_row(*line)
    return found


def difference(row: Record) -> str:
    about = [f"{row[key]}" for key in ("format", "bits") if row.get(key)]
    return f"{', '.join(about)}: {row['error']}" if about else row["error"]


def kernel(row: Record) -> tuple[str, ...]:
    width = "1 bit" if row["bits"] == 1 else f"{row['bits']} bits"
    form = "" if row["op"].startswith(row["format"]) else f"{row['format']} "
    name = f"{form}{row['op']}, {width}, {row['shape']}"
    name += f": {row['implementation']}"
    name += " (chosen)" if row["is_chosen"] else ""
    rate = f"{row['logical_bytes_per_second'] / 1e12:.3f} TB/s of unpacked bytes"
    micro, expected = row["microseconds"]["median"], row.get("predicted_microseconds")
    cells = compared(micro, expected, "us", ".1f")
    return name, *cells, rate


def step(row: Record, base: Record) -> Iterator[tuple[str, ...]]:
    """Time over uncompressed, time, peak; and the reasons for what is missing."""
    name = f"{row['network']}, {row['way']}"
    seconds, first = row["predicted_seconds"], base.get("predicted_seconds")
    ratio = seconds / first if seconds and first else None
    spread = ""
    if row["quartiles"]:
        low, high = row["quartiles"]
        spread = f"quartiles {low:.2f} to {high:.2f}"
    yield f"{name}: over uncompressed", *compared(row["ratio"], ratio, "x"), spread
    took = row["seconds"] and row["seconds"] * 1e3
    yield f"{name}: time", *compared(took, seconds and seconds * 1e3, "ms", ".1f"), ""
    peak, expected = row["peak_bytes"], row["compiled_peak_bytes"]
    mebibytes = [number and number / 2**20 for number in (peak, expected)]
    temp = row["temp_bytes"]
    about = f"temp {temp / 2**20:.0f} MiB" if temp else ""
    yield f"{name}: peak", *compared(*mebibytes, "MiB", ".0f"), about
    for part, reason in row["why"].items():
        yield f"{name}: {part}", "failed", "", "", reason


def compared(
    measured: float | None, predicted: float | None, unit: str, form: str = ".2f"
) -> tuple[str, str, str]:
    """Cells for both numbers and their ratio."""
    cell = lambda number: f"{number:{form}} {unit}" if number else "-"
    ratio = f"{measured / predicted:.2f}" if measured and predicted else "-"
    return cell(measured), cell(predicted), ratio

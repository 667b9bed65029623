"""Bars of the bytes in each module."""

from typing import TYPE_CHECKING

from jaxact._pyplot import new_axis
from jaxact._report.by_module import ModuleTable, folded
from jaxact._tabular import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


def plot_modules(table: ModuleTable) -> "Axes":
    """Bars of exact and stored bytes, the largest first; small modules share one.

    Raises:
      ImportError: matplotlib is missing.
    """
    large, small = folded(table)
    rows = sorted(large, key=lambda row: (row.stored_bytes, row.exact_bytes))[::-1]
    rows += small
    axis = new_axis("ResidualTable.plot", 8, 1.2 + 0.3 * len(rows))
    exact = [row.exact_bytes / 2**20 for row in rows]
    stored = [row.stored_bytes / 2**20 for row in rows]
    positions = range(len(rows))
    axis.barh(positions, exact, color="0.85", label="exact")
    axis.barh(positions, stored, height=0.5, label="stored")
    for position, row in zip(positions, rows, strict=True):
        text = f" {bytes_text(row.exact_bytes)}, {bytes_text(row.stored_bytes)} stored"
        end = max(exact[position], stored[position])
        axis.text(end, position, text, va="center", fontsize="small")
    axis.set_yticks(positions, [row.path or "(no path)" for row in rows])
    axis.margins(x=0.4)
    axis.invert_yaxis()
    axis.set_xlabel("MiB")
    axis.legend(loc="lower right")
    return axis

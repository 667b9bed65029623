"""Memory over a step, stacked: as text, and as a picture."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxact._memory.size import Limited
from jaxact._tabular import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]

    from jaxact._memory.live import Live

# From the bottom to the top, each with its character in a text.
_PARTS = {"arguments, results": ":", "residuals": "#", "gradients": "=", "other": "."}
_MIDDLE = 0.5  # a cell shows the part at its middle


@dataclasses.dataclass(frozen=True)
class Moment:
    """The bytes in use at one moment, by part, ordered as `_PARTS`."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(self.sizes)

    def at(self, height: float) -> str:
        """The character for the part so many bytes above the ground."""
        for size, character in zip(self.sizes, _PARTS.values(), strict=True):
            if height < size:
                return character
            height -= size
        return " "


def moments(live: "Live") -> list[Moment]:
    """A step, moment by moment."""
    fixed = live.fixed_bytes
    parts = zip(live.curve, live.residual_curve, live.gradient_curve, strict=True)
    return [
        Moment((fixed, residuals, gradients, total - fixed - residuals - gradients))
        for total, residuals, gradients in parts
    ]


def chart(
    live: "Live",
    budget: int | None,
    of: Limited,
    top: int | None,
    width: int,
    height: int,
) -> str:
    """See `Live.chart`."""
    every = moments(live)
    columns = [max(part, key=lambda m: m.total) for part in _split(every, width)]
    limit = None if budget is None else line_of(live, budget, of)
    top = top or max(live.peak_bytes, limit or 0)
    step = top / height
    lines = []
    for row in reversed(range(height)):
        cells = [m.at((row + _MIDDLE) * step) for m in columns]
        has_limit = limit is not None and row == min(height - 1, int(limit / step))
        text = "".join(c if c != " " or not has_limit else "-" for c in cells)
        label = bytes_text(round((row + 1) * step))
        name = f" {bytes_text(budget)}" if has_limit and budget is not None else ""
        lines.append(f"{label:>10} |{text}{name}".rstrip())
    start = live.backward_start
    ground = ["-"] * len(columns)
    if start is not None:
        ground[start * len(columns) // len(every)] = "^"
    lines.append(f"{'':>10} +{''.join(ground)}")
    keys = [f"{character} {name}" for name, character in _PARTS.items()]
    keys += ["^ backward begins"] if start is not None else []
    above = ", above arguments and results" if of == "temp" else ""
    keys += [f"- budget{above}"] if limit is not None else []
    lines.append(f"{'':>12}{', '.join(keys)}")
    return "\n".join(lines)


def plot_parts(live: "Live", axis: "Axes", positions: Sequence[float]) -> None:
    """Fill the parts under a curve."""
    sizes = zip(*(m.sizes for m in moments(live)), strict=True)
    heights = [[size / 2**20 for size in part] for part in sizes]
    colors = ["0.85", "tab:blue", "tab:orange", "tab:green"]
    axis.stackplot(positions, heights, labels=list(_PARTS), colors=colors, alpha=0.6)
    axis.legend(loc="lower center", ncols=5, fontsize="x-small")


def line_of(live: "Live", budget: int, of: Limited) -> int:
    """How high a budget is: one for temporaries stands on arguments and results."""
    return budget + (live.fixed_bytes if of == "temp" else 0)


def _split(every: list[Moment], count: int) -> list[list[Moment]]:
    """Equal parts, fewer where there are fewer moments."""
    count = min(count, len(every))
    edges = [len(every) * i // count for i in range(count + 1)]
    return [every[a:b] for a, b in zip(edges, edges[1:], strict=False)]

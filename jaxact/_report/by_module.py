"""Where the residuals of a function lie: their bytes by module, as tabulate has it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxact._tabular import Tabular


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """The residuals of one path, together.

    Attributes:
      path: of the module or named scope, as in the rows of a `ResidualTable`.
      residuals: how many.
      elements: over all of them, with the copies that scans stack.
      exact_bytes: of the arrays as they are.
      stored_bytes: of what is stored.
    """

    path: str
    residuals: int
    elements: int
    exact_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """How many times smaller what is stored is."""
        return self.exact_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def cells(self, total: int) -> tuple[str, ...]:
        """The row as text; `total` is what its share of stored bytes is of."""
        return (
            self.path,
            str(self.residuals),
            f"{self.elements:,} ({_size(self.exact_bytes)})",
            _size(self.stored_bytes),
            f"{self.ratio:.1f}x",
            f"{100 * self.stored_bytes / max(1, total):.1f} %",
        )


@dataclasses.dataclass(frozen=True)
class ModuleTable(Tabular):
    """Residuals by module: `print` it, or show it in a notebook.

    To be read beside `nn.tabulate` and `nnx.tabulate`: as there, a row does not count
    what modules inside have rows of their own for, sizes are 'elements (bytes)', and a
    KB has 1000 bytes. `share` is of all stored bytes.

    Attributes:
      rows: modules in the order of their first residuals, each before what it contains.
    """

    rows: tuple[ModuleRow, ...]

    @property
    def total(self) -> ModuleRow:
        """The sums, as a row."""
        return _sum("Total", self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
        total = dataclasses.asdict(self.total) | {"ratio": self.total.ratio}
        return {"rows": rows, "total": total}

    def summary(self) -> str:
        """The number of residuals, their bytes and what is stored of them."""
        total = self.total
        return (
            f"Total residuals: {total.residuals}, {total.elements:,} "
            f"({_size(total.exact_bytes)}), stored as {_size(total.stored_bytes)}, "
            f"{total.ratio:.1f}x smaller"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        titles = ("path", "residuals", "exact", "stored", "ratio", "share")
        total = self.total.stored_bytes
        return [titles, *(row.cells(total) for row in self.rows)]


def module_table(residuals: Iterable[ModuleRow], depth: int | None) -> ModuleTable:
    """Gather residuals, each a row of its own, by the first `depth` parts of paths."""
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        raise ValueError(
            f"by_path(depth={depth!r}): a number of path components, at least 1, is "
            "required; None for whole paths."
        )
    found: dict[tuple[str, ...], list[ModuleRow]] = {}
    first: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(residuals):
        parts = tuple(row.path.split("/")[:depth])
        found.setdefault(parts, []).append(row)
        for end in range(1, len(parts) + 1):
            first.setdefault(parts[:end], number)

    def place(parts: tuple[str, ...]) -> list[int]:
        return [first[parts[:end]] for end in range(1, len(parts) + 1)]

    order = sorted(found, key=place)
    return ModuleTable(tuple(_sum("/".join(parts), found[parts]) for parts in order))


def _sum(path: str, rows: Sequence[ModuleRow]) -> ModuleRow:
    return ModuleRow(
        path,
        residuals=sum(row.residuals for row in rows),
        elements=sum(row.elements for row in rows),
        exact_bytes=sum(row.exact_bytes for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
    )


def _size(n: int) -> str:
    """Bytes as Flax writes them."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "KB")):
        if n > 10**power:
            return f"{n / 10**power:,.1f} {unit}"
    return f"{n:,} B"

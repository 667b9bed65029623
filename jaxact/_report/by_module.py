"""A function's residuals by module: how many, and their bytes."""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxact._saved import Saved
from jaxact._tabular import Column, Tabular, bytes_text, large_and_small


@dataclasses.dataclass(frozen=True)
class ModuleRow(Saved):
    """All residuals with one path.

    Attributes:
      path: the module's or named scope's, as in a `ResidualTable`.
      residuals: how many.
      elements: in all together, with the copies that scans stack.
      exact_bytes: bytes before they are stored.
      stored_bytes: bytes after.
    """

    derived = ("ratio",)
    path: str
    residuals: int
    elements: int
    exact_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """Exact bytes over stored bytes."""
        return self.exact_bytes / self.stored_bytes if self.stored_bytes else 1.0


@dataclasses.dataclass(frozen=True)
class ModuleTable(Tabular):
    """Residuals by module: `print` it, or show it in a notebook.

    To be read beside `nn.tabulate` and `nnx.tabulate`: a row does not count
    submodules that have their own rows, and sizes are 'elements (bytes)'. Bytes are in
    binary units, as in all jaxact's tables: 64 KiB here are 65.5 KB there. `share` is a
    row's part in all stored bytes.

    Attributes:
      rows: modules as their first residuals come, each before its submodules.
    """

    derived = ("total",)
    rows: tuple[ModuleRow, ...]

    @property
    def total(self) -> ModuleRow:
        """The sums, as a row."""
        return _sum("Total", self.rows)

    def summary(self) -> str:
        """How many residuals, their exact and their stored bytes."""
        total = self.total
        return (
            f"Total residuals: {total.residuals}, {_size(total)}, stored as "
            f"{bytes_text(total.stored_bytes)}, {total.ratio:.1f}x smaller"
        )

    def _brief(self) -> tuple[list[Column[ModuleRow]], list[ModuleRow]]:
        columns, _ = self._table()
        large, small = folded(self)
        return columns, [*large, *small]

    def _table(self) -> tuple[list[Column[ModuleRow]], tuple[ModuleRow, ...]]:
        percent = 100 / max(1, self.total.stored_bytes)
        columns: list[Column[ModuleRow]] = [
            Column("path", lambda row: row.path),
            Column("residuals", lambda row: str(row.residuals), is_number=True),
            Column("exact", _size, is_number=True),
            Column("stored", lambda row: bytes_text(row.stored_bytes), is_number=True),
            Column("ratio", lambda row: f"{row.ratio:.1f}x", is_number=True),
            Column(
                "share",
                lambda row: f"{percent * row.stored_bytes:.1f} %",
                is_number=True,
            ),
        ]
        return columns, self.rows


def module_table(residuals: Iterable[ModuleRow], depth: int | None) -> ModuleTable:
    """Sum residuals, given a row each, by the first `depth` parts of their paths."""
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        raise ValueError(
            f"by_path(depth={depth!r}): a number of path components, at least 1, is "
            "required; None for whole paths."
        )
    modules: dict[tuple[str, ...], list[ModuleRow]] = {}
    first: dict[tuple[str, ...], int] = {}  # from a path to its first residual
    for number, row in enumerate(residuals):
        parts = tuple(row.path.split("/")[:depth])
        modules.setdefault(parts, []).append(row)
        for end in range(1, len(parts) + 1):
            first.setdefault(parts[:end], number)

    def position(parts: tuple[str, ...]) -> list[int]:
        return [first[parts[:end]] for end in range(1, len(parts) + 1)]

    order = sorted(modules, key=position)
    return ModuleTable(tuple(_sum("/".join(parts), modules[parts]) for parts in order))


def folded(table: ModuleTable) -> tuple[list[ModuleRow], list[ModuleRow]]:
    """The rows with 1 % of the bytes or more, and one row for several smaller ones."""
    large, small = large_and_small(table.rows)
    return large, [_sum(f"{len(small)} smaller", small)] if small else []


def _sum(path: str, rows: Sequence[ModuleRow]) -> ModuleRow:
    return ModuleRow(
        path,
        residuals=sum(row.residuals for row in rows),
        elements=sum(row.elements for row in rows),
        exact_bytes=sum(row.exact_bytes for row in rows),
        stored_bytes=sum(row.stored_bytes for row in rows),
    )


def _size(row: ModuleRow) -> str:
    return f"{row.elements:,} ({bytes_text(row.exact_bytes)})"

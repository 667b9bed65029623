"""Values that show as a table: printed, in rich, in notebooks and in treescope."""

import abc
import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.console import Group
    from treescope.renderers import TreescopeSubtreeRenderer
    from treescope.rendering_parts import RenderableAndLineAnnotations

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Column(Generic[R]):
    """A table's column.

    Attributes:
      title: its first line.
      cell: the text that a row has in it.
      is_number: whether it is aligned to the right.
    """

    title: str
    cell: Callable[[R], str]
    is_number: bool = False


class Tabular(abc.ABC):
    """A value with a table and a summary; empty columns are left out.

    HTML has no colors or styles, so that it takes the page's.
    """

    @abc.abstractmethod
    def _table(self) -> tuple[Sequence[Column[Any]], Sequence[object]]:
        """The columns, and the rows that their cells are read from."""

    @abc.abstractmethod
    def summary(self) -> str:
        """The lines below the table."""

    def __str__(self) -> str:
        lines = _aligned(*_text(*self._table()))
        return "\n".join([*lines, self.summary()]).rstrip()

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        columns, rows = _text(*self._table())
        table = Table()
        for column in columns:
            side = "right" if column.is_number else "left"
            table.add_column(column.title, justify=side, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table, Text(self.summary()))

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            marked = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
            return f"<tr>{marked}</tr>"

        columns, rows = _text(*self._table())
        head = line([column.title for column in columns], "th")
        body = "".join(line(row, "td") for row in rows)
        foot = html.escape(self.summary()).replace("\n", "<br>")
        return f"<table>{head}{body}</table><p>{foot}</p>"

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: "TreescopeSubtreeRenderer"
    ) -> "RenderableAndLineAnnotations":
        """The printed table; where it is folded, the first line of its summary."""
        from treescope import rendering_parts as parts

        lines = str(self).splitlines()
        brief = self.summary().partition("\n")[0] or f"{len(lines) - 1} rows"
        gray = lambda text: parts.abbreviation_color(parts.text(text))
        return parts.build_custom_foldable_tree_node(
            label=gray(f"<{type(self).__name__}: "),
            contents=parts.siblings(
                parts.fold_condition(
                    collapsed=gray(brief),
                    expanded=parts.indented_children(list(map(parts.text, lines))),
                ),
                gray(">"),
            ),
            path=path,
            expand_state=parts.ExpandState.EXPANDED,
        )


def bytes_text(number: float) -> str:
    """Bytes in binary units, as every table has them: '4.25 KiB' is 4352 bytes.

    Four digits, in the largest unit that leaves at least one before the point.
    """
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def _text(
    columns: Sequence[Column[Any]], rows: Sequence[object]
) -> tuple[list[Column[Any]], list[tuple[str, ...]]]:
    """The columns in which some row has text, and each row's text."""
    cells = [[column.cell(row) for row in rows] for column in columns]
    kept = [i for i, column in enumerate(cells) if not rows or any(column)]
    texts = zip(*(cells[i] for i in kept), strict=True)
    return [columns[i] for i in kept], list(texts)


def _aligned(
    columns: Sequence[Column[Any]], rows: Sequence[Sequence[str]]
) -> list[str]:
    lines = [[column.title for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = [str.rjust if column.is_number else str.ljust for column in columns]
    return [
        "  ".join(
            side(cell, width)
            for side, cell, width in zip(sides, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]

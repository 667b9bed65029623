"""Values that show as a table: printed, in rich, in notebooks and in treescope."""

import abc
import html
from collections.abc import Sequence
from typing import Any

# Titles of the columns that hold numbers, which are aligned to the right.
NUMBERS = frozenset(
    "residuals elements bits error relative exact stored ratio share "
    "temp argument output alias".split()
)


class Tabular(abc.ABC):
    """A value with a table and a summary; columns that are empty are left out.

    HTML has no colors or styles of its own, so that it takes those of the page.
    """

    @abc.abstractmethod
    def _cells(self) -> Sequence[Sequence[str]]:
        """The titles, then the rows, as text."""

    @abc.abstractmethod
    def summary(self) -> str:
        """What stands below the table."""

    def __str__(self) -> str:
        return "\n".join([_aligned(_filled(self._cells())), self.summary()]).rstrip()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        titles, *rows = _filled(self._cells())
        table = Table()
        for title in titles:
            side = "right" if title in NUMBERS else "left"
            table.add_column(title, justify=side, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(table, Text(self.summary()))

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            inside = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
            return f"<tr>{inside}</tr>"

        titles, *rows = _filled(self._cells())
        body = "".join(line(row, "td") for row in rows)
        foot = html.escape(self.summary()).replace("\n", "<br>")
        return f"<table>{line(titles, 'th')}{body}</table><p>{foot}</p>"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The printed table, and its first line of summary where it is folded."""
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


def _filled(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """The table without the columns that no row has anything in."""
    titles, *rows = table
    kept = [i for i in range(len(titles)) if not rows or any(row[i] for row in rows)]
    return [[row[i] for i in kept] for row in table]


def _aligned(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = [str.rjust if title in NUMBERS else str.ljust for title in table[0]]
    return "\n".join(
        "  ".join(
            side(cell, width)
            for side, cell, width in zip(sides, row, widths, strict=True)
        ).rstrip()
        for row in table
    )

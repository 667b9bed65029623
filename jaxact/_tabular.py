"""Values that show as a table: printed, in rich, in notebooks and in treescope."""

import abc
import dataclasses
import html
import itertools
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from jaxact._saved import Saved

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from treescope.renderers import TreescopeSubtreeRenderer
    from treescope.rendering_parts import RenderableAndLineAnnotations

R = TypeVar("R")
_LEFT = ' style="text-align:left"'

# Text columns get no narrower than this; a table with many can then exceed its width.
_NARROWEST = 8
# A row below this part of a table's bytes is folded together with the others.
SMALL_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Column(Generic[R]):
    """A table's column.

    Attributes:
      title: its first line.
      cell: the text that a row has in it.
      is_number: whether it is aligned to the right, and never broken into lines.
    """

    title: str
    cell: Callable[[R], str]
    is_number: bool = False


Columns: TypeAlias = Sequence[Column[Any]]


class Tabular(Saved, abc.ABC):
    """A value with a table and a summary; empty columns are left out.

    Printed, it takes the width of the terminal (80 columns where there is none). HTML
    has no colors or fonts, so that it takes the page's; it scrolls sideways.
    """

    @abc.abstractmethod
    def _table(self) -> tuple[Columns, Sequence[object]]:
        """The columns, and the rows that their cells are read from."""

    def _brief(self) -> tuple[Columns, Sequence[object]]:
        """The columns and rows shown by default: those that fit a terminal."""
        return self._table()

    @abc.abstractmethod
    def summary(self) -> str:
        """The lines below the table."""

    def text(self, *, full: bool = False, width: int | None = None) -> str:
        """The table and its summary.

        Args:
          full: every column and every row, in lines as long as they need.
          width: the length of a line; None: the terminal's.

        Raises:
          ValueError: a width below 1.
        """
        if full:
            lines = _aligned(*_text(*self._table()))
            return "\n".join([*lines, self.summary()]).rstrip()
        if width is not None and not (isinstance(width, int) and width >= 1):
            raise ValueError(
                f"text(width={width!r}): the length of a line is required, an integer "
                "of at least 1 such as 80, or None for the terminal's."
            )
        width = width or shutil.get_terminal_size().columns
        lines = _aligned(*_fitted(*_text(*self._brief()), width))
        for line in self.summary().splitlines():
            lines += textwrap.wrap(line, width) or [""]
        return "\n".join(lines).rstrip()

    def html(self, *, full: bool = False) -> str:
        """The same as HTML.

        Args:
          full: every column and every row.
        """
        columns, rows = _text(*(self._table() if full else self._brief()))

        def line(cells: Sequence[str], tag: str) -> str:
            marked = (
                f"<{tag}{'' if column.is_number else _LEFT}>{html.escape(cell)}</{tag}>"
                for column, cell in zip(columns, cells, strict=True)
            )
            return f"<tr>{''.join(marked)}</tr>"

        head = line([column.title for column in columns], "th")
        body = "".join(line(row, "td") for row in rows)
        foot = html.escape(self.summary()).replace("\n", "<br>")
        return (
            f'<div style="overflow-x:auto"><table>{head}{body}</table></div>'
            f"<p>{foot}</p>"
        )

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "RenderResult":
        from rich.text import Text

        head, _, body = self.text(width=options.max_width).partition("\n")
        yield Text(head, style="bold", overflow="fold")
        yield Text(body, overflow="fold")

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


class _Sized(Protocol):
    """A row with bytes."""

    @property
    def exact_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...


S = TypeVar("S", bound=_Sized)


def large_and_small(rows: Sequence[S]) -> tuple[list[S], list[S]]:
    """Rows with 1 % of the exact or the stored bytes, and the others if several."""
    exact = SMALL_SHARE * sum(row.exact_bytes for row in rows)
    stored = SMALL_SHARE * sum(row.stored_bytes for row in rows)
    is_large = lambda row: row.exact_bytes >= exact or row.stored_bytes >= stored
    small = [row for row in rows if not is_large(row)]
    if len(small) < 2:
        return list(rows), []
    return list(filter(is_large, rows)), small


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
    columns: Columns, rows: Sequence[object]
) -> tuple[list[Column[Any]], list[tuple[str, ...]]]:
    """The columns in which some row has text, and each row's text."""
    cells = [[column.cell(row) for row in rows] for column in columns]
    kept = [i for i, column in enumerate(cells) if not rows or any(column)]
    texts = zip(*(cells[i] for i in kept), strict=True)
    return [columns[i] for i in kept], list(texts)


def _fitted(
    columns: Columns, rows: Sequence[Sequence[str]], width: int
) -> tuple[Columns, list[Sequence[str]]]:
    """The rows, with text broken into lines where a table is wider than `width`."""
    widths = _widths(columns, rows)
    while sum(widths) + 2 * (len(widths) - 1) > width:
        narrower = [
            [*widths[:i], widths[i] - 1, *widths[i + 1 :]]
            for i, column in enumerate(columns)
            if not column.is_number and widths[i] > _NARROWEST
        ]
        if not narrower:
            break
        widths = min(narrower, key=lambda w: (_height(rows, w), max(w)))
    lines: list[Sequence[str]] = []
    for row in rows:
        cells = [_broken(cell, size) for cell, size in zip(row, widths, strict=True)]
        lines += itertools.zip_longest(*cells, fillvalue="")
    return columns, lines


def _height(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> int:
    """The number of lines that the rows take."""
    return sum(
        max(len(_broken(cell, size)) for cell, size in zip(row, widths, strict=True))
        for row in rows
    )


def _broken(cell: str, width: int) -> list[str]:
    """A cell's lines.

    Broken after a space or '/' or before '@', else after '_' or '.', else anywhere.
    """
    lines = []
    while len(cell) > width:
        line = cell[:width]
        end = max(*map(line.rfind, " /"), cell.rfind("@", 1, width + 1) - 1) + 1
        end = end or max(map(line.rfind, "_.")) + 1 or width
        lines.append(cell[:end].rstrip())
        cell = cell[end:]
    return [*lines, cell]


def _widths(columns: Columns, rows: Sequence[Sequence[str]]) -> list[int]:
    lines = [[column.title for column in columns], *rows]
    return [max(map(len, cells)) for cells in zip(*lines, strict=True)]


def _aligned(columns: Columns, rows: Sequence[Sequence[str]]) -> list[str]:
    widths = _widths(columns, rows)
    sides = [str.rjust if column.is_number else str.ljust for column in columns]
    return [
        "  ".join(
            side(cell, width)
            for side, cell, width in zip(sides, line, widths, strict=True)
        ).rstrip()
        for line in [[column.title for column in columns], *rows]
    ]

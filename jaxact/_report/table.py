"""The table that `residuals` gives."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxact._codec import Action, Bias, Exact
from jaxact._policy import Rule
from jaxact._report.bars import plot_modules
from jaxact._report.by_module import ModuleRow, ModuleTable, module_table
from jaxact._saved import Saved, dtype_named
from jaxact._tabular import SMALL_SHARE, Column, Tabular, bytes_text, large_and_small

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


@dataclasses.dataclass(frozen=True)
class ResidualRow(Saved):
    """One stored residual.

    Attributes:
      key: its identity, for `Rule(key=...)`.
      shape, dtype: before it is stored, with the copies that scans stack.
      primitive: that computed it; '' for an argument.
      name: its `checkpoint_name`, or ''.
      path: module path and named scopes.
      source: the user's 'file.py:line (function)' that computes it.
      action: how it is stored.
      bias: 'exact', 'unbiased' (its rounding adds noise to gradients, nothing else),
        'unbiased over rotations' (the same, but for a squared bias below 5e-4 of the
        squared error, see `Rotated`), 'unbiased to first order' (a path of the backward
        pass multiplies with the rounded value twice, as in a softmax, a norm or
        z @ z.T: a bias is left that falls with the square of the rounding's step, of
        any size beside the noise) or
        'biased' (something nonlinear is computed from the rounded values).
      exact_bytes: bytes before it is stored.
      stored_bytes: bytes after, on the device and on the host.
      host_bytes: those in host memory.
      why: the reason for the action.
      is_outside: whether it is in no compressed call.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    primitive: str
    name: str
    path: str
    source: str
    action: Action
    bias: Bias
    exact_bytes: int
    stored_bytes: int
    why: str
    host_bytes: int = 0
    is_outside: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):  # as it is saved
            object.__setattr__(self, "dtype", dtype_named(self.dtype))
        object.__setattr__(self, "bias", Bias(self.bias))

    @property
    def device_bytes(self) -> int:
        """Bytes that are stored on the device."""
        return self.stored_bytes - self.host_bytes


_COLUMNS: list[Column[ResidualRow]] = [
    Column("shape", lambda row: "x".join(map(str, row.shape)) or "scalar"),
    Column("dtype", lambda row: str(row.dtype)),
    Column("primitive", lambda row: row.primitive or "argument"),
    Column("name", lambda row: row.name),
    Column("path", lambda row: row.path),
    # Both are too wide for a line with the parts that are left out.
    Column("source", lambda row: row.source.replace("<locals>.", "")),
    Column("action", lambda row: str(row.action).replace(", stochastic=True", "")),
    Column("bias", lambda row: row.bias),
    Column("exact", lambda row: bytes_text(row.exact_bytes), is_number=True),
    Column("stored", lambda row: bytes_text(row.device_bytes), is_number=True),
    Column("host", lambda row: _host_text(row.host_bytes), is_number=True),
    Column("why", lambda row: row.why),
]


class _Line(NamedTuple):
    """The cells of a row, as a table has them by default."""

    key: str
    shape: str
    bits: str
    exact: str
    stored: str
    host: str
    why: str


_BRIEF: list[Column[_Line]] = [
    Column("key", lambda line: line.key),
    Column("shape", lambda line: line.shape, is_number=True),
    Column("bits", lambda line: line.bits, is_number=True),
    Column("exact", lambda line: line.exact, is_number=True),
    Column("stored", lambda line: line.stored, is_number=True),
    Column("host", lambda line: line.host, is_number=True),
    Column("why", lambda line: line.why),
]


def _line(row: ResidualRow) -> _Line:
    size = "x".join(map(str, row.shape)) or "scalar"
    return _Line(
        key=row.key,
        shape=f"{size} {_short(row.dtype)}",
        bits=re.sub(r" bits?\b|, host$", "", row.action.label),
        exact=bytes_text(row.exact_bytes),
        stored=bytes_text(row.device_bytes),
        host=_host_text(row.host_bytes),
        why=_brief_reason(row),
    )


def _brief_reason(row: ResidualRow) -> str:
    reason = "outside" if row.is_outside else row.why.partition(";")[0]
    return f"{reason}; biased" if row.bias is Bias.BIASED else reason


def _small_line(rows: Sequence[ResidualRow]) -> _Line:
    """One line for the rows that have little together."""
    return _Line(
        key=f"{len(rows)} smaller",
        shape="",
        bits="",
        exact=bytes_text(sum(row.exact_bytes for row in rows)),
        stored=bytes_text(sum(row.device_bytes for row in rows)),
        host=_host_text(sum(row.host_bytes for row in rows)),
        why="",
    )


def _short(dtype: np.dtype) -> str:
    """A dtype as in a printed jaxpr: 'bf16', 'f32', 'i32'."""
    return re.sub(
        r"^(bfloat|float|uint|int|complex)(?=\d)",
        lambda m: "bf" if m[0] == "bfloat" else m[0][0],
        str(dtype),
    )


def _host_text(number: int) -> str:
    return bytes_text(number) if number else ""


# Measured by tests/laws/test_form_bias.py.
_FIRST_ORDER = (
    "unbiased to first order: a path multiplies with the rounded value twice (softmax, "
    "norms, z @ z.T); a bias is left that falls with the square of the rounding step. "
    "How much of the noise it is depends on the network, and nothing bounds it: at 2 "
    "bits it was 2 % for a softmax alone and 44 % in a contrastive loss"
)


# The bound of `Rotated`, whose tests measure it.
_OVER_ROTATIONS = (
    "unbiased over rotations: the mean over random rotations is the value, up to a "
    "squared bias below 5e-4 of the squared error (2e-3 for groups with one value that "
    "is not zero)"
)


@dataclasses.dataclass(frozen=True)
class ResidualTable(Tabular):
    """A function's residuals: `print` it, or show it in a notebook.

    By default it fits 80 columns, and rows below 1 % of the bytes are folded into one;
    `print(table.text(full=True))` has every row, with primitive, name, path, source
    line, action and bias. For a large model `by_path(depth=2)` is easier to read.

    Attributes:
      rows: one for each stored array that the function computes.
      referenced_bytes: bytes of arguments and constants that the backward pass reads in
        place, such as parameters; they exist anyway and are not in the sums.
      unused_rules: rules that decided about nothing, from all policies in the
        function; a rule that recomputes is none.
      checkpointed: residuals of compressed calls in a `jax.checkpoint`, and of those
        that a custom rule differentiates. They are packed while the backward pass
        computes a checkpoint again, and gone before the next one; they are not in the
        sums.
    """

    derived = ("exact_bytes", "stored_bytes", "host_bytes", "ratio")
    rows: tuple[ResidualRow, ...]
    referenced_bytes: int
    unused_rules: tuple[Rule, ...] = ()
    checkpointed: tuple[ResidualRow, ...] = ()

    @property
    def exact_bytes(self) -> int:
        """Bytes before the residuals are stored."""
        return sum(row.exact_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes after, on the device and on the host."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """Stored bytes that are in host memory."""
        return sum(row.host_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Exact bytes over stored bytes."""
        return self.exact_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def summary(self) -> str:
        """The totals, bytes outside of compressed calls, rules that decide none."""
        count = len(self.rows)
        on_host = f", {bytes_text(self.host_bytes)} on the host"
        lines = [
            f"{count} residual{'' if count == 1 else 's'}: "
            f"{bytes_text(self.exact_bytes)} exact, "
            f"{bytes_text(self.stored_bytes)} stored ({self.ratio:.1f}x smaller"
            f"{on_host if self.host_bytes else ''}); "
            f"{bytes_text(self.referenced_bytes)} of arguments referenced in place",
            *self._outside(),
            *self._inside_checkpoints(),
        ]
        lines += [f"decides nothing: {rule}" for rule in self.unused_rules]
        rows = (*self.rows, *self.checkpointed)
        if any(row.bias is Bias.FIRST_ORDER for row in rows):
            lines.append(_FIRST_ORDER)
        if any(row.bias is Bias.OVER_ROTATIONS for row in rows):
            lines.append(_OVER_ROTATIONS)
        if rows and all(isinstance(row.action, Exact) for row in rows):
            lines.append("nothing is compressed")
        return "\n".join(lines)

    def _inside_checkpoints(self) -> list[str]:
        """The residuals that are there while a checkpoint is computed again."""
        if not self.checkpointed:
            return []
        exact = sum(row.exact_bytes for row in self.checkpointed)
        stored = sum(row.stored_bytes for row in self.checkpointed)
        return [
            f"{len(self.checkpointed)} more are packed while checkpoints, or custom "
            "rules, compute them again, those of one at a time: "
            f"{bytes_text(exact)} exact, "
            f"{bytes_text(stored)} stored"
        ]

    def _outside(self) -> list[str]:
        """Where the bytes are that no compressed call stores, if others are."""
        outside = [row for row in self.rows if row.is_outside]
        size = sum(row.stored_bytes for row in outside)
        is_little = size < SMALL_SHARE * self.stored_bytes
        if len(outside) == len(self.rows) or is_little:
            return []
        places: dict[str, int] = {}
        for row in outside:
            place = row.path or row.source  # none in JAX's own functions
            places[place] = places.get(place, 0) + row.stored_bytes
        largest = max(places, key=lambda place: places[place])
        most = f", most made in {largest}" if largest else ""
        return [
            f"{bytes_text(size)} of {bytes_text(self.stored_bytes)} are kept "
            f"outside compressed calls{most}: compress what reads them"
        ]

    def _table(self) -> tuple[list[Column[ResidualRow]], tuple[ResidualRow, ...]]:
        return _COLUMNS, self.rows

    def _brief(self) -> tuple[list[Column[_Line]], list[_Line]]:
        large, small = large_and_small(self.rows)
        rest = [_small_line(small)] if small else []
        return _BRIEF, [*map(_line, large), *rest]

    def by_path(self, depth: int | None = None) -> ModuleTable:
        """Bytes by module, to be read beside `nn.tabulate` and `nnx.tabulate`.

        Those write decimal units (a KB is 1000 bytes); these are binary (KiB, 1024).

        Args:
          depth: path components to tell apart; deeper residuals count for the module
            that contains them. None: all.

        Returns:
          A `ModuleTable` with a row for each path and its share of the stored bytes.

        Raises:
          ValueError: a depth below 1.

        Example:
          >>> import jax, jax.numpy as jnp, jaxact
          >>> @jaxact.compress(policy=jaxact.Policy(bits=2), activations='x')
          ... def network(ws, x):
          ...     for number, w in enumerate(ws):
          ...         with jax.named_scope(f'layer{number}'):
          ...             x = jnp.tanh(x @ w)
          ...     return x
          >>> ws, x = [jnp.ones((256, 256))] * 2, jnp.ones((64, 256))
          >>> print(jaxact.residuals(network, ws, x).by_path())
          path    residuals             exact    stored  ratio   share
          x               1   16,384 (64 KiB)  4.25 KiB  15.1x  25.0 %
          layer0          2  32,768 (128 KiB)   8.5 KiB  15.1x  50.0 %
          layer1          1   16,384 (64 KiB)  4.25 KiB  15.1x  25.0 %
          Total residuals: 4, 65,536 (256 KiB), stored as 17 KiB, 15.1x smaller
        """
        rows = (
            ModuleRow(r.path, 1, math.prod(r.shape), r.exact_bytes, r.stored_bytes)
            for r in self.rows
        )
        return module_table(rows, depth)

    def plot(self) -> "Axes":
        """Bars of exact and stored bytes by path, the largest first.

        Raises:
          ImportError: matplotlib is missing.
        """
        return plot_modules(self.by_path())

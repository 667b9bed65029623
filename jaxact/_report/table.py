"""The table that `residuals` gives."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxact._codec import Action, Bias, Exact
from jaxact._policy import Rule
from jaxact._report.by_module import ModuleRow, ModuleTable, module_table
from jaxact._tabular import Column, Tabular, bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


@dataclasses.dataclass(frozen=True)
class ResidualRow:
    """One stored residual.

    Attributes:
      key: its identity, for `Rule(key=...)`.
      shape, dtype: before it is stored, with the copies that scans stack.
      primitive: that computed it; '' for an argument.
      name: its `checkpoint_name`, or ''.
      path: module path and named scopes.
      source: 'file.py:line (function)'.
      action: how it is stored.
      bias: 'exact', 'unbiased' (its rounding adds noise to gradients, nothing else),
        'unbiased to first order' (a path multiplies with it twice, see `Bias`) or
        'biased' (something nonlinear is computed from the rounded values).
      exact_bytes: bytes before it is stored.
      stored_bytes: bytes after.
      why: the reason for the action.
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
    Column("stored", lambda row: bytes_text(row.stored_bytes), is_number=True),
    Column("why", lambda row: row.why),
]


@dataclasses.dataclass(frozen=True)
class ResidualTable(Tabular):
    """A function's residuals: `print` it, or show it in a notebook.

    It has a line for each. For a large model `by_path(depth=2)` is easier to read.

    Attributes:
      rows: one for each stored array that the function computes.
      referenced_bytes: bytes of arguments and constants that the backward pass reads in
        place, such as parameters; they exist anyway and are not in the sums.
      unused_rules: rules that matched nothing, from all policies in the function.
    """

    rows: tuple[ResidualRow, ...]
    referenced_bytes: int
    unused_rules: tuple[Rule, ...] = ()

    @property
    def exact_bytes(self) -> int:
        """Bytes before the residuals are stored."""
        return sum(row.exact_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes after."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Exact bytes over stored bytes."""
        return self.exact_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        rows = [
            dataclasses.asdict(row)
            | {"dtype": str(row.dtype), "action": str(row.action)}
            for row in self.rows
        ]
        return {
            "rows": rows,
            "exact_bytes": self.exact_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": self.ratio,
            "referenced_bytes": self.referenced_bytes,
            "unused_rules": [str(rule) for rule in self.unused_rules],
        }

    def summary(self) -> str:
        """The totals, unused rules, and whether nothing is compressed."""
        lines = [
            f"{len(self.rows)} residuals: {bytes_text(self.exact_bytes)} exact, "
            f"{bytes_text(self.stored_bytes)} stored ({self.ratio:.1f}x smaller); "
            f"{bytes_text(self.referenced_bytes)} of arguments referenced in place"
        ]
        lines += [f"matched nothing: {rule}" for rule in self.unused_rules]
        if self.rows and all(isinstance(row.action, Exact) for row in self.rows):
            lines.append("nothing is compressed")
        return "\n".join(lines)

    def _table(self) -> tuple[list[Column[ResidualRow]], tuple[ResidualRow, ...]]:
        return _COLUMNS, self.rows

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
        """Bars of exact and stored bytes for each residual.

        Raises:
          ImportError: matplotlib is missing.
        """
        try:
            from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "ResidualTable.plot needs matplotlib: pip install 'jaxact[plots]'."
            ) from error
        _, axis = pyplot.subplots(figsize=(8, 1 + 0.25 * len(self.rows)))
        labels = [f"{i} {r.name or r.primitive}" for i, r in enumerate(self.rows)]
        axis.barh(labels, [r.exact_bytes / 2**20 for r in self.rows], label="exact")
        axis.barh(labels, [r.stored_bytes / 2**20 for r in self.rows], label="stored")
        axis.invert_yaxis()
        axis.set_xlabel("MiB")
        axis.legend()
        return axis

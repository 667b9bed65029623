"""A plan: the policy for a budget, and its expected cost."""

import dataclasses
from typing import TYPE_CHECKING

from jaxact._budget.frontier import Frontier
from jaxact._budget.picture import plot_frontier
from jaxact._budget.problem import Solution
from jaxact._codec import Action
from jaxact._memory import Memory
from jaxact._memory.size import Limited
from jaxact._policy import Policy
from jaxact._report.by_module import ModuleRow, ModuleTable, module_table
from jaxact._saved import Saved
from jaxact._tabular import SMALL_SHARE, Column, Tabular, bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


@dataclasses.dataclass(frozen=True)
class PlannedRow(Saved):
    """A residual in a plan.

    Attributes:
      key, path: as in a `ResidualTable`.
      way: how its call is kept: 'stored', 'elementwise' (what elementwise operations
        make is computed again) or 'checkpoint' (the call is computed again).
      elements: of all copies.
      exact_bytes: before it is stored.
      stored_bytes: after.
      time: that packing adds, as a part of the step's.
      noise: variance that it adds to the gradient, over the squared gradient.
    """

    key: str
    path: str
    way: str
    action: Action
    elements: int
    exact_bytes: int
    stored_bytes: int
    time: float
    noise: float


@dataclasses.dataclass(frozen=True)
class Trial(Saved):
    """A policy that was compiled.

    Attributes:
      policy: see `jaxact.using`.
      rows: as in `Plan`; none for the uncompressed step.
      stored_bytes: predicted, of all residuals; None for the uncompressed step.
      live_bytes: the most that live at once: residuals, gradients, a call's workspace;
        by tables, before what earlier compiled steps tell.
      predicted_bytes: that the budget limits; None where nothing was predicted.
      memory: compiled.
      time, noise: added, as in `Plan`.
    """

    policy: Policy
    rows: tuple[PlannedRow, ...]
    stored_bytes: int | None
    live_bytes: int | None
    predicted_bytes: int | None
    memory: Memory
    time: float
    noise: float

    @property
    def cost(self) -> float:
        """Time and noise as one number: both say how much longer training takes."""
        return self.time + self.noise


@dataclasses.dataclass(frozen=True)
class Plan(Tabular):
    """A policy for a memory budget: `print` it, or train with it.

    Give `policy` to `jaxact.compress`, or train inside `jaxact.using(plan.policy)`.
    Times are estimates, of operations and bytes at the target's rates (an H100's for
    the local backend), not measurements.

    Attributes:
      policy: for all compressed calls.
      budget: bytes.
      of: 'temp' or 'device', the memory that the budget limits.
      memory: compiled with the policy; never above the budget.
      predicted: bytes that were expected of the compiled step.
      time: that the policy adds, as a part of the step's.
      noise: variance that it adds to the gradient, over the squared gradient.
      is_noise_measured: whether from a `Sensitivity`; else it is assumed, from errors
        that residuals have typically.
      rows: a row for each residual that something was chosen for.
      trail: the policies that were compiled, in order.
      argument_bytes: of the step, before they are spread over devices; a later plan
        knows the step by them.
      frontier: the least cost at other budgets, and other ways beside it.
    """

    derived = ("bytes",)
    policy: Policy
    budget: int
    of: Limited
    memory: Memory
    predicted: int
    time: float
    noise: float
    is_noise_measured: bool
    rows: tuple[PlannedRow, ...]
    trail: tuple[Trial, ...]
    argument_bytes: int
    frontier: Frontier = Frontier()

    @property
    def bytes(self) -> int:
        """Compiled bytes that the budget limits."""
        return budgeted(self.memory, self.of)

    def summary(self) -> str:
        """The compiled bytes and the budget; the cost; the compiled policies."""
        if not self.rows:
            cost = "nothing has to be compressed"
        else:
            source = "measured" if self.is_noise_measured else "assumed"
            cost = (
                f"about {self.time:.1%} more time (estimated), "
                f"{self.noise:.2g} of the squared gradient as noise ({source})"
            )
        part = self.bytes / self.budget
        lines = [
            f"{self.of} {bytes_text(self.bytes)}, {part:.0%} of the budget of "
            f"{bytes_text(self.budget)}, on {self.memory.device}: {cost}"
        ]
        compiled = [
            bytes_text(budgeted(trial.memory, self.of))
            + (
                f" (predicted {bytes_text(trial.predicted_bytes)})"
                if trial.predicted_bytes
                else ""
            )
            for trial in self.trail
        ]
        lines.append(f"compiled: {', '.join(compiled)}")
        return "\n".join(lines)

    def _table(self) -> tuple[list[Column[PlannedRow]], tuple[PlannedRow, ...]]:
        return _COLUMNS, self.rows

    def _brief(self) -> tuple[list[Column[PlannedRow]], list[PlannedRow]]:
        total = sum(row.exact_bytes for row in self.rows)
        large = [r for r in self.rows if r.exact_bytes >= SMALL_SHARE * total]
        return _COLUMNS, large or list(self.rows)

    def by_path(self, depth: int | None = None) -> ModuleTable:
        """Bytes by module, before and after.

        Args:
          depth: path components to tell apart, as `ResidualTable.by_path`.
        """
        rows = (
            ModuleRow(row.path, 1, row.elements, row.exact_bytes, row.stored_bytes)
            for row in self.rows
        )
        return module_table(rows, depth)

    def plot(self) -> "Axes":
        """The least added time at each memory, and where this plan and its budget are.

        Raises:
          ImportError: matplotlib is missing.
        """
        return plot_frontier(self)


def budgeted(memory: Memory, of: Limited) -> int:
    """The bytes that a budget is for."""
    return memory.temp_bytes if of == "temp" else memory.peak_bytes


def planned_rows(solution: Solution) -> tuple[PlannedRow, ...]:
    """A row for each residual that is stored."""
    return tuple(
        PlannedRow(
            row.key,
            row.path,
            choice.variant.name,
            option.action,
            row.elements,
            row.exact_bytes,
            option.bytes,
            option.time,
            option.noise,
        )
        for choice in solution.choices
        for row, option in zip(choice.variant.rows, choice.options, strict=True)
    )


_COLUMNS: list[Column[PlannedRow]] = [
    Column("key", lambda row: row.key),
    Column("call", lambda row: row.way),
    Column("action", lambda row: row.action.label),
    Column("exact", lambda row: bytes_text(row.exact_bytes), is_number=True),
    Column("stored", lambda row: bytes_text(row.stored_bytes), is_number=True),
    Column("time", lambda row: f"{row.time:.1%}", is_number=True),
    Column("noise", lambda row: f"{row.noise:.2g}", is_number=True),
]

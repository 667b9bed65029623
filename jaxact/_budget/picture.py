"""A picture of a plan's frontier."""

from typing import TYPE_CHECKING

from jaxact._pyplot import new_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]

    from jaxact._budget.plan import Plan


def plot_frontier(plan: "Plan") -> "Axes":
    """Added time against memory; compiled steps as dots, the budget as a line.

    Raises:
      ImportError: matplotlib is missing.
    """
    axis = new_axis("Plan.plot", 6, 4)
    mebibytes = lambda number: number / 2**20
    points = sorted(plan.frontier, key=lambda point: point.bytes)
    predicted = [p for p in points if not p.is_compiled]
    compiled = [p for p in points if p.is_compiled]
    axis.plot(
        [mebibytes(p.bytes) for p in predicted],
        [100 * p.time for p in predicted],
        color="0.6",
        label="predicted",
    )
    axis.plot(
        [mebibytes(p.bytes) for p in compiled],
        [100 * p.time for p in compiled],
        "o",
        color="0.3",
        label="compiled",
    )
    axis.plot([mebibytes(plan.bytes)], [100 * plan.time], "o", label="this plan")
    for point in compiled:
        if point.name not in ("plan", ""):
            place = mebibytes(point.bytes), 100 * point.time
            axis.annotate(point.name, place, fontsize="x-small", rotation=30)
    axis.axvline(mebibytes(plan.budget), color="0.3", linestyle=":", label="budget")
    axis.set_xlabel(f"{plan.of}, MiB")
    axis.set_ylabel("added time, % (estimated)")
    axis.legend()
    return axis

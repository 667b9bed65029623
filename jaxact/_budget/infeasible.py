"""The message of a budget that no policy was found for."""

import math

from jaxact._budget.plan import budgeted
from jaxact._budget.search import Search
from jaxact._memory import Live, LiveArray
from jaxact._tabular import bytes_text


def message(search: Search, limit: int, budget: object, live: Live) -> str:
    """The smallest compiled step, its memory at the fullest moment, and advice.

    Args:
      live: of that step.
    """
    smallest = search.smallest()
    taken = budgeted(smallest.memory, search.of)
    peak = live.curve.index(live.peak_bytes)
    residuals, gradients = live.residual_curve[peak], live.gradient_curve[peak]
    temporary = smallest.memory.temp_bytes
    split = {
        "residuals": residuals,
        "gradients": gradients,
        "workspace": temporary - residuals - gradients,
    }
    if taken > temporary:
        split["arguments and results"] = taken - temporary
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in split.items())
    bounds = ""
    if math.isfinite(min(search.slowdown, search.noise)):
        bounds = "; allow more slowdown or noise"
    largest = max(split, key=lambda name: split[name])
    return (
        f"jaxact.plan(budget={budget!r}), {bytes_text(limit)}: no policy was found for "
        f"it; compiled steps: {len(search.trials)}. The smallest takes "
        f"{bytes_text(taken)} ({parts}), on {smallest.memory.device}. "
        f"{_advice(largest, search, residuals, live)}{bounds}."
    )


def _advice(largest: str, search: Search, residuals: int, live: Live) -> str:
    outside = search.problem.outside_bytes
    if largest == "residuals" and 2 * outside > residuals:
        return (
            f"{bytes_text(outside)} of residuals are in no compressed call: compress "
            "these layers too"
        )
    return {
        "residuals": "Take a smaller batch, see jaxact.max_batch",
        "gradients": "Donate the step's arguments, and accumulate into the optimizer's "
        "state, layer by layer",
        "arguments and results": "Donate the step's arguments (donate_argnums), or "
        "give a budget of='temp'",
        "workspace": "Take a smaller batch, or compute the loss in chunks; the largest "
        f"arrays at the peak, which jaxact.live lists: {_largest(live)}",
    }[largest]


def _largest(live: Live, count: int = 3) -> str:
    arrays = [row for row in live.rows if row.kind == "temporary"][:count]
    return ", ".join(map(_named, arrays))


def _named(row: LiveArray) -> str:
    return f"{row.type} {row.place}".rstrip()

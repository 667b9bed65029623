"""An integer program: least time and noise with the stored bytes below a bound.

One variable for each option of a row, one for each variant of a call. Rematerialization
as an integer program: Checkmate (Jain et al. 2020, arXiv:1910.02653); here with several
widths for the kept values, and without the order in which things are computed, which is
the compiler's.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxact._budget.problem import Choice, Problem, Solution

# Seconds, and the gap to the best cost that is good enough: far below what the model
# of time and noise is worth.
_TIME_LIMIT = 10.0
_GAP = 1e-3
_MEBIBYTE = 2.0**20


@dataclasses.dataclass
class _Program:
    """Rows of coefficients, gathered entry by entry."""

    entries: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    low: list[float] = dataclasses.field(default_factory=list)
    high: list[float] = dataclasses.field(default_factory=list)

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        number = len(self.low)
        self.entries += [(number, variable, x) for variable, x in terms.items()]
        self.low.append(low)
        self.high.append(high)

    def minimize(self, objective: np.ndarray, last: float) -> np.ndarray | None:
        """The best variables, of which all but the last, up to `last`, are 0 or 1."""
        # Here, because importing jaxact should not take its time.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        rows, columns, values = zip(*self.entries, strict=True)
        size = len(objective)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.low), size))
        upper: Any = np.append(np.ones(size - 1), last)
        low: Any = self.low
        high: Any = self.high
        least: Any = np.zeros(size)
        found = milp(
            objective,
            constraints=LinearConstraint(matrix.tocsr(), low, high),
            integrality=np.append(np.ones(size - 1), 0),
            bounds=Bounds(least, upper),
            options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT},
        )
        return found.x


def solve(
    problem: Problem,
    room: float,
    *,
    slowdown: float = math.inf,
    noise: float = math.inf,
    is_smallest: bool = False,
) -> Solution | None:
    """The cheapest choices that store at most `room` bytes; None: there are none.

    The cost is the added time, as a part of the step's, plus the added variance, as a
    part of the squared gradient: where noise decides about progress, a variance of 1 %
    takes about 1 % more steps.

    Args:
      slowdown, noise: bounds on the two.
      is_smallest: the fewest bytes instead, whatever they cost within the bounds.
    """
    size, variants, options = _numbered(problem)
    transient = size - 1  # the most that a call computed again keeps
    time, added, stored = (np.zeros(size) for _ in range(3))
    program = _Program()
    for call in range(len(problem.calls)):
        program.add({v: 1.0 for (c, _), v in variants.items() if c == call}, 1, 1)
    for (c, n), v in variants.items():
        variant = problem.calls[c].variants[n]
        time[v], added[v] = variant.time, variant.noise
        stored[v] = variant.fixed_bytes / _MEBIBYTE
        if variant.transient_bytes:
            held = variant.transient_bytes / _MEBIBYTE
            program.add({transient: 1.0, v: -held}, 0, np.inf)
        for r, row in enumerate(variant.rows):
            mine = options[c, n, r]
            program.add({x: 1.0 for x in mine} | {v: -1.0}, 0, 0)
            for x, option in zip(mine, row.options, strict=True):
                time[x], added[x] = option.time, option.noise
                stored[x] = option.bytes / _MEBIBYTE
    stored[transient] = 1.0
    bounds = [(stored, (room - problem.outside_bytes) / _MEBIBYTE)]
    bounds += [(time, slowdown), (added, noise)]
    for coefficients, most in bounds:
        if math.isfinite(most):
            program.add(dict(enumerate(coefficients)), -np.inf, most)
    objective = stored + 1e-3 * (time + added) if is_smallest else time + added
    found = program.minimize(objective + 1e-9 * stored, np.inf)
    if found is None:
        return None
    return _read(problem, found, variants, options)


def _numbered(
    problem: Problem,
) -> tuple[int, dict[tuple[int, int], int], dict[tuple[int, int, int], range]]:
    """How many variables there are, and those of variants and options."""
    size = 0
    variants: dict[tuple[int, int], int] = {}
    options: dict[tuple[int, int, int], range] = {}
    for c, call in enumerate(problem.calls):
        for n, variant in enumerate(call.variants):
            variants[c, n] = size
            size += 1
            for r, row in enumerate(variant.rows):
                options[c, n, r] = range(size, size + len(row.options))
                size += len(row.options)
    return size + 1, variants, options


def _read(
    problem: Problem,
    x: np.ndarray,
    variants: dict[tuple[int, int], int],
    options: dict[tuple[int, int, int], range],
) -> Solution:
    choices = []
    for c, call in enumerate(problem.calls):
        numbers = range(len(call.variants))
        n = max(numbers, key=lambda n: x[variants[c, n]])
        variant = call.variants[n]
        chosen = []
        for r, row in enumerate(variant.rows):
            mine = options[c, n, r]
            best = max(range(len(mine)), key=lambda k: x[mine[k]])
            chosen.append(row.options[best])
        choices.append(Choice(call, variant, tuple(chosen)))
    parts = [o for choice in choices for o in choice.options]
    kept = [choice.variant for choice in choices]
    return Solution(
        tuple(choices),
        problem.outside_bytes
        + sum(o.bytes for o in parts)
        + sum(v.fixed_bytes for v in kept)
        + max((v.transient_bytes for v in kept), default=0),
        sum(o.time for o in parts) + sum(v.time for v in kept),
        sum(o.noise for o in parts) + sum(v.noise for v in kept),
    )

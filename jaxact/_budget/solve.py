"""An integer program: least time and noise with the live bytes below a bound.

One variable for each option of a row, one for each variant of a call. Rematerialization
as an integer program: Checkmate (Jain et al. 2020, arXiv:1910.02653); here with several
widths for the kept values, and without the order in which things are computed, which is
the compiler's.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxact._budget.problem import Choice, Problem, Solution, solution_of

# Seconds, and the gap to the best cost that is good enough: far below what the model
# of time and noise is worth. ViT-B's equal blocks take 7 s where the first 2 s find a
# plan that costs 0.2 % more. Where these find none, more follow.
_TIME_LIMIT, _MORE_TIME = 2.0, 20.0
GAP = 1e-3
# For a predicted point of a frontier.
COARSE = 1e-2
_MEBIBYTE = 2.0**20
# The status that scipy's `milp` then gives.
_OUT_OF_TIME = 1


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

    def minimize(
        self, objective: np.ndarray, last: float, gap: float
    ) -> np.ndarray | None:
        """The best variables, of which all but the last, up to `last`, are 0 or 1.

        `gap`: to the best, as a part of it.
        """
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
        for seconds in (_TIME_LIMIT, _MORE_TIME):
            found = milp(
                objective,
                constraints=LinearConstraint(matrix.tocsr(), low, high),
                integrality=np.append(np.ones(size - 1), 0),
                bounds=Bounds(least, upper),
                options={"mip_rel_gap": gap, "time_limit": seconds},
            )
            if found.x is not None or found.status != _OUT_OF_TIME:
                return found.x
        return None


def solve(
    problem: Problem,
    room: float,
    *,
    slowdown: float = math.inf,
    noise: float = math.inf,
    is_smallest: bool = False,
    gap: float = GAP,
) -> Solution | None:
    """The cheapest choices with at most `room` live bytes; None: there are none.

    The cost is the added time, as a part of the step's, plus the added variance, as a
    part of the squared gradient: where noise decides about progress, a variance of 1 %
    takes about 1 % more steps.

    Args:
      slowdown, noise: bounds on the two.
      is_smallest: the fewest live bytes instead, then the fewest stored ones, whatever
        they cost within the bounds.
      gap: to the best, as a part of it, that is good enough.
    """
    size, variants, options = _numbered(problem)
    peak = size - 1  # the most bytes that live at once
    time, added, stored, workspace = (np.zeros(size) for _ in range(4))
    program = _Program()
    for call in range(len(problem.calls)):
        program.add({v: 1.0 for (c, _), v in variants.items() if c == call}, 1, 1)
    for (c, n), v in variants.items():
        variant = problem.calls[c].variants[n]
        time[v], added[v] = variant.time, variant.noise
        stored[v] = variant.fixed_bytes / _MEBIBYTE
        workspace[v] = variant.workspace / _MEBIBYTE
        for r, row in enumerate(variant.rows):
            mine = options[c, n, r]
            program.add({x: 1.0 for x in mine} | {v: -1.0}, 0, 0)
            for x, option in zip(mine, row.options, strict=True):
                time[x], added[x] = option.time, option.noise
                stored[x] = option.bytes / _MEBIBYTE
                workspace[x] = option.workspace / _MEBIBYTE
    _bound_each_call(program, problem, variants, stored, workspace)
    for coefficients, most in ((time, slowdown), (added, noise)):
        if math.isfinite(most):
            program.add(dict(enumerate(coefficients)), -np.inf, most)
    objective = time + added + 1e-9 * stored
    if is_smallest:  # also where another call has the peak, if only by the tables
        objective = 1e-6 * objective + 1e-4 * stored
        objective[peak] = 1.0
    found = program.minimize(objective, room / _MEBIBYTE, gap)
    if found is None:
        return None
    return _read(problem, found, variants, options)


def _bound_each_call(
    program: _Program,
    problem: Problem,
    variants: dict[tuple[int, int], int],
    stored: np.ndarray,
    workspace: np.ndarray,
) -> None:
    """The last variable is at least the live bytes in each call's backward pass."""
    peak = len(stored) - 1
    ends = [variants[c, 0] for c in range(1, len(problem.calls))] + [peak]
    start, gradients = 0, problem.gradient_bytes
    always = problem.outside_bytes
    program.add({peak: 1.0}, (always + gradients) / _MEBIBYTE, np.inf)
    for call, end in zip(problem.calls, ends, strict=True):
        terms = {x: -float(stored[x]) for x in range(end)}
        for x in range(start, end):
            terms[x] -= float(workspace[x])
        program.add(terms | {peak: 1.0}, (always + gradients) / _MEBIBYTE, np.inf)
        start, gradients = end, gradients - call.gradient_bytes


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
    return solution_of(problem, tuple(choices))

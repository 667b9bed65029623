"""The greedy method: steps along a ladder of bits, in order of gain per price.

Minimize the sum over residuals i of c_i S(b_i), see `cost.py`, under a budget for
stored bits (ActNN, Chen et al. 2021, arXiv:2104.14129; GACT, Liu et al. 2022,
arXiv:2206.11357), or the stored bits under a bound on that sum (the aim in AC-GC, Evans
and Aamodt, NeurIPS 2021). As theirs, a greedy takes single steps. Here the same greedy
solves both problems, and does not end at the first step that no longer fits.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

from jaxact._bits.allocation import Allocation
from jaxact._bits.cost import Cost, Sensitivity
from jaxact._bits.widths import ACTIONS, least_bits
from jaxact._bits.worst_case import checked_e2
from jaxact._codec.checks import checked_number
from jaxact._written_as import written_as
from jaxact_kernels.rotated import HALF_BIT

LADDER = (1, 2, 3, 4, 6, 8, 16)

# (gain, price) for each step that a residual may take, in order.
Steps = Sequence[Sequence[tuple[float, float]]]


@written_as("allocate(measured, bits=2)")
def allocate(
    measured: Sensitivity,
    *,
    bits: float | None = None,
    e2: float | None = None,
    ladder: Sequence[float] = LADDER,
) -> Allocation:
    """Choose bits for each residual: least error for a budget, or the reverse.

    Steps along the ladder are taken in order of error per bit, while they fit. S is
    convex in b, also with a last rung that is bfloat16 or exact, so each residual's
    steps come in that order and no rung is ever skipped. The result misses the optimum
    for fractional bits by less than a single residual's single step; with equal sizes
    and consecutive bits in the ladder it is the optimum. N residuals and L rungs take
    O(N L log N), in Python.

    Args:
      measured: the residuals and their costs.
      bits: budget: average over the elements in all rows, scales and zero points not
        counted.
      e2: bound on the added variance, all rows together, as a fraction of the
        gradient's squared norm; the fewest bits that keep it. The split is global: a
        share that some residual does not need another may use.
      ladder: the bits to choose from: 1 to 8 (in the format that was measured), 16
        (bfloat16; exact for residuals that have 16) and 32 (exact); and 0.5, in
        `Rotated` and `Adaptive` and where `Cost.is_linear`, which is 1 for others. A
        residual whose variance is not finite stays exact in any case. bfloat16 counts
        as for values around zero: slopes near one err four times as much or more, so
        below `e2=1e-5` leave 16 out.

    Raises:
      ValueError: both or neither given, `bits` and `e2`; one out of range; an empty
        table; a ladder with other widths; a budget below, or a bound beyond, the
        reach that the ladder has.

    Example:
      >>> import jaxact
      >>> cheap = jaxact.Cost('a', 100, 4, variance=1.0, signal=1.0, bits=2)
      >>> dear = jaxact.Cost('b', 100, 4, variance=1000.0, signal=1.0, bits=2)
      >>> table = jaxact.Sensitivity((cheap, dear), signal=1.0)
      >>> jaxact.allocate(table, bits=4).bits
      (('a', 2), ('b', 6))
    """
    check_arguments("allocate", measured, bits, e2)
    widths = _widths(ladder)
    rungs = [_rungs(row, widths) for row in measured.rows]
    if bits is not None:
        positions = _rise(measured, rungs, bits)
    else:
        assert e2 is not None
        positions = _descend(measured, rungs, e2)
    chosen = zip(measured.rows, rungs, positions, strict=True)
    return Allocation(tuple((row.key, r[i]) for row, r, i in chosen), measured)


def _rungs(row: Cost, widths: Sequence[float]) -> list[float]:
    """The widths for one residual, ascending.

    Its own width stands for all above, its least for all below.
    """
    if not math.isfinite(row.variance):
        return [row.exact_bits]
    least = least_bits(row.action) if row.is_linear else 1
    return sorted({min(max(b, least), row.exact_bits) for b in widths})


def _rise(
    measured: Sensitivity, rungs: Sequence[Sequence[float]], bits: float
) -> list[int]:
    """Positions on the ladders, from the bottom up while the budget lasts."""
    rows = measured.rows
    elements = sum(row.size for row in rows)
    least = sum(row.size * r[0] for row, r in zip(rows, rungs, strict=True))
    # A budget like 2.3 * 100 elements is 230 bits, not 229.99999999999997.
    budget = math.floor(bits * elements + 1e-6) - least
    if budget < 0:
        exact = [row.key for row in rows if not math.isfinite(row.variance)]
        because = f" ({', '.join(exact)} must stay exact)" if exact else ""
        raise ValueError(
            f"allocate(bits={bits}): at least {least / elements:.4g} bits on average "
            f"are required{because}. Give more bits, or a ladder with fewer."
        )
    steps = [
        [
            (row.error(low) - row.error(high), row.size * (high - low))
            for low, high in zip(r, r[1:], strict=False)
        ]
        for row, r in zip(rows, rungs, strict=True)
    ]
    return _take_best(steps, budget)


def _descend(
    measured: Sensitivity, rungs: Sequence[Sequence[float]], e2: float
) -> list[int]:
    """Positions on the ladders, from the top down while the error bound lasts."""
    rows = measured.rows
    least = sum(row.error(r[-1]) for row, r in zip(rows, rungs, strict=True))
    slack = e2 * measured.signal - least
    if not slack >= 0:  # also a signal that is not a number
        raise ValueError(
            f"allocate(e2={e2}): the ladder's highest bits already add {least:.3g} "
            f"to a squared gradient of {measured.signal:.3g}. Give a larger e2, or 32 "
            "(exact) in the ladder."
        )
    steps = [
        [
            (row.size * (high - low), row.error(low) - row.error(high))
            for low, high in zip(r[-2::-1], r[:0:-1], strict=True)
        ]
        for row, r in zip(rows, rungs, strict=True)
    ]
    counts = _take_best(steps, slack)
    return [len(r) - 1 - down for r, down in zip(rungs, counts, strict=True)]


def _take_best(steps: Steps, budget: float) -> list[int]:
    """Number of steps that each row takes: most gain per price first, while they fit.

    Args:
      steps: (gain, price) for a row's steps, in order, gain per price descending.
      budget: the price that may be spent in total.
    """
    counts = [0] * len(steps)
    heap: list[tuple[float, int, int]] = []

    def offer(row: int) -> None:
        if counts[row] < len(steps[row]):
            gain, price = steps[row][counts[row]]
            worth = gain / price if price > 0 else math.inf
            # Equal steps are taken evenly: all first ones before any second one.
            heapq.heappush(heap, (-worth, counts[row], row))

    for row in range(len(steps)):
        offer(row)
    while heap:
        _, _, row = heapq.heappop(heap)
        price = steps[row][counts[row]][1]
        if price <= budget:
            budget -= price
            counts[row] += 1
            offer(row)
    return counts


def check_arguments(
    caller: str, measured: Sensitivity, bits: float | None, e2: float | None
) -> None:
    """Refuse the arguments with which `allocate` and `reallocate` choose no bits."""
    if not isinstance(measured, Sensitivity):
        raise TypeError(
            f"{caller}({type(measured).__name__}): the costs that jaxact.sensitivity "
            "or telemetry's report.sensitivity() measures are required."
        )
    if not measured.rows:
        raise ValueError(
            f"{caller}: the table of costs is empty; at least one residual must be "
            "measured."
        )
    if (bits is None) == (e2 is None):
        raise ValueError(
            f"{caller}(bits={bits}, e2={e2}): exactly one is required: bits, an "
            "average budget, or e2, a bound on the added variance."
        )
    if bits is not None:
        checked_number(
            bits,
            lambda x: 0 < x <= 32,
            f"{caller}(bits={bits!r}): an average above 0 and at most 32 is required, "
            "such as 2.",
        )
    if e2 is not None:
        checked_e2(f"{caller}(e2=", e2)


def _widths(ladder: Sequence[float]) -> list[float]:
    widths = tuple(ladder) if isinstance(ladder, Iterable) else ()
    is_width = [b in (HALF_BIT, *ACTIONS) and b is not True for b in widths]
    if not widths or not all(is_width):
        raise ValueError(
            f"allocate(ladder={ladder!r}): 0.5, bits from 1 to 8, 16 (bfloat16) "
            "and 32 (exact) are required, such as ladder=(1, 2, 4, 8)."
        )
    return sorted(set(widths))

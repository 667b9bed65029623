"""Bits for each residual, from what rounding it was measured to cost.

Minimize the sum of c_i S(b_i), S(b) = (2^b - 1)^-2, under a budget of stored bits
(ActNN, Chen et al. 2021, arXiv:2104.14129; GACT, Liu et al. 2022, arXiv:2206.11357), or
the stored bits under a bound on that sum (AC-GC's aim, Evans and Aamodt, NeurIPS 2021).
As theirs, a greedy takes single steps along a ladder of bits. Here one greedy solves
both problems, and does not end at the first step that no longer fits.
"""

import dataclasses
import heapq
import logging
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jaxact._bits.cost import Cost, Sensitivity, relative_text
from jaxact._codec import Action, Cast, Exact, Quantize
from jaxact._policy import Policy, Rule
from jaxact._tabular import Column, Tabular

LADDER = (1, 2, 3, 4, 6, 8, 16)
# By how much a kept allocation may miss its budget or its bound: a measurement of a few
# draws is no better than this.
TOLERANCE = 0.1

# (gain, price) of each step that a residual may take, in order.
Moves = Sequence[Sequence[tuple[float, float]]]

_log = logging.getLogger("jaxact")


def action_of(bits: int) -> Action:
    """Quantize(bits) up to 8, Cast(bfloat16) up to 16, Exact() beyond."""
    if bits > 16:
        return Exact()
    return Quantize(bits) if bits <= 8 else Cast(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Allocation(Tabular):
    """How many bits each residual gets: `print` it, or make a `policy` of it.

    Attributes:
      bits: (key, bits per element) for each row of `measured`; all the bits that an
        element has mean exact.
      measured: what it was computed from.
    """

    bits: tuple[tuple[str, int], ...]
    measured: Sensitivity

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", tuple((k, b) for k, b in self.bits))
        keys = [key for key, _ in self.bits]
        if sorted(keys) != sorted(row.key for row in self.measured.rows):
            raise ValueError(
                f"Allocation(bits={self.bits!r}): one entry for each row of `measured` "
                f"is required: {[row.key for row in self.measured.rows]}."
            )

    @property
    def average_bits(self) -> float:
        """Stored bits per element, without scales and zero points."""
        return _average_bits(self.measured, dict(self.bits))

    @property
    def error(self) -> float:
        """The gradient variance it is predicted to add."""
        return self.measured.error(dict(self.bits))

    @property
    def relative_error(self) -> float:
        """`error` over the squared norm of the gradient."""
        return self.error / self.measured.signal if self.error else 0.0

    def policy(
        self,
        base: Policy | None = None,
        action: Callable[[int], Action] = action_of,
    ) -> Policy:
        """`base` with a rule for each residual.

        The rules of `base` come first, so that what the user asked for by name stands;
        its bits or default decide what was not measured. Extend the same `base` each
        time, not the policy of an earlier allocation, whose rules would win.

        Args:
          base: `Policy()` when None.
          action: what stores a residual at so many bits; 32 asks for exact.
        """
        base = Policy() if base is None else base
        exact = {row.key: row.exact_bits for row in self.measured.rows}
        rules = tuple(
            Rule(action(32 if bits >= exact[key] else bits), key=key)
            for key, bits in self.bits
        )
        return dataclasses.replace(base, rules=(*base.rules, *rules))

    def changes(self, other: "Allocation") -> tuple[str, ...]:
        """What differs in `other`: lines such as 'Net/block0/dot_general: 2 -> 4 bits'.

        Example:
          >>> from jaxact._bits.cost import Cost
          >>> table = Sensitivity((Cost('a', 100, 4, 1.0, 1.0, 2),), signal=1.0)
          >>> two, four = (allocate(table, bits=b) for b in (2, 4))
          >>> two.changes(four)
          ('a: 2 -> 4 bits',)
        """
        before, after = dict(self.bits), dict(other.bits)
        lines = []
        for key in dict.fromkeys((*before, *after)):
            if key not in after:
                lines.append(f"{key}: gone")
            elif key not in before:
                lines.append(f"{key}: new, {after[key]} bits")
            elif before[key] != after[key]:
                lines.append(f"{key}: {before[key]} -> {after[key]} bits")
        return tuple(lines)

    def summary(self) -> str:
        """The average, and the error that is predicted."""
        return (
            f"{self.average_bits:.3g} bits on average; predicted to add "
            f"{self.error:.3g} to a squared gradient of {self.measured.signal:.3g}"
        )

    def _table(self) -> tuple[list[Column[Cost]], tuple[Cost, ...]]:
        chosen, signal = dict(self.bits), self.measured.signal
        error = lambda row: row.error(chosen[row.key])
        columns: list[Column[Cost]] = [
            Column("key", lambda row: row.key),
            Column("elements", lambda row: f"{row.size:,}", is_number=True),
            Column("bits", lambda row: str(chosen[row.key]), is_number=True),
            Column("error", lambda row: f"{error(row):.3g}", is_number=True),
            Column(
                "relative",
                lambda row: relative_text(error(row), signal),
                is_number=True,
            ),
        ]
        return columns, self.measured.rows


def allocate(
    measured: Sensitivity,
    *,
    bits: float | None = None,
    e2: float | None = None,
    ladder: Sequence[int] = LADDER,
) -> Allocation:
    """Choose the bits of each residual: least error for a budget, or the reverse.

    Steps along the ladder are taken in order of error per bit, while they fit. S is
    convex in b, also with a last rung that is bfloat16 or exact, so each residual's
    steps come in that order and no rung is ever skipped. The result misses the optimum
    of the relaxed (fractional) problem by less than one step of one residual; with
    equal sizes and a ladder of consecutive bits it is the optimum. N residuals and L
    rungs take O(N L log N), in Python.

    Args:
      measured: the residuals and their costs.
      bits: budget: average over the elements of all rows, scales and zero points not
        counted.
      e2: bound on the added variance, all rows together, as a part of the squared
        norm of the gradient; the fewest bits that keep it. The split is global: what
        one residual does not need another may use.
      ladder: the bits to choose from: 1 to 8 (Quantize), 16 (bfloat16; exact for what
        has 16) and 32 (exact). A residual whose variance is not finite stays exact
        in any case.

    Raises:
      ValueError: not exactly one of `bits` and `e2`; one out of range; an empty table;
        a ladder with other widths; a budget below, or a bound beyond, what the ladder
        can do.

    Example:
      >>> from jaxact._bits.cost import Cost
      >>> table = Sensitivity(
      ...     (Cost('a', 100, 4, 1.0, 1.0, 2), Cost('b', 100, 4, 1000.0, 1.0, 2)), 1.0)
      >>> allocate(table, bits=4).bits
      (('a', 2), ('b', 6))
    """
    _require_one(measured, bits, e2)
    widths = _widths(ladder)
    rungs = [_rungs(row, widths) for row in measured.rows]
    if bits is not None:
        taken = _rise(measured, rungs, bits)
    else:
        assert e2 is not None
        taken = _descend(measured, rungs, e2)
    chosen = zip(measured.rows, rungs, taken, strict=True)
    return Allocation(tuple((row.key, r[i]) for row, r, i in chosen), measured)


def reallocate(
    current: Allocation,
    measured: Sensitivity,
    *,
    gain: float = 0.25,
    bits: float | None = None,
    e2: float | None = None,
    ladder: Sequence[int] = LADDER,
) -> Allocation:
    """Allocate anew where it pays, else return `current` itself.

    Bits are part of the compiled step, so a change costs a compilation. `current` stays
    unless it lacks a measured residual, or misses the budget or the bound by more than
    10 %, or a new allocation has at least `gain` less error (for `bits`) or stored bits
    (for `e2`). A measurement without any finite number, such as that of a step that
    overflowed, changes nothing. Changes are logged by the logger 'jaxact' (INFO).

    In a training loop, every K steps::

        measured = measured.merge(new_measurement, 0.9)
        after = jaxact.reallocate(allocation, measured, bits=2)
        if after is not allocation:
            allocation, step = after, make_step(after.policy(base))

    Args:
      current: the allocation in use.
      measured: a later measurement.
      gain: least relative gain that is worth a change.
      bits, e2, ladder: as in `allocate`.

    Raises:
      ValueError: as `allocate`; gain outside [0, 1).
    """
    if not 0 <= gain < 1:
        raise ValueError(
            f"reallocate(gain={gain!r}): a fraction from 0 to below 1 is required."
        )
    finite = [math.isfinite(row.variance) for row in measured.rows]
    if finite and not (any(finite) and math.isfinite(measured.signal)):
        _log.info("jaxact: nothing finite was measured, the bits stay as they are")
        return current
    proposed = allocate(measured, bits=bits, e2=e2, ladder=ladder)
    lines = current.changes(proposed)
    if not lines or not _is_worth_it(current, proposed, gain, bits, e2):
        return current
    _log.info("jaxact: bits change\n%s", "\n".join(lines))
    return proposed


def _is_worth_it(
    current: Allocation,
    proposed: Allocation,
    gain: float,
    bits: float | None,
    e2: float | None,
) -> bool:
    measured, before = proposed.measured, dict(current.bits)
    if any(row.key not in before for row in measured.rows):
        return True
    average, error = _average_bits(measured, before), measured.error(before)
    if bits is not None:
        limit, used = bits, average
        old, new = error, proposed.error
    else:
        assert e2 is not None
        limit, used = e2 * measured.signal, error
        old, new = average, proposed.average_bits
    return used > limit * (1 + TOLERANCE) or (old > new and old - new >= gain * old)


def _average_bits(measured: Sensitivity, bits: dict[str, int]) -> float:
    stored = sum(row.size * bits[row.key] for row in measured.rows)
    return stored / max(1, sum(row.size for row in measured.rows))


def _rungs(row: Cost, widths: Sequence[int]) -> list[int]:
    """The widths for one residual, ascending; its own width stands for all above."""
    if not math.isfinite(row.variance):
        return [row.exact_bits]
    return sorted({min(b, row.exact_bits) for b in widths})


def _rise(
    measured: Sensitivity, rungs: Sequence[Sequence[int]], bits: float
) -> list[int]:
    """Places on the ladders, from the bottom up while the budget of bits lasts."""
    rows = measured.rows
    elements = sum(row.size for row in rows)
    least = sum(row.size * r[0] for row, r in zip(rows, rungs, strict=True))
    # A budget such as 2.3 * 100 elements is 230 bits, not 229.99999999999997.
    left = math.floor(bits * elements + 1e-6) - least
    if left < 0:
        exact = [row.key for row in rows if not math.isfinite(row.variance)]
        because = f" ({', '.join(exact)} must stay exact)" if exact else ""
        raise ValueError(
            f"allocate(bits={bits}): at least {least / elements:.4g} bits on average "
            f"are required{because}. Give more bits, or a ladder with fewer."
        )
    moves = [
        [
            (row.error(low) - row.error(high), row.size * (high - low))
            for low, high in zip(r, r[1:], strict=False)
        ]
        for row, r in zip(rows, rungs, strict=True)
    ]
    return _take_best(moves, left)


def _descend(
    measured: Sensitivity, rungs: Sequence[Sequence[int]], e2: float
) -> list[int]:
    """Places on the ladders, from the top down while the bound on the error lasts."""
    rows = measured.rows
    least = sum(row.error(r[-1]) for row, r in zip(rows, rungs, strict=True))
    left = e2 * measured.signal - least
    if not left >= 0:  # also a signal that is not a number
        raise ValueError(
            f"allocate(e2={e2}): the ladder's highest bits already add {least:.3g} "
            f"to a squared gradient of {measured.signal:.3g}. Give a larger e2, or 32 "
            "(exact) in the ladder."
        )
    moves = [
        [
            (row.size * (high - low), row.error(low) - row.error(high))
            for low, high in zip(r[-2::-1], r[:0:-1], strict=True)
        ]
        for row, r in zip(rows, rungs, strict=True)
    ]
    taken = _take_best(moves, left)
    return [len(r) - 1 - down for r, down in zip(rungs, taken, strict=True)]


def _take_best(moves: Moves, left: float) -> list[int]:
    """How many moves of each row to make: most gain per price first, while they fit.

    Args:
      moves: (gain, price) of a row's moves, in order, gain per price descending.
      left: what may be spent.
    """
    taken = [0] * len(moves)
    heap: list[tuple[float, int, int]] = []

    def offer(row: int) -> None:
        if taken[row] < len(moves[row]):
            gain, price = moves[row][taken[row]]
            worth = gain / price if price > 0 else math.inf
            # Equal moves are made evenly: all first ones before any second one.
            heapq.heappush(heap, (-worth, taken[row], row))

    for row in range(len(moves)):
        offer(row)
    while heap:
        _, _, row = heapq.heappop(heap)
        price = moves[row][taken[row]][1]
        if price <= left:
            left -= price
            taken[row] += 1
            offer(row)
    return taken


def _require_one(measured: Sensitivity, bits: float | None, e2: float | None) -> None:
    if not measured.rows:
        raise ValueError(
            "allocate: the table of costs is empty; at least one residual must be "
            "measured."
        )
    if (bits is None) == (e2 is None):
        raise ValueError(
            f"allocate(bits={bits}, e2={e2}): exactly one is required: bits, an "
            "average budget, or e2, a bound on the added variance."
        )
    if bits is not None and not 0 < bits <= 32:
        raise ValueError(
            f"allocate(bits={bits}): an average above 0 and at most 32 is required."
        )
    if e2 is not None and not 0 < e2 < math.inf:
        raise ValueError(
            f"allocate(e2={e2}): a positive fraction of the squared gradient is "
            "required, such as 0.1."
        )


def _widths(ladder: Sequence[int]) -> list[int]:
    legal = (*range(1, 9), 16, 32)
    if not ladder or any(b not in legal for b in ladder):
        raise ValueError(
            f"allocate(ladder={tuple(ladder)}): bits from 1 to 8, 16 (bfloat16) and 32 "
            "(exact) are required."
        )
    return sorted(set(ladder))

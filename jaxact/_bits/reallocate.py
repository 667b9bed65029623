"""Bits from a later measurement, where a change pays for its compilation."""

import logging
import math
from collections.abc import Sequence

from jaxact._bits.allocation import Allocation
from jaxact._bits.cost import Sensitivity
from jaxact._bits.greedy import LADDER, allocate, check_arguments
from jaxact._codec.checks import checked_kind, checked_number
from jaxact._written_as import written_as

# By how much a kept allocation may miss its budget or its bound: a measurement from a
# few draws is no better than this.
TOLERANCE = 0.1

_log = logging.getLogger("jaxact")


@written_as("reallocate(allocation, measured, bits=2)")
def reallocate(
    current: Allocation,
    measured: Sensitivity,
    *,
    gain: float = 0.25,
    bits: float | None = None,
    e2: float | None = None,
    ladder: Sequence[float] = LADDER,
) -> Allocation:
    """Allocate anew where it pays, else return `current` itself.

    Bits are part of the compiled step, so a change costs a compilation. `current` stays
    unless it lacks a measured residual, or misses the budget or the bound by more than
    10 %, or a new allocation has at least `gain` less error (for `bits`) or stored bits
    (for `e2`). A measurement without any finite number, as from a step that overflowed,
    changes nothing. Changes are logged by the logger 'jaxact' (INFO).

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
      TypeError: no allocation, or no measurement.
      ValueError: as `allocate`; gain outside [0, 1).
    """
    call = f"reallocate({type(current).__name__}, {type(measured).__name__}, ...)"
    required = (
        f"{call}: the allocation in use and a later measurement are required: "
        "reallocate(allocation, jaxact.sensitivity(loss, ...), bits=2)."
    )
    checked_kind(current, Allocation, required)
    checked_kind(measured, Sensitivity, required)
    checked_number(
        gain,
        lambda x: 0 <= x < 1,
        f"reallocate(gain={gain!r}): a fraction from 0 to below 1 is required, such "
        "as 0.25.",
    )
    check_arguments("reallocate", measured, bits, e2)
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
    average, error = measured.average_bits(before), measured.error(before)
    if bits is not None:
        limit, used = bits, average
        old, new = error, proposed.error
    else:
        assert e2 is not None
        limit, used = e2 * measured.signal, error
        old, new = average, proposed.average_bits
    return used > limit * (1 + TOLERANCE) or (old > new and old - new >= gain * old)

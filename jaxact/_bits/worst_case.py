"""Bits for an error bound by formula, when nothing was measured: matrix products and
convolutions.

AC-GC (Evans and Aamodt, NeurIPS 2021) bounds the harm that an adversary could do to the
weight gradient with errors up to D in the elements that are stored. Rounding is no
adversary: stochastic rounding adds a variance known exactly, and asks far fewer bits.
Both are for e2, the error that may be added, as a fraction of the weight gradients'
squared norm; AC-GC's published code allows e2 / 2 for convolutions and 2 e2 for linear
layers.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxact._codec.checks import checked_number

# The widest code; beyond it use Exact().
MOST_BITS = 16


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One product or convolution that reads a stored array for its weight gradient.

    Attributes:
      weight: its weight gradient's squared norm.
      output: squared norm of the gradient at its output.
      fan_in: input elements in one output element: C for a linear layer, C R S / groups
        for a convolution with an R x S kernel.
      positions: places the weight is used at: N input rows for a linear layer, N P Q
        output pixels for a convolution. (AC-GC's N H W / T^2 for a stride T is less
        where T does not divide H, and then guarantees nothing.)
    """

    weight: float
    output: float
    fan_in: int
    positions: int


def acgc_worst_case(
    e2: float,
    consumers: Sequence[Consumer],
    range_: float,
    *,
    stochastic: bool = False,
) -> int:
    """Bits with which no error within a step can exceed e2, whatever its pattern.

    By Cauchy-Schwarz errors up to D in the elements move each weight gradient by at
    most D^2 positions fan_in ||gy||^2 (squared), so
    D^2 = e2 sum_i ||gW_i||^2 / sum_i positions_i fan_in_i ||gy_i||^2.

    Args:
      e2: allowed squared error, relative to the consumers' squared weight gradients.
      consumers: all that read the array.
      range_: largest minus smallest value in a group.
      stochastic: the error is up to a step, not half a step.

    Returns:
      1 to 16; 16 also where no integer code is fine enough and it must stay exact.
    """
    bound = _allowed(e2, consumers, worst=True)
    largest_error = 1.0 if stochastic else 0.5
    return _bits(range_, math.sqrt(bound) / largest_error)


def stochastic_bits(e2: float, consumers: Sequence[Consumer], range_: float) -> int:
    """Bits with which stochastic rounding adds e2 to the weight gradient, expected.

    Independent zero-mean errors with variance v add v fan_in ||gy||^2 to the squared
    weight gradient, so v = e2 sum_i ||gW_i||^2 / sum_i fan_in_i ||gy_i||^2; steps d
    have v = d^2 / 6, averaged over where values fall between codes. That is
    log2(6 positions) / 2 bits fewer than `acgc_worst_case` asks for the same rounding.

    Args, Returns: as `acgc_worst_case`.
    """
    return _bits(range_, math.sqrt(6 * _allowed(e2, consumers, worst=False)))


def checked_e2(argument: str, e2: object) -> float:
    """Added variance over the squared gradient; `argument` begins a message.

    Raises:
      ValueError: not a positive number.
    """
    return checked_number(
        e2,
        lambda x: 0 < x < math.inf,
        f"{argument}{e2!r}): a positive fraction of the squared gradient is required, "
        "such as 0.1.",
    )


def _allowed(e2: float, consumers: Sequence[Consumer], worst: bool) -> float:
    """The squared error per element that adds e2; infinite if nothing is added."""
    checked_e2("acgc_worst_case or stochastic_bits(e2=", e2)
    reach = sum(c.output * c.fan_in * (c.positions if worst else 1) for c in consumers)
    return e2 * sum(c.weight for c in consumers) / reach if reach else math.inf


def _bits(range_: float, step: float) -> int:
    """The fewest bits whose steps are no longer than `step`."""
    enough = (b for b in range(1, MOST_BITS) if range_ <= step * (2**b - 1))
    return next(enough, MOST_BITS)

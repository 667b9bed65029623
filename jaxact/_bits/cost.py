"""The cost of rounding: the gradient variance that each stored residual adds.

Stochastic rounding to b-bit codes has steps R / (2^b - 1) in a group with range R, so
the variance it adds to the gradient is a number for the residual, its `variance`, times
S(b) = (2^b - 1)^-2 (ActNN, Chen et al. 2021, arXiv:2104.14129; GACT, Liu et al. 2022,
arXiv:2206.11357). Rotated groups are normal, whatever they were, and S(b) is the error
that the best levels have for these: a bit is worth a factor of 4 instead of 9 at first.
Residuals are rounded independently, so their variances add up.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxact._codec import Action, Adaptive, Dithered, Rotated
from jaxact._codec.checks import checked_kind, checked_number
from jaxact._saved import Saved
from jaxact._tabular import Column, Tabular
from jaxact_kernels.rotated.group import HALF_BIT, NORMAL_ERROR

# Rounding normal values to b bits, in groups of 256 with range R, adds this multiple of
# S(b) to their variance 1: the mean of R^2 / 6, as for values anywhere in a step. At 1
# bit it is 7.07, as they are near the middle of the only step.
NORMAL_GROUP = 5.38
# Of the same values in bfloat16, with 8 significant bits: as if codes had 10.5 bits,
# and far more than (2^16 - 1)^-2.
_BFLOAT16_ERROR = 2.76e-6


def levels_variance(bits: float | str, action: Action | None = None) -> float:
    """S(b), the factor on a residual's `variance` at b bits; S(1) is 1.

    (2^b - 1)^-2, and for the rotated formats the squared error of normal values. From 9
    to 16 bits are bfloat16; more, or 'exact', add nothing.

    Args:
      bits: an element's: an integer, or 0.5 in a rotated format.
      action: the format up to 8 bits; None: `Quantize`.
    """
    if bits == "exact":
        return 0.0
    is_half = bits == HALF_BIT and isinstance(action, Rotated)
    if isinstance(bits, str) or not (is_half or (bits >= 1 and bits == int(bits))):
        raise ValueError(
            f"levels_variance({bits!r}, {action}): bits must be an integer of at least "
            "1, 'exact', or, for Rotated and Adaptive, 0.5."
        )
    if bits > 16:
        return 0.0
    error = _BFLOAT16_ERROR if bits > 8 else _normal_error(bits, action)
    return error / _normal_error(1, action)


def _normal_error(bits: float, action: Action | None) -> float:
    """The squared error of normal values with variance 1, in groups of 256.

    For `Quantize` and `Dithered` as if values were anywhere in a step (`NORMAL_GROUP`).
    """
    rounded = NORMAL_GROUP * (2**bits - 1) ** -2
    dithered = rounded / 2  # a twelfth of a squared step instead of a sixth
    if isinstance(action, Adaptive) and bits != HALF_BIT:
        return min(NORMAL_ERROR[bits], dithered)
    if isinstance(action, Rotated):
        return NORMAL_ERROR[bits]
    return dithered if isinstance(action, Dithered) else rounded


@dataclasses.dataclass(frozen=True)
class Cost(Saved):
    """The gradient variance that storing one residual adds.

    Attributes:
      key: the residual's (`Residual.key`).
      size: elements, over all copies; a complex one counts as two real ones.
      itemsize: bytes per element when exact.
      variance: stored at b bits, the residual adds variance * S(b) to the gradient:
        the error's expected squared norm. S(1) is 1, and S is that of the format in
        `action`. Where it is not finite, the residual must stay exact.
      signal: squared norm that the gradient has to which the error is added.
      bits: an element's when it was measured; None for a formula.
      action: with which it was measured; an allocation keeps its format. None: an
        allocation takes `Quantize`.
      is_linear: whether the gradient is linear in it, as not in values that a softmax
        or a norm makes. Where it is not, products of two errors add to `error` below a
        bit: the exponentials of a small transformer added 31 times the signal at half
        a bit, and not 0.8 as 2 bits foretold.
    """

    key: str
    size: int
    itemsize: int
    variance: float
    signal: float
    bits: float | None
    action: Action | None = None
    is_linear: bool = True

    @property
    def exact_bits(self) -> int:
        """Bits that an uncompressed element has; so many store it exactly."""
        return 8 * self.itemsize

    def error(self, bits: float) -> float:
        """The variance that storing at `bits` adds; infinite where it is unknown."""
        if bits >= self.exact_bits:
            return 0.0
        if not math.isfinite(self.variance):
            return math.inf
        return self.variance * levels_variance(bits, self.action)


@dataclasses.dataclass(frozen=True)
class Sensitivity(Tabular):
    """The gradient variance that storing each residual adds: `print` it.

    Attributes:
      rows: one `Cost` for each residual measured.
      signal: the whole gradient's squared norm.
      unmeasured: keys for residuals that have no row; a policy made from this leaves
        them to its base.

    Raises:
      ValueError: two rows have the same key.

    Example:
      >>> import jaxact
      >>> row = jaxact.Cost('a', 100, 4, variance=9.0, signal=2.0, bits=2)
      >>> table = jaxact.Sensitivity((row,), signal=2.0)
      >>> table.error({'a': 2})
      1.0
      >>> print(table)
      key  elements  bits  error  relative
      a         100     2      1       0.5
    """

    rows: tuple[Cost, ...]
    signal: float
    unmeasured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "unmeasured", tuple(self.unmeasured))
        keys = [row.key for row in self.rows]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise ValueError(
                f"Sensitivity(rows=...) with several rows of the key {repeated[0]!r}: "
                "keys must be distinct. Use Sensitivity.merge to average measurements."
            )

    def error(self, bits: Mapping[str, float]) -> float:
        """The variance added in total when each key is stored at its bits.

        Raises:
          ValueError: a row's key is not in `bits`.
        """
        missing = [row.key for row in self.rows if row.key not in bits]
        if missing:
            raise ValueError(
                f"Sensitivity.error: bits for {', '.join(missing)} are required too; "
                "32 stands for exact."
            )
        return sum(row.error(bits[row.key]) for row in self.rows)

    def average_bits(self, bits: Mapping[str, float]) -> float:
        """Stored bits per element when each key is stored at its bits."""
        stored = sum(row.size * bits[row.key] for row in self.rows)
        return stored / max(1, sum(row.size for row in self.rows))

    def merge(self, other: "Sensitivity", momentum: float) -> "Sensitivity":
        """Average with a later measurement: momentum * self + (1 - momentum) * other.

        Per key; a row that only one has is kept, so graphs may change. Where either
        is not finite the later counts alone. Sizes and bits are the later's.

        Raises:
          TypeError: `other` is no Sensitivity.
          ValueError: momentum outside [0, 1].
        """
        checked_kind(
            other,
            Sensitivity,
            f"Sensitivity.merge({type(other).__name__}, ...): a later Sensitivity is "
            "required, such as of another call of jaxact.sensitivity.",
        )
        checked_number(
            momentum,
            lambda x: 0 <= x <= 1,
            f"Sensitivity.merge(momentum={momentum!r}): a weight from 0 (later "
            "only) to 1 (earlier only) is required.",
        )

        def mean(earlier: float, later: float) -> float:
            if not (math.isfinite(earlier) and math.isfinite(later)):
                return later
            return momentum * earlier + (1 - momentum) * later

        rows = {row.key: row for row in self.rows}
        for row in other.rows:
            before = rows.get(row.key, row)
            rows[row.key] = dataclasses.replace(
                row,
                variance=mean(before.variance, row.variance),
                signal=mean(before.signal, row.signal),
            )
        rowless = dict.fromkeys((*self.unmeasured, *other.unmeasured))
        unmeasured = tuple(key for key in rowless if key not in rows)
        signal = mean(self.signal, other.signal)
        return Sensitivity(tuple(rows.values()), signal, unmeasured)

    def summary(self) -> str:
        """The keys that were not measured."""
        if not self.unmeasured:
            return ""
        return f"not measured: {', '.join(self.unmeasured)}"

    def _table(self) -> tuple[list[Column[Cost]], tuple[Cost, ...]]:
        """Errors are at a row's bits; '-', a formula: at one bit."""
        return _COLUMNS, self.rows


def relative(error: float, signal: float) -> float:
    """An error over a signal; where there is no signal, infinite unless it is 0."""
    if error == 0:
        return 0.0
    return error / signal if signal else math.inf


def relative_text(error: float, signal: float) -> str:
    """An error as a fraction of a signal; '-' without a signal."""
    return f"{error / signal:.3g}" if signal > 0 else "-"


def _bits_text(row: Cost) -> str:
    if not math.isfinite(row.variance):
        return "exact"
    return "-" if row.bits is None else f"{row.bits:g}"


def _error_text(row: Cost) -> str:
    if not math.isfinite(row.variance):
        return str(row.variance)
    return f"{row.error(row.bits or 1):.3g}"


def _relative_text(row: Cost) -> str:
    if not math.isfinite(row.variance):
        return "must stay exact"
    return relative_text(row.error(row.bits or 1), row.signal)


_COLUMNS: list[Column[Cost]] = [
    Column("key", lambda row: row.key),
    Column("elements", lambda row: f"{row.size:,}", is_number=True),
    Column("bits", _bits_text, is_number=True),
    Column("error", _error_text, is_number=True),
    Column("relative", _relative_text, is_number=True),
]

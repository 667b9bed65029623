"""A number of bits for each measured residual, as a table and as a policy."""

import dataclasses
from collections.abc import Callable

from jaxact._bits.cost import Cost, Sensitivity, relative, relative_text
from jaxact._bits.widths import EXACT, action_of
from jaxact._codec import Action
from jaxact._codec.checks import checked_kind
from jaxact._policy import Policy, Rule
from jaxact._tabular import Column, Tabular


@dataclasses.dataclass(frozen=True)
class Allocation(Tabular):
    """How many bits each residual gets: `print` it, or make a `policy` from it.

    Attributes:
      bits: (key, bits per element) for each row in `measured`; as many bits as an
        element has mean exact.
      measured: the costs that it was computed from.

    Raises:
      ValueError: the keys in `bits` are not those in `measured`.
    """

    bits: tuple[tuple[str, float], ...]
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
        return self.measured.average_bits(dict(self.bits))

    @property
    def error(self) -> float:
        """The gradient variance that it is predicted to add."""
        return self.measured.error(dict(self.bits))

    @property
    def relative_error(self) -> float:
        """`error` over the gradient's squared norm; infinite where that alone is 0."""
        return relative(self.error, self.measured.signal)

    def policy(
        self,
        base: Policy | None = None,
        action: Callable[[float], Action] | None = None,
    ) -> Policy:
        """`base` with a rule for each residual.

        The rules that `base` has come first, so that wishes by name stand; its bits or
        default decide for residuals that were not measured. Extend the same `base` each
        time, not the policy from an earlier allocation, whose rules would win.

        Args:
          base: `Policy()` when None.
          action: the action that stores a residual at so many bits; 32 asks for exact.
            None: the format that the residual was measured with.

        Raises:
          TypeError: `base` is no policy.
        """
        base = checked_kind(
            Policy() if base is None else base,
            Policy,
            f"Allocation.policy({base!r}): a jaxact.Policy is required, such as "
            "Policy(bits=2), or none.",
        )
        rows = {row.key: row for row in self.measured.rows}

        def chosen(row: Cost, bits: float) -> Action:
            width = EXACT if bits >= row.exact_bits else bits
            return action_of(width, row.action) if action is None else action(width)

        rules = tuple(Rule(chosen(rows[key], b), key=key) for key, b in self.bits)
        return dataclasses.replace(base, rules=(*base.rules, *rules))

    def changes(self, other: "Allocation") -> tuple[str, ...]:
        """Differences in `other`: lines such as 'Net/block0/dot_general: 2 -> 4 bits'.

        Example:
          >>> import jaxact
          >>> row = jaxact.Cost('a', 100, 4, variance=1.0, signal=1.0, bits=2)
          >>> table = jaxact.Sensitivity((row,), signal=1.0)
          >>> two, four = (jaxact.allocate(table, bits=b) for b in (2, 4))
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
        """The average bits, and the predicted error."""
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
            Column("bits", lambda row: f"{chosen[row.key]:g}", is_number=True),
            Column("error", lambda row: f"{error(row):.3g}", is_number=True),
            Column(
                "relative",
                lambda row: relative_text(error(row), signal),
                is_number=True,
            ),
        ]
        return columns, self.measured.rows

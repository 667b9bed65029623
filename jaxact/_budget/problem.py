"""The choice that a plan is, as numbers: bytes, seconds and noise of each action."""

import dataclasses

from jaxact._codec import Action
from jaxact._policy import Rule


@dataclasses.dataclass(frozen=True)
class Option:
    """One action for one residual.

    Attributes:
      bytes: stored, of all copies.
      time: that packing adds, as a part of the step's.
      noise: variance that it adds to the gradient, over the squared gradient.
    """

    action: Action
    bytes: int
    time: float
    noise: float

    @property
    def cost(self) -> float:
        """Time and noise as one number, see `solve`."""
        return self.time + self.noise


@dataclasses.dataclass(frozen=True)
class Row:
    """A residual to choose an action for.

    Attributes:
      elements, exact_bytes: of all copies.
      options: without those that another beats in bytes, time and noise.
    """

    key: str
    path: str
    elements: int
    exact_bytes: int
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to keep a call's residuals.

    Attributes:
      name: 'stored', 'elementwise' or 'checkpoint'.
      rows: the residuals that are then stored.
      fixed_bytes: of residuals that nothing is chosen for: statistics, masks.
      transient_bytes: that exist while one call is computed again.
      time, noise: added besides those of the rows.
      rules: for residuals that are not stored from forward to backward.
    """

    name: str
    rows: tuple[Row, ...]
    fixed_bytes: int
    transient_bytes: int = 0
    time: float = 0.0
    noise: float = 0.0
    rules: tuple[Rule, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        """Whether the call is computed again as a whole."""
        return self.name == "checkpoint"

    @property
    def is_stored(self) -> bool:
        """Whether nothing is computed again."""
        return self.name == "stored"


@dataclasses.dataclass(frozen=True)
class Call:
    """A compressed call, by its key, and the ways to keep its residuals."""

    key: str
    variants: tuple[Variant, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The whole step.

    Attributes:
      outside_bytes: residuals of no compressed call.
      exact_bytes: residuals before they are stored.
      gradient_bytes: arrays of backward with the type of an argument.
      seconds: of the uncompressed step, by its operations and bytes.
      is_measured: whether the noise was measured; else it is assumed.
    """

    calls: tuple[Call, ...]
    outside_bytes: int
    exact_bytes: int
    gradient_bytes: int
    seconds: float
    is_measured: bool

    def without_recomputation(self) -> "Problem":
        """The same, with all residuals of a call stored."""
        calls = [
            dataclasses.replace(c, variants=tuple(v for v in c.variants if v.is_stored))
            for c in self.calls
        ]
        return dataclasses.replace(self, calls=tuple(calls))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variant for each call, and an option for each of its rows."""

    call: Call
    variant: Variant
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True)
class Solution:
    """The choices for a step.

    Attributes:
      stored_bytes: of residuals, and those of one call that is computed again.
      time, noise: added, as in `Option`.
    """

    choices: tuple[Choice, ...]
    stored_bytes: int
    time: float
    noise: float

    @property
    def cost(self) -> float:
        """Time and noise as one number."""
        return self.time + self.noise


def undominated(options: list[Option]) -> tuple[Option, ...]:
    """Without options that another beats: by bytes, then by the sum of the others."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.cost)):
        if not any(k.time <= option.time and k.noise <= option.noise for k in kept):
            kept.append(option)
    return tuple(kept)

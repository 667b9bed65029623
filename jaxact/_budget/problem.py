"""The choice that a plan is, as numbers: bytes, seconds and noise of each action.

A step takes most memory in the backward pass of some call. There are then the residuals
of this call and of those before it; the gradients of it and of those after it; and the
call's workspace: arrays that its passes read and write whole, and its residuals
if it is computed again. Early calls of a ResNet have few residuals before them and a
large workspace, late ones the opposite; so there is one bound for each call.
"""

import dataclasses

from jaxact._codec import Action, Offload
from jaxact._policy import Rule


@dataclasses.dataclass(frozen=True)
class Option:
    """One action for one residual.

    Attributes:
      bytes: stored, of all copies.
      time: that packing adds, as a part of the step's.
      noise: variance that it adds to the gradient, over the squared gradient.
      workspace: bytes of the one array that decoding writes whole; 0 where it is fused
        with the operations that read it.
    """

    action: Action
    bytes: int
    time: float
    noise: float
    workspace: int = 0

    @property
    def cost(self) -> float:
        """Time and noise as one number, see `solve`."""
        return self.time + self.noise


@dataclasses.dataclass(frozen=True)
class Row:
    """A residual to choose an action for.

    Attributes:
      elements, exact_bytes: of all copies.
      options: see `undominated`.
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
      workspace: bytes that exist only while the call is differentiated, besides those
        of options.
      time, noise: added besides those of the rows.
      rules: for residuals that are not stored from forward to backward.
    """

    name: str
    rows: tuple[Row, ...]
    fixed_bytes: int
    workspace: int = 0
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
    """A compressed call, by its key, and the ways to keep its residuals.

    Attributes:
      gradient_bytes: gradients of its parameters that are kept, see `gradients.py`.
    """

    key: str
    variants: tuple[Variant, ...]
    gradient_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """The whole step.

    Attributes:
      calls: in the order of the forward pass.
      outside_bytes: residuals of no compressed call.
      exact_bytes: residuals before they are stored.
      gradient_bytes: kept gradients, of calls or not.
      seconds: of the uncompressed step, by its operations and bytes.
      is_measured: whether the noise was measured; else it is assumed.
      flops_per_second: that the step reaches.
      argument_bytes: as in `Plan`.
    """

    calls: tuple[Call, ...]
    outside_bytes: int
    exact_bytes: int
    gradient_bytes: int
    seconds: float
    is_measured: bool
    flops_per_second: float
    argument_bytes: int

    def without_recomputation(self) -> "Problem":
        """The same, with all residuals of a call stored."""
        calls = [
            dataclasses.replace(c, variants=tuple(v for v in c.variants if v.is_stored))
            for c in self.calls
        ]
        return dataclasses.replace(self, calls=tuple(calls))

    def on_the_device(self) -> "Problem":
        """The same, with no residual in host memory."""
        calls = [
            dataclasses.replace(c, variants=tuple(map(_on_the_device, c.variants)))
            for c in self.calls
        ]
        return dataclasses.replace(self, calls=tuple(calls))


def _on_the_device(variant: Variant) -> Variant:
    rows = []
    for row in variant.rows:
        own = tuple(o for o in row.options if not isinstance(o.action, Offload))
        rows.append(dataclasses.replace(row, options=own))
    return dataclasses.replace(variant, rows=tuple(rows))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variant for each call, and an option for each of its rows."""

    call: Call
    variant: Variant
    options: tuple[Option, ...]

    @property
    def stored_bytes(self) -> int:
        """From the forward pass to the backward pass."""
        return self.variant.fixed_bytes + sum(o.bytes for o in self.options)

    @property
    def workspace(self) -> int:
        """Bytes while the call is differentiated."""
        return self.variant.workspace + sum(o.workspace for o in self.options)


@dataclasses.dataclass(frozen=True)
class Solution:
    """The choices for a step.

    Attributes:
      stored_bytes: of residuals.
      live_bytes: the most that exist at once, as the tables have it.
      time, noise: added, as in `Option`.
    """

    choices: tuple[Choice, ...]
    stored_bytes: int
    live_bytes: int
    time: float
    noise: float

    @property
    def cost(self) -> float:
        """Time and noise as one number."""
        return self.time + self.noise


def solution_of(problem: Problem, choices: tuple[Choice, ...]) -> Solution:
    """The sums of the choices."""
    parts = [o for choice in choices for o in choice.options]
    kept = [choice.variant for choice in choices]
    stored, gradients = problem.outside_bytes, problem.gradient_bytes
    live = stored + gradients
    for choice in choices:
        stored += choice.stored_bytes
        live = max(live, stored + choice.workspace + gradients)
        gradients -= choice.call.gradient_bytes
    return Solution(
        choices,
        stored,
        live,
        sum(o.time for o in parts) + sum(v.time for v in kept),
        sum(o.noise for o in parts) + sum(v.noise for v in kept),
    )


def undominated(options: list[Option]) -> tuple[Option, ...]:
    """Without options that another beats in bytes, workspace, time and noise."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.workspace, o.cost)):
        if not any(
            k.time <= option.time
            and k.noise <= option.noise
            and k.workspace <= option.workspace
            for k in kept
        ):
            kept.append(option)
    return tuple(kept)

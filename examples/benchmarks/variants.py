"""The ways of keeping residuals that are compared: JAX's, jaxact's, four papers'."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks import Keep

import jaxact
from jaxact import policies

# Measures the cost of each residual to the gradient of the network in training.
Measure = Callable[[], jaxact.Sensitivity]


@dataclass(frozen=True)
class Variant:
    """One way of keeping residuals.

    Attributes:
      name: in tables.
      start: the residuals to keep before anything is measured.
      choose: the policy, given a way to measure. None: `start` for good.
      terms: the arguments of `jaxact.allocate` in `choose`. With these
        `jaxact.reallocate` decides whether a later measurement is worth a compilation.
    """

    name: str
    start: Keep
    choose: Callable[[Measure], jaxact.Policy] | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)


def acgc(bound: float) -> Variant:
    """AC-GC's: the fewest bits for a squared error of the gradient, relative to it."""
    return Variant(
        f"AC-GC, {bound:g}",
        policies.acgc(bound),
        lambda measure: policies.acgc(bound, measured=measure()),
        {"e2": bound, "ladder": (1, 2, 3, 4, 6, 8, 16, 32)},
    )


VARIANTS = (
    Variant("uncompressed", "all"),
    Variant("jax.checkpoint", "inputs"),
    Variant("jaxact, 4 bits", jaxact.Policy()),
    Variant("jaxact, 2 bits", jaxact.Policy(bits=2)),
    Variant(
        "ActNN, 2 bits",
        policies.actnn(3),
        lambda measure: policies.actnn(3, measured=measure()),
        {"bits": 2, "ladder": range(1, 9)},
    ),
    Variant(
        "GACT, 4 bits",
        policies.gact(4),
        lambda measure: policies.gact(4, measured=measure()),
        {"bits": 4},
    ),
    Variant("DIVISION, 2 bits", policies.division(2, 8)),
    acgc(0.1),
)

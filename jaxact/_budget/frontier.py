"""Memory against time and noise: plans, predictions, and the usual ways beside them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import jax

from jaxact._codec import Exact
from jaxact._memory.size import Limited
from jaxact._policy import Policy
from jaxact._recompute import Checkpoint
from jaxact._saved import Saved
from jaxact._tabular import Column, Tabular, bytes_text

UNCOMPRESSED = Policy(default=Exact())
_SAVE = jax.checkpoint_policies
# The usual ways to take less memory, of each compressed call, by name.
USUAL = {
    "checkpoint": Policy(default=Exact(), recompute=Checkpoint()),
    "dots_saveable": Policy(default=Exact(), recompute=_SAVE.dots_saveable),
    "dots_with_no_batch_dims_saveable": Policy(
        default=Exact(), recompute=_SAVE.dots_with_no_batch_dims_saveable
    ),
}
# Where the compiler can move arrays to the host.
OFFLOADED = {
    "offload dots": Policy(
        default=Exact(),
        recompute=_SAVE.offload_dot_with_no_batch_dims("device", "pinned_host"),
    ),
}


@dataclasses.dataclass(frozen=True)
class FrontierPoint(Saved):
    """Memory, and the cost of it.

    Attributes:
      bytes: that the budget limits.
      time, noise: added, as in `Plan`; of a usual way the time of the matrix products
        and convolutions alone that it computes again.
      is_compiled: whether the bytes are those of a compiled step; else predicted.
      name: 'uncompressed', 'plan', a usual way, or '' for a prediction.
    """

    bytes: int
    time: float
    noise: float
    is_compiled: bool
    name: str = ""

    @property
    def cost(self) -> float:
        """Added time plus noise, of which a plan takes the least."""
        return self.time + self.noise


@dataclasses.dataclass(frozen=True)
class Frontier(Tabular):
    """Points of memory against time and noise: `print` it, or iterate.

    Attributes:
      points: compiled steps, and the least cost at other budgets.
      of: 'temp' or 'device'.
    """

    points: tuple[FrontierPoint, ...] = ()
    of: Limited = "temp"

    def __iter__(self) -> Iterator[FrontierPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def summary(self) -> str:
        """The meaning of the numbers."""
        usual = ""
        if any(point.name in USUAL | OFFLOADED for point in self.points):
            usual = " (of the usual ways that of products computed again, alone)"
        return (
            f"{self.of} bytes, compiled unless predicted; time is estimated, as a part "
            f"of the step's{usual}; noise is variance over the squared gradient"
        )

    def _table(self) -> tuple[list[Column[FrontierPoint]], list[FrontierPoint]]:
        return _COLUMNS, sorted(self.points, key=lambda point: -point.bytes)


def cheapest(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points without predictions that another one makes useless.

    It takes no more bytes at no more cost. There are such: a prediction adds to live
    bytes those that the compiled step most alike takes above its own, and where these
    steps differ, the order by live bytes is not that by predicted ones.
    """
    kept = []
    least = math.inf
    for point in sorted(points, key=lambda p: (p.bytes, not p.is_compiled, p.cost)):
        if point.is_compiled or point.cost < least:
            kept.append(point)
        least = min(least, point.cost)
    return tuple(kept)


_COLUMNS: list[Column[FrontierPoint]] = [
    Column("step", lambda p: p.name if p.is_compiled else "predicted"),
    Column("bytes", lambda p: bytes_text(p.bytes), is_number=True),
    Column("time", lambda p: f"{p.time:.1%}", is_number=True),
    Column("noise", lambda p: f"{p.noise:.2g}", is_number=True),
]

"""The largest batch whose compiled step fits, and the next one, which does not.

The memory of a step is close to affine in the batch, so two small batches predict the
largest. The prediction is compiled, and so is its neighbour: only compiled steps count.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from jaxact._budget.batch_checks import (
    check,
    checked_count,
    checked_known,
    limit_of,
    require_use,
    step_for,
)
from jaxact._engine.warnings import CompressionWarning
from jaxact._measure.progress import progress
from jaxact._memory import memory
from jaxact._memory.memory import first_device
from jaxact._memory.targets import gpu_of
from jaxact._policy import Policy
from jaxact._saved import Saved
from jaxact._tabular import Column, Tabular, bytes_text
from jaxact._using import Override, overriding
from jaxact._written_as import written_as

# Compiled steps for a policy. Four suffice where memory is affine in the batch; a bend,
# or the padding of small arrays, takes more (7 in the mean of random such curves).
MOST_COMPILES = 10
# From this one on, every other halves what is left: predictions may near a bend from
# one side in small steps.
_MOST_PREDICTED = 6
# The first two batches are so many multiples: small, but no edge case as a batch of 1.
_FIRST, _SECOND = 4, 16
# Where nothing seems to grow with the batch.
_MOST_BATCH = 2**24


@dataclasses.dataclass(frozen=True)
class CompiledBatch(Saved):
    """A batch that was compiled: bytes of arguments, results and temporaries."""

    batch: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class LargestBatch(Saved):
    """The largest batch for one policy.

    Attributes:
      name: of the policy.
      batch: the largest compiled batch that fits; 0 where the least does not.
      bytes: that it takes; 0 without it.
      next_bytes: that the next larger batch takes, which does not fit; None where
        that was not compiled.
      compiled: every batch that was, in order, known ones first.
    """

    derived = ("is_certified",)
    name: str
    batch: int
    bytes: int
    next_bytes: int | None
    compiled: tuple[CompiledBatch, ...]

    @property
    def is_certified(self) -> bool:
        """Whether the next larger batch was compiled, and does not fit."""
        return self.next_bytes is not None


@dataclasses.dataclass(frozen=True)
class LargestBatches(Tabular):
    """The largest batch for each policy: `print` it.

    Attributes:
      rows: in the order of the mapping.
      limit: bytes that a step may take: the device's without the reserve.
      multiple_of: every batch is.
      device: the device's kind.
    """

    rows: tuple[LargestBatch, ...]
    limit: int
    multiple_of: int
    device: str

    def __getitem__(self, name: str) -> LargestBatch:
        """The row of a name.

        Raises:
          KeyError: there is none.
        """
        return {row.name: row for row in self.rows}[name]

    def summary(self) -> str:
        """The limit; rows for which the next batch was not compiled."""
        lines = [f"limit {bytes_text(self.limit)} on {self.device}"]
        lines += [
            f"{row.name}: larger batches than {row.batch} may fit; "
            f"{len(row.compiled)} were compiled"
            for row in self.rows
            if not row.is_certified
        ]
        return "\n".join(lines)

    def _table(self) -> tuple[list[Column[LargestBatch]], tuple[LargestBatch, ...]]:
        first = max(1, self.rows[0].batch)
        columns: list[Column[LargestBatch]] = [
            Column("policy", lambda row: row.name),
            Column("batch", lambda row: str(row.batch), is_number=True),
            Column("times", lambda row: f"{row.batch / first:.2f}x", is_number=True),
            Column("takes", lambda row: bytes_text(row.bytes), is_number=True),
            Column("next", _next_text, is_number=True),
            Column("compiled", lambda row: str(len(row.compiled)), is_number=True),
        ]
        return columns, self.rows


def _next_text(row: LargestBatch) -> str:
    """The smallest compiled batch that does not fit."""
    larger = [c for c in row.compiled if c.batch > row.batch]
    if not larger:
        return "not compiled"
    least = min(larger, key=lambda c: c.batch)
    return f"{bytes_text(least.bytes)} at {least.batch}"


@written_as("max_batch(step_of_batch, {'2 bits': Policy(bits=2)})")
def max_batch(
    step_of_batch: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]],
    policies: Mapping[str, Policy | None] | None = None,
    *,
    target: str | None = None,
    budget: str | int | None = None,
    multiple_of: int = 1,
    reserve: str | int | float = 0.05,
    degree: int = 1,
    known: Mapping[str, Mapping[int, int]] | None = None,
) -> LargestBatches:
    """Find the largest batch whose step fits the device, for each policy.

    Steps are compiled, about 4 for a policy and at most 10, and nothing runs. A row is
    certified: the batch fits and the next larger one does not, both compiled; the
    table says which row is not, as its memory bends too often.

    Args:
      step_of_batch: from a batch size to the step and its arguments, which may be
        `jax.ShapeDtypeStruct`; the state that training keeps is among them.
      policies: by name, for all compressed calls in the step, as `jaxact.using` sets
        them; None as a policy: the step as it is. None: that alone.
      target: the GPU to compile for; None: the local backend.
      budget: the device's memory: '24GiB', or bytes. None: the target's.
      multiple_of: try these batches alone, such as 8.
      reserve: that is left free for what the compiler does not count: the runtime's
        own memory, workspaces of libraries, fragments. Bytes, or a part of the budget.
      degree: of the polynomial in the batch that its memory is close to. 2 where
        `step_of_batch` takes the side of an image, or the width of a network, instead.
      known: by the name of a policy, bytes by batch that were compiled before, as
        another budget's row has them. They are not compiled again. A batch of 0 stands
        for memory that every batch takes, such as the state of training.

    Returns:
      `LargestBatches`, a row for each policy.

    Raises:
      TypeError: `step_of_batch` is no function, or returns neither a step nor its
        arguments; `policies` is no mapping to policies.
      ValueError: a wrong size or degree; no budget and no target; a step that does not
        depend on the batch; as `memory`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1)
      >>> def loss(ws, x):
      ...     return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()
      >>> array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
      >>> def step_of_batch(n):
      ...     return jax.grad(loss), (array((24, 64, 64)), array((n, 64)))
      >>> policies = {"exact": jaxact.Policy(default=jaxact.Exact()), "ours": None}
      >>> found = jaxact.max_batch(
      ...     step_of_batch, policies, budget="16MiB", multiple_of=64)
      >>> found["ours"].batch > 2 * found["exact"].batch > 0
      True
    """
    policies = {"the step": None} if policies is None else policies
    check(step_of_batch, policies)
    multiple_of = checked_count("multiple_of", multiple_of)
    degree = checked_count("degree", degree)
    known = checked_known(known)
    limit = limit_of(target, budget, reserve)
    devices: list[str] = []

    def taken(batch: int, policy: Policy | None) -> int:
        step, args = step_for(step_of_batch, batch)
        context = nullcontext() if policy is None else overriding(Override(policy))
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            found = memory(step, *args, target=target)
        devices.append(found.device)
        return found.peak_bytes

    rows = []
    for name, policy in progress(list(policies.items()), "the largest batch"):
        earlier = dict(known.get(name, {}))
        search = _Search(limit, multiple_of, degree, earlier)
        while (batch := search.next()) is not None:
            search.sizes[batch] = taken(batch, policy)
            if len(search.sizes) == 2 and not search.num_known:
                require_use(step_of_batch, search.sizes)
        rows.append(search.row(name))
    if not devices:  # all is known, and nothing was compiled
        here = first_device(()).device_kind
        devices.append(here if target is None else gpu_of(target).name)
    return LargestBatches(tuple(rows), limit, multiple_of, devices[0])


@dataclasses.dataclass
class _Search:
    """The batches compiled so far.

    Attributes:
      sizes: bytes by batch, in the order in which they were compiled.
      num_known: of the first of them, that this search did not compile.
    """

    limit: int
    multiple_of: int
    degree: int = 1
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_known = len(self.sizes)

    @property
    def fitting(self) -> int:
        """The largest batch that fits; 0 without one."""
        return max((n for n, b in self.sizes.items() if b <= self.limit), default=0)

    @property
    def above(self) -> int | None:
        """The smallest larger batch that does not fit."""
        return min((n for n in self.sizes if n > self.fitting), default=None)

    def next(self) -> int | None:
        """The batch to compile next; None: there is nothing left to find."""
        count, unit = len(self.sizes), self.multiple_of
        num_compiled = count - self.num_known
        low, high = self.fitting, self.above
        is_over = num_compiled >= MOST_COMPILES
        if is_over or (high is not None and high <= low + unit):
            return None
        if low >= _MOST_BATCH // unit * unit:
            return None
        if not count:
            return _FIRST * unit
        if count == 1:
            return _SECOND * unit if high is None else unit
        late = num_compiled - _MOST_PREDICTED
        if high is not None and late >= 0 and late % 2 == 0:
            wanted = (low + high) // 2 // unit * unit
        else:
            wanted = self._predicted()
        wanted = low + unit if wanted <= low else wanted
        if high is not None:
            wanted = min(wanted, high - unit)
        return min(wanted, _MOST_BATCH // unit * unit)

    def _predicted(self) -> int:
        """The largest batch that fits, by the batches nearest to it."""
        nearest = sorted(self.sizes, key=lambda n: abs(self.sizes[n] - self.limit))
        nearest = nearest if self.above is not None else _apart(nearest)
        batch = self._crossing(nearest[: self.degree + 1])
        low, high = self.fitting, self.above
        if high is not None and low and not low < batch < high:
            batch = self._line(low, high, 1)
        return max(1, int(batch // self.multiple_of)) * self.multiple_of

    def _crossing(self, batches: list[int]) -> float:
        """Where the polynomial through these batches takes the limit."""
        if self.degree == 1 or len(batches) <= self.degree:
            first, second = sorted(batches[:2])
            return self._line(first, second, self.degree)
        taken = [self.sizes[n] - self.limit for n in batches]
        roots = np.roots(np.polyfit(batches, taken, self.degree))
        real = roots[np.isreal(roots)].real
        return float(real.max(initial=0))

    def _line(self, first: int, second: int, power: int) -> float:
        """Where a line in batch**power through two batches takes the limit."""
        start, end = first**power, second**power
        slope = (self.sizes[second] - self.sizes[first]) / (end - start)
        if slope <= 0:
            return _SECOND * max(self.sizes)
        crossing = start + (self.limit - self.sizes[first]) / slope
        return max(0, crossing) ** (1 / power)

    def row(self, name: str) -> LargestBatch:
        """The result."""
        batch, following = self.fitting, self.fitting + self.multiple_of
        return LargestBatch(
            name,
            batch,
            self.sizes[batch] if batch else 0,
            self.sizes.get(following),
            tuple(CompiledBatch(n, size) for n, size in self.sizes.items() if n),
        )


def _apart(batches: list[int]) -> list[int]:
    """Without near neighbours: memory may fall from one batch to the next."""
    chosen: list[int] = []
    for n in batches:
        if all(16 * abs(n - other) > n for other in chosen):
            chosen.append(n)
    return chosen if len(chosen) > 1 else batches

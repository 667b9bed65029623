"""One training of one variant, and its measurements."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from tasks import Keep, State, Task
from variants import Variant

import jaxact


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
      draws: gradients that a variance is taken over.
      steps: timed of each variant, after one that warms up.
      target: the GPU whose compiler is asked for memory; None: none.
    """

    draws: int = 8
    steps: int = 9
    target: str | None = "h100"


def run(task: Task, variant: Variant, seed: int, effort: Effort) -> dict[str, Any]:
    """Train once; score, and measure at the parameters that were learned.

    Returns, besides the score:
      stored_bytes: of all residuals of the loss; compressed ones, and exact ones.
      stored_bits: per element of the compressed ones; None without any.
      exact_bytes: of all residuals of the uncompressed network.
      temp_bytes: of the step compiled for the target; only of the first seed.
      step_ratio: time of a step over that of an uncompressed one.
      variance_ratio: variance that rounding adds to the gradient of one batch, over
        the variance that batches add.
    """
    start = time.perf_counter()
    state, keep, training_loss = train(task, variant, seed)
    batches = list(itertools.islice(task.batches(seed + 1000), effort.draws))
    trained = time.perf_counter()
    return {
        "task": task.name,
        "variant": variant.name,
        "seed": seed,
        "metric": task.metric,
        "sign": task.sign,
        "score": task.score(state),
        "training_loss": training_loss,
        **stored(task, keep),
        "temp_bytes": None if seed else temp_bytes(task, keep, state, effort.target),
        "step_ratio": step_ratio(task, keep, state, batches[0], effort.steps),
        "variance_ratio": variance_ratio(task, keep, state, batches, effort.draws),
        "training_seconds": trained - start,
        "seconds": time.perf_counter() - start,
    }


def train(task: Task, variant: Variant, seed: int) -> tuple[State, Keep, float]:
    """The trained state, the final choice of residuals, and the last training loss.

    A variant that measures does so after a tenth of the steps, and half a training
    later.
    """
    state, tuner, loss = task.init(seed), Tuner(variant), math.nan
    warm_up, retune_every = task.num_steps // 10, max(1, task.num_steps // 2)
    for step, batch in enumerate(task.batches(seed)):
        if step >= warm_up and (step - warm_up) % retune_every == 0:
            tuner.retune(task, state, batch)
        state, loss = after_step(task, tuner.keep, state, batch, seed, step)
    return state, tuner.keep, float(loss)


def after_step(
    task: Task, keep: Keep, state: State, batch: Any, seed: int, step: int
) -> tuple[State, Any]:
    """The state after the given step of the training with a seed, and its loss."""
    number = np.uint32(seed << 16 | step)
    found = task.gradient(keep)(state.params, state.statistics, batch, number)
    return task.update(state, found), found[0][0]


class Tuner:
    """A variant's present choice of residuals; a measurement may change it."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.keep: Keep = variant.start
        self.allocation: jaxact.Allocation | None = None

    def retune(self, task: Task, state: State, batch: Any) -> None:
        choose, terms = self.variant.choose, self.variant.terms
        if choose is None:
            return
        measured = sensitivity(task, self.variant.start, state, batch)
        if self.allocation is None:
            after = jaxact.allocate(measured, **terms)
        else:
            after = jaxact.reallocate(self.allocation, measured, **terms)
        if after is not self.allocation:
            self.allocation = after
            self.keep = choose(lambda: measured)


def gradient_at(task: Task, keep: Keep, state: State) -> Callable[..., np.ndarray]:
    """A function of (batch, seed): all gradients, as one vector."""
    program = task.gradient(keep)

    def gradient(batch: Any, seed: int) -> np.ndarray:
        found = program(state.params, state.statistics, batch, np.uint32(seed))
        return np.asarray(ravel_pytree(found[1])[0], np.float64)

    return gradient


def variance(vectors: Iterable[np.ndarray]) -> float:
    """Unbiased variance, summed over the elements of a vector."""
    return float(np.var(list(vectors), axis=0, ddof=1).sum())


def rounding_variance(
    task: Task, keep: Keep, state: State, batch: Any, draws: int
) -> float:
    """The variance that rounding adds to one batch's gradient."""
    gradient = gradient_at(task, keep, state)
    return variance(gradient(batch, seed) for seed in range(draws))


def exact_gradients(task: Task, state: State, batches: list[Any]) -> list[np.ndarray]:
    """Those of the uncompressed network."""
    gradient = gradient_at(task, "all", state)
    return [gradient(batch, 0) for batch in batches]


def variance_ratio(
    task: Task, keep: Keep, state: State, batches: list[Any], draws: int
) -> float | None:
    if not isinstance(keep, jaxact.Policy):
        return None
    noise = rounding_variance(task, keep, state, batches[0], draws)
    return noise / variance(exact_gradients(task, state, batches))


def stored(task: Task, keep: Keep) -> dict[str, Any]:
    """Bytes and bits; see `run`."""
    rows = task.residuals(keep)
    packed = [row for row in rows if not isinstance(row.action, jaxact.Exact)]
    size = lambda rows: sum(row.stored_bytes for row in rows)
    elements = sum(math.prod(row.shape) for row in packed)
    return {
        "stored_bytes": size(rows),
        "stored_bits": 8 * size(packed) / elements if packed else None,
        "exact_bytes": size(task.residuals("all")),
    }


def temp_bytes(task: Task, keep: Keep, state: State, target: str | None) -> int | None:
    """Of the compiled training step; None where the target's compiler is missing."""
    if target is None:
        return None
    batch = next(task.batches(0))
    try:
        arguments = state, batch, np.uint32(0)
        return jaxact.memory(task.step(keep), *arguments, target=target).temp_bytes
    except ImportError:
        return None


def step_ratio(task: Task, keep: Keep, state: State, batch: Any, steps: int) -> float:
    """Median time of a step over that of an uncompressed one, taken alternately."""

    def seconds(keep: Keep) -> float:
        start = time.perf_counter()
        found = task.gradient(keep)(state.params, state.statistics, batch, np.uint32(0))
        jax.block_until_ready(task.update(state, found))
        return time.perf_counter() - start

    if keep == "all":
        return 1.0
    pairs = [(seconds(keep), seconds("all")) for _ in range(steps + 1)][1:]
    ours, base = (statistics.median(times) for times in zip(*pairs, strict=True))
    return ours / base


def sensitivity(task: Task, keep: Keep, state: State, batch: Any) -> Any:
    """The cost of each residual, at these parameters, on a part of one batch.

    A smaller batch has a noisier gradient, and as much more rounding noise relative to
    its mean: a bound relative to the gradient, as AC-GC's, is kept with some room.
    """
    arguments = state.params, state.statistics, task.part(batch), np.uint32(0)
    return jaxact.sensitivity(task.loss(keep), *arguments, has_aux=True)

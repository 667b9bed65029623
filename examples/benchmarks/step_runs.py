"""One way of taking a network's training step, and its measurements."""

import contextlib
import functools
import itertools
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import optax
from environment import environment
from flax import struct
from step_networks import NETWORKS, Network
from step_ways import BASE, WAYS, Way

import jaxact

Record = dict[str, Any]
NUMBERS = (
    *("flops", "temp_bytes", "target_bytes", "peak_bytes"),
    *("predicted_seconds", "predicted_kernels", "predicted_bytes", "by_cause"),
    *("ratio", "quartiles", "seconds", "items_per_second", "loss"),
    "compiled_peak_bytes",
)


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement.

    Attributes:
      steps: that are trained; the first turn is not timed. 0: compile, but run nothing.
      turn: steps that follow one another, as in training, before the other way's. A GPU
        that waits for the host after each would idle for some milliseconds.
      target: a GPU whose compiler is asked for memory and time; None: none.
      here: whether to compile for this machine.
    """

    steps: int = 16
    turn: int = 1
    target: str | None = None
    here: bool = True


class State(struct.PyTreeNode):
    """The values that a training step changes."""

    params: Any
    statistics: Any
    optimizer: Any


class Trainer:
    """A network trained in one way: AdamW, with the state donated to the step."""

    def __init__(self, network: Network, way: Way):
        self.network, self.way = network, way
        self.optimizer = optax.adamw(1e-3)
        self.init = jax.jit(self._init)
        self.step = jax.jit(self._step, donate_argnums=0)

    def _init(self) -> State:
        params, statistics = self.network.init(jax.random.key(0))
        return State(params, statistics, self.optimizer.init(params))

    def _step(self, state: State, batch: Any) -> tuple[State, jax.Array]:
        gradient = jax.value_and_grad(self.network.loss(self.way), has_aux=True)
        (loss, norms), found = in_pieces(gradient, self.way.pieces)(
            state.params, state.statistics, batch
        )
        updates, optimizer = self.optimizer.update(found, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), norms, optimizer), loss

    @functools.cached_property
    def shapes(self) -> tuple[Any, Any]:
        """The arguments of the step."""
        (batch,) = self.network.batches(1)
        return jax.eval_shape(lambda: (self.init(), jax.tree.map(jnp.asarray, batch)))

    @functools.cached_property
    def compiled_init(self) -> Any:
        # For the host: XLA compiles three minutes for an H100 where a ViT-B's
        # parameters are drawn.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return self.init.lower().compile()

    def first_state(self) -> State:
        return jax.device_put(self.compiled_init(), jax.local_devices()[0])

    @functools.cached_property
    def compiled(self) -> Any:
        return self.step.lower(*self.shapes).compile()


def in_pieces(gradient: Callable[..., Any], pieces: int) -> Callable[..., Any]:
    """Means over pieces of the batch, one after another; a norm sees only its piece."""
    if pieces == 1:
        return gradient

    def summed(params: Any, norms: Any, batch: Any) -> Any:
        def one(carry: Any, piece: Any) -> Any:
            total, norms = carry
            (loss, norms), found = gradient(params, norms, piece)
            return (jax.tree.map(jnp.add, total, (loss, found)), norms), None

        cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)
        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (total, norms), _ = jax.lax.scan(one, (zeros, norms), cut)
        loss, found = jax.tree.map(lambda x: x / pieces, total)
        return (loss, norms), found

    return summed


def compile_step(network: str, way: str) -> None:
    """Leave a step in JAX's compilation cache, if it compiles."""
    with contextlib.suppress(Exception):  # `measure` says why not
        trainer = Trainer(NETWORKS[network], WAYS[way])
        _ = trainer.compiled_init, trainer.compiled


@functools.lru_cache(maxsize=1)
def uncompressed(network: str) -> Trainer:
    """The reference of this network's other ways, compiled once."""
    return Trainer(NETWORKS[network], BASE)


def measure(network: str, way: str, effort: Effort) -> Record:
    """One row of the results.

    An error in a part of the measurement is a result too: the row then has None, and
    the message under `why`.

    Returns:
      flops: of a step's matrix products and convolutions.
      temp_bytes, target_bytes: allocated by the step compiled for this machine, and
        for the target, besides its arguments and results.
      predicted_seconds, predicted_kernels, predicted_bytes, by_cause: as
        `jaxact.predicted_time` has them for the target.
      compiled_peak_bytes: the most that the step compiled for this machine allocates,
        arguments included.
      peak_bytes: the most that the device had allocated. It counts
        over the life of a process, so this must be the first row that one measures.
        None: the device does not count.
      ratio, quartiles: of times, over those of the uncompressed step.
      seconds: the median time.
      items_per_second: at the median time.
      loss: of the last step.
    """
    base = uncompressed(network)
    subject = base if way == BASE.name else Trainer(base.network, WAYS[way])
    parts: dict[str, Callable[[], Record]] = {"count": lambda: count(subject)}
    if effort.here:
        parts["compile"] = lambda: compile_here(subject)
    if effort.steps:
        parts["peak"] = lambda: peak(subject)
        parts["run"] = lambda: race(subject, base, effort)
    if effort.target:
        parts["target"] = lambda: compile_for(effort.target, subject)
    row: Record = {"network": network, "way": way}
    row |= {"about": base.network.about, "unit": base.network.unit}
    row |= {"steps": effort.steps, "turn": effort.turn, "target": effort.target}
    row |= {"why": {}}
    row |= dict.fromkeys(NUMBERS)
    for part, measurement in parts.items():
        try:
            row |= measurement()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            row["why"][part] = textwrap.shorten(text, 200)
    return row | environment()


def count(subject: Trainer) -> Record:
    return {"flops": jaxact.count_flops(subject.step, *subject.shapes)}


def compile_here(subject: Trainer) -> Record:
    """Of memory, and on a GPU of time: the compiler's own cache has the step then."""
    memory = subject.compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    found = {"temp_bytes": memory.temp_size_in_bytes, "compiled_peak_bytes": peak}
    if jax.default_backend() == "gpu":
        found |= prediction(jaxact.predicted_time(subject.step, *subject.shapes))
    return found


def compile_for(target: str | None, subject: Trainer) -> Record:
    found = jaxact.predicted_time(subject.step, *subject.shapes, target=target)
    return {"target_bytes": found.memory.temp_bytes} | prediction(found)


def prediction(found: jaxact.PredictedTime) -> Record:
    numbers = "kernels", "bytes", "seconds"
    return {
        **{f"predicted_{name}": getattr(found, name) for name in numbers},
        "by_cause": {
            cause: {name: getattr(row, name) for name in numbers}
            for cause, row in found.by_cause.items()
        },
    }


class Run:
    """A training under way, and the seconds that its steps took."""

    def __init__(self, subject: Trainer, state: State):
        self.step, self.state = subject.compiled, state
        self.seconds: list[float] = []
        self.loss: Any = None

    def take(self, batches: Sequence[Any]) -> None:
        start = time.perf_counter()
        for batch in batches:
            self.state, self.loss = self.step(self.state, batch)
        jax.block_until_ready((self.state, self.loss))
        self.seconds.append((time.perf_counter() - start) / len(batches))


def race(subject: Trainer, rival: Trainer, effort: Effort) -> Record:
    """Train both on the same batches, in turns, each one first in every other round."""
    ours, base = runs = [Run(who, rival.first_state()) for who in (subject, rival)]
    every = iter(subject.network.batches(effort.steps))
    while turn := list(itertools.islice(every, effort.turn)):
        turn = jax.block_until_ready(jax.device_put(turn))
        for run in runs:
            run.take(turn)
        runs.reverse()
    seconds = statistics.median(ours.seconds[1:])
    ratios = [a / b for a, b in zip(ours.seconds, base.seconds, strict=True)][1:]
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "seconds": seconds,
        "items_per_second": subject.network.items / seconds,
        "loss": float(ours.loss),
    }


def peak(subject: Trainer) -> Record:
    """Of two steps, and of the trials by which XLA chose their kernels."""
    if not device_counts():
        return {"peak_bytes": None}
    run = Run(subject, subject.first_state())
    for batch in subject.network.batches(2):
        run.take([jax.device_put(batch)])
    return {"peak_bytes": jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]}


def device_counts() -> bool:
    """Whether the device knows the most that it had allocated."""
    return bool(jax.local_devices()[0].memory_stats())


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()

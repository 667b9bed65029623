"""How the examples train: one step, a progress bar, checkpoints, a table of memory.

An example describes its training as a `Training` and calls `run`; its options are
those of `command.py`.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from saving import checkpoints, record, restored

import jaxact
from jaxact import policies

# (params, statistics, batch) -> (loss, statistics)
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
Measure = Callable[[jaxact.Policy], jaxact.Sensitivity]


class State(struct.PyTreeNode):
    """The values that a step changes and a checkpoint holds."""

    params: Any
    statistics: Any  # running statistics of norms, where there are any
    optimizer: Any


@dataclass(frozen=True)
class Training:
    """A network, its data and its optimizer.

    Attributes:
      name: of the network and of its data.
      num_steps: of the whole training.
      init: makes parameters and running statistics (`()` where there are none).
      loss: the loss function, given the policy of its residuals; `None`: keep all.
      optimizer: of the parameters.
      batches: the batches from a step on; the same ones whenever it is asked.
      score: from (params, statistics) to the trained network's score, as text.
      part: as much of a batch as sensitivities are measured on.
      shardings: where a state of these shapes lives; `None`: on one device.
    """

    name: str
    num_steps: int
    init: Callable[[], tuple[Any, Any]]
    loss: Callable[[jaxact.Policy | None], Loss]
    optimizer: optax.GradientTransformation
    batches: Callable[[int], Iterator[Any]]
    score: Callable[[Any, Any], str]
    part: Callable[[Any], Any] = lambda batch: batch
    shardings: Callable[[State], Any] = lambda state: None


DEFAULT = jaxact.Policy()


def allocated(bits: int, measure: Measure) -> jaxact.Policy:
    """So many bits on average, where they lower the noise most; in rotated formats."""
    policy = jaxact.Policy(default=jaxact.Adaptive(bits))
    return jaxact.allocate(measure(policy), bits=bits).policy(policy)


# The policies of `--policy`, from the bits and a way to measure sensitivities.
POLICIES: dict[str, Callable[[int, Measure], jaxact.Policy | None]] = {
    "default": lambda bits, _: jaxact.Policy(bits),
    "none": lambda *_: None,
    "adaptive": lambda bits, _: jaxact.Policy(default=jaxact.Adaptive(bits)),
    "allocated": allocated,
    "dots_saveable": lambda bits, _: jaxact.Policy(
        bits, recompute=jax.checkpoint_policies.dots_saveable
    ),
    "inputs": lambda bits, _: jaxact.Policy(
        bits, recompute=jax.checkpoint_policies.nothing_saveable
    ),
    "actnn": lambda _, measure: policies.actnn(3, measured=measure(DEFAULT)),
    "gact": lambda bits, measure: policies.gact(bits, measured=measure(DEFAULT)),
    "division": lambda bits, _: policies.division(bits),
    "acgc": lambda _, measure: policies.acgc(0.1, measured=measure(DEFAULT)),
}

# Those to which `--bits` makes no difference.
WITHOUT_BITS = frozenset(["none", "actnn", "acgc"])


def main(doc: str | None, training: Callable[[argparse.Namespace], Training]) -> None:
    """Run the training that the command line describes."""
    options = parser(doc).parse_args()
    with command.short_errors():
        run(training(options), options)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all examples have; an example adds its own."""
    return command.parser(doc, POLICIES)


def run(training: Training, options: argparse.Namespace) -> State:
    """Train, from the last checkpoint on; print the score and the memory."""
    check_target(options.target)
    console = Console(quiet=jax.process_index() > 0)
    bits = "" if options.policy in WITHOUT_BITS else f", {options.bits} bits"
    console.print(f"{training.name}; policy {options.policy}{bits}")
    if options.dry_run:
        state, table = dry_run(training, options)
        console.print(table)
        return state
    state, first = fresh(training), next(training.batches(0))
    # Before a checkpoint is read, so that who goes on from it measures the same.
    measure = lambda policy: sensitivity(training, state, first, policy)
    policy = POLICIES[options.policy](options.bits, measure)
    shardings = training.shardings(state)
    step = training_step(training.loss(policy), training.optimizer, shardings)
    record(options.checkpoint, training.name, options)
    folder, every = options.checkpoint, options.save_every
    # Inside of the checkpoints too, as their closing waits for all processes.
    with (
        _ended_alone(folder),
        checkpoints(folder, every) as manager,
        _ended_alone(folder),
    ):
        state, start = restored(manager, state)
        if start:
            console.print(_from_step(start, training.num_steps, folder))
        try:
            state, seconds = train(training, step, state, start, manager)
        except KeyboardInterrupt:
            raise SystemExit(_interrupted(manager)) from None
        score = training.score(state.params, state.statistics)
    console.print(score, markup=False, highlight=False)
    if seconds:
        console.print(f"{1000 * statistics.median(seconds):.0f} ms a step, median")
    with console.status("compiling once more, for the table"):
        table = memory_table(training, policy, state, first, options.target)
    console.print(table)
    return state


def check_target(target: str | None) -> None:
    """Raise what compiling for the target would, before any step is taken.

    Raises:
      ValueError: there is no such target, or the packages for it are missing.
    """
    if target is None:
        return
    try:
        number = jax.ShapeDtypeStruct((), np.float32)
        jaxact.memory(jax.numpy.negative, number, target=target)
    except ImportError as error:
        raise ValueError(f"--target {target}: {error}") from error


def _from_step(start: int, num_steps: int, folder: Path) -> str:
    if start < num_steps:
        return f"goes on from step {start}, saved in {folder}"
    return f"finished at step {start}, saved in {folder}: trains no further"


def dry_run(training: Training, options: argparse.Namespace) -> tuple[State, Table]:
    """The state's shapes and the memory of a step, of any size on any machine."""

    def measure(_: jaxact.Policy) -> jaxact.Sensitivity:
        raise ValueError(
            f"--policy {options.policy} measures a step, and --dry-run runs none: "
            "another policy is required, or no --dry-run."
        )

    state = shapes(training)
    policy = POLICIES[options.policy](options.bits, measure)
    batch = next(training.batches(0))
    return state, memory_table(training, policy, state, batch, options.target)


def fresh(training: Training) -> State:
    """The state before the first step."""
    params, found = training.init()
    state = State(params, found, training.optimizer.init(params))
    return jax.device_put(state, training.shardings(state))


def shapes(training: Training) -> State:
    """The same as shapes alone."""
    state = jax.eval_shape(lambda: fresh(training))
    places = training.shardings(state)
    if places is None:
        return state
    return jax.tree.map(lambda x, place: x.update(sharding=place), state, places)


def training_step(
    loss: Loss, optimizer: optax.GradientTransformation, shardings: Any = None
) -> Any:
    """A compiled (state, batch) -> (state, loss); it reuses the memory of its state."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, found), grads = gradient(state.params, state.statistics, batch)
        updates, optimizer_state = optimizer.update(
            grads, state.optimizer, state.params
        )
        params = optax.apply_updates(state.params, updates)
        return State(params, found, optimizer_state), value

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def train(
    training: Training,
    step: Callable[[State, Any], tuple[State, jax.Array]],
    state: State,
    start: int,
    manager: ocp.CheckpointManager | None,
) -> tuple[State, list[float]]:
    """Run the steps from `start` on; seconds of all but the first, which compiles."""
    seconds = []
    usual = Progress.get_default_columns()[:3]
    columns = (*usual, MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=jax.process_index() > 0) as progress:
        bar = progress.add_task("compiling", total=training.num_steps, completed=start)
        numbers = range(start + 1, training.num_steps + 1)
        for number, batch in zip(numbers, training.batches(start), strict=False):
            began = time.perf_counter()
            state, loss = jax.block_until_ready(step(state, batch))
            seconds.append(time.perf_counter() - began)
            progress.update(bar, advance=1, description=f"loss {loss:.3f}")
            if not np.isfinite(loss):
                raise FloatingPointError(f"the loss of step {number} is {loss}")
            if manager is not None:
                last = number == training.num_steps
                manager.save(number, args=ocp.args.StandardSave(state), force=last)
    return state, seconds[1:]


def _interrupted(manager: ocp.CheckpointManager | None) -> str:
    if manager is None:
        return "interrupted; nothing is saved: with --checkpoint FOLDER a run goes on"
    manager.wait_until_finished()
    last = manager.latest_step()
    if last is None:
        return "interrupted; nothing is saved yet: see --save-every"
    return f"interrupted; step {last} is saved, the same command goes on from there"


@contextlib.contextmanager
def _ended_alone(folder: Path | None) -> Iterator[None]:
    """End this process on an error, without waiting, where it is one of several.

    Another one that is gone shows as an error of XLA or of its status (ValueError), or
    of a checkpoint that waits for all (TimeoutError).
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError, OSError) as error:
        if jax.process_count() == 1:
            raise
        where = "the last step saved" if folder else "nothing: give --checkpoint FOLDER"
        command.exit_alone(
            f"process {jax.process_index()} of {jax.process_count()} cannot go on. If "
            f"another one has ended or is out of reach, start all of them again; they "
            f"go on from {where}. The error: {str(error).partition(chr(10))[0]}"
        )


def sensitivity(
    training: Training, state: State, batch: Any, policy: jaxact.Policy
) -> jaxact.Sensitivity:
    """The noise that rounding adds to the gradient, before a step is taken."""
    return jaxact.sensitivity(
        training.loss(policy),
        *(state.params, state.statistics, training.part(batch)),
        has_aux=True,
    )


def memory_table(
    training: Training,
    policy: jaxact.Policy | None,
    state: State,
    batch: Any,
    target: str | None,
) -> Table:
    """The bytes of residuals and of a compiled step, with jaxact and without."""
    devices = [None] if target is None else [None, target]
    here = jax.devices()[0].device_kind
    table = Table(title=f"Memory of a step: {training.name}", min_width=78)
    for column in (
        "",
        "residuals, exact",
        "stored",
        *(f"temp, {d or here}" for d in devices),
    ):
        table.add_column(column, justify="right" if column else "left")
    shardings = training.shardings(state)
    rows = {"uncompressed": None} | ({} if policy is None else {"jaxact": policy})
    for name, kept in rows.items():
        loss = training.loss(kept)
        residuals = jaxact.residuals(
            lambda *arguments, loss=loss: loss(*arguments)[0],
            *(state.params, state.statistics, batch),
            argnums=0,
        )
        step = training_step(loss, training.optimizer, shardings)
        temps = [
            jaxact.memory(step, state, batch, target=d).temp_bytes for d in devices
        ]
        sizes = (residuals.exact_bytes, residuals.stored_bytes, *temps)
        table.add_row(name, *(f"{size / 2**20:.1f} MiB" for size in sizes))
    return table

"""One training whose bits AC-GC chooses, against searches that train with each width.

  python examples/benchmarks/search.py --data DATA --save
  python examples/benchmarks/search.py --small

AC-GC (Evans and Aamodt, NeurIPS 2021) measures while it trains once, and takes the
fewest bits within a bound on the gradient's error. A search trains with every width:

  grid      a training of each width and seed; the fewest bits whose mean score is not
            worse than that of the uncompressed network by more than its standard error
  halving   all widths for a part of the steps, then the half with fewest bits of those
            that are as good as the uncompressed network there, for twice as many
            (Jamieson and Talwalkar, AISTATS 2016), with one seed

Steps are those of all trainings, without the uncompressed ones that each search
compares with. `--save` writes results/search.json beside this file.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from environment import environment
from rich.console import Console
from rich.table import Table
from runs import after_step, stored, train
from tasks import TASKS, Keep, State, Task
from variants import acgc

import jaxact

RESULTS = Path(__file__).parent / "results" / "search.json"
WIDTHS = tuple(range(1, 9))
BOUNDS = 0.1, 0.01  # squared error of the gradient, AC-GC's e^2


@dataclass(frozen=True)
class Found:
    """The result of one way to choose bits.

    Attributes:
      bits: stored for each compressed element, with metadata.
      score: mean over seeds of a whole training with these bits.
      steps: of all trainings that the choice took, and the last of them.
      seconds: the same, with the compilation of all that no way before compiled.
    """

    way: str
    bits: float
    score: float
    steps: int
    seconds: float


@dataclass(frozen=True)
class Scores:
    """Those of the uncompressed network, a training for each seed."""

    every: tuple[float, ...]
    sign: int

    @property
    def tolerance(self) -> float:
        """The standard error of their mean."""
        return statistics.stdev(self.every) / math.sqrt(len(self.every))

    def is_good(self, scores: Sequence[float]) -> bool:
        """Whether the same seeds score as well, up to the tolerance."""
        pairs = zip(self.every, scores, strict=False)
        lost = statistics.mean(self.sign * (base - score) for base, score in pairs)
        return lost <= self.tolerance


@dataclass
class Training:
    """One that can be interrupted."""

    task: Task
    keep: Keep
    seed: int

    def __post_init__(self) -> None:
        self.state: State = self.task.init(self.seed)
        self.batches = enumerate(self.task.batches(self.seed))

    def go_on(self, steps: int) -> float:
        """Train for some more steps; the score there."""
        for step, batch in itertools.islice(self.batches, steps):
            self.state, _ = after_step(
                self.task, self.keep, self.state, batch, self.seed, step
            )
        return self.task.score(self.state)


def found(
    way: str, task: Task, keep: Keep, scores: Iterable[float], steps: int, start: float
) -> Found:
    bits = stored(task, keep)["stored_bits"] or math.nan
    seconds = time.perf_counter() - start
    return Found(way, bits, statistics.mean(scores), steps, seconds)


def grid(task: Task, base: Scores) -> Found:
    start, best = time.perf_counter(), None
    for bits in reversed(WIDTHS):
        keep = jaxact.Policy(bits=bits)
        seeds = range(len(base.every))
        scores = [Training(task, keep, s).go_on(task.num_steps) for s in seeds]
        if best is None or base.is_good(scores):
            best = keep, scores
    assert best is not None
    steps = len(WIDTHS) * len(base.every) * task.num_steps
    return found("grid", task, *best, steps, start)


def halving(task: Task, base: Scores) -> Found:
    """The rungs are an eighth, a quarter, a half and all of the steps."""
    start, done, steps = time.perf_counter(), 0, 0
    exact = Training(task, "all", 0)
    left = {bits: Training(task, jaxact.Policy(bits=bits), 0) for bits in WIDTHS}
    scores: dict[int, float] = {}
    for part in (8, 4, 2, 1):
        until = task.num_steps // part
        goal = exact.go_on(until - done)
        scores = {bits: run.go_on(until - done) for bits, run in left.items()}
        steps += len(left) * (until - done)
        done = until
        lost = {bits: base.sign * (goal - score) for bits, score in scores.items()}
        good = [bits for bits in left if lost[bits] <= base.tolerance] or [max(left)]
        half = max(1, len(left) // 2) if part > 1 else 1
        left = {bits: left[bits] for bits in good[:half]}
    ((bits, run),) = left.items()
    return found("halving", task, run.keep, [scores[bits]], steps, start)


def measured(task: Task, base: Scores, bound: float) -> Found:
    """AC-GC: the mean over seeds of single trainings; steps and seconds of one."""
    variant, start = acgc(bound), time.perf_counter()
    runs = [train(task, variant, seed) for seed in range(len(base.every))]
    seconds = (time.perf_counter() - start) / len(runs)
    score = statistics.mean(task.score(state) for state, _, _ in runs)
    bits = statistics.mean(stored(task, keep)["stored_bits"] for _, keep, _ in runs)
    return Found(variant.name, bits, score, task.num_steps, seconds)


def compare(task: Task, seeds: int) -> tuple[Scores, list[Found]]:
    exact = [Training(task, "all", s).go_on(task.num_steps) for s in range(seeds)]
    base = Scores(tuple(exact), task.sign)
    rows = [measured(task, base, bound) for bound in BOUNDS]
    return base, [*rows, halving(task, base), grid(task, base)]


def table_of(task: Task, base: Scores, rows: Sequence[Found]) -> Table:
    table = Table(title=task.name)
    for title in ("bits chosen by", "stored bits", task.metric, "steps", "seconds"):
        table.add_column(title, justify="right" if table.columns else "left")
    mean = statistics.mean(base.every)
    table.add_row("uncompressed", "-", f"{mean:.3f} ± {base.tolerance:.3f}", "-", "-")
    for row in rows:
        cells = f"{row.bits:.2f}", f"{row.score:.3f}", f"{row.steps:,}"
        table.add_row(row.way, *cells, f"{row.seconds:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["text", "gcn"]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=names)
    parser.add_argument("--seeds", type=int, default=3, help="how many, at least two")
    parser.add_argument("--data", type=Path, help="folder of the tasks' files")
    parser.add_argument("--save", action="store_true", help="results/search.json")
    parser.add_argument("--small", action="store_true", help="a toy, in seconds")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: the spread of at least two trainings is the tolerance")
    console, content = Console(), environment()
    results = []
    for name in options.tasks:
        task = TASKS[name](options.data, options.small)
        base, rows = compare(task, options.seeds)
        console.print(table_of(task, base, rows))
        exact = {"every": base.every, "tolerance": base.tolerance}
        rows = [asdict(row) for row in rows]
        results += [{"task": task.name, "uncompressed": exact, "rows": rows}]
    if options.save:
        RESULTS.write_text(json.dumps(content | {"tasks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

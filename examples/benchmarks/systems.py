"""One comparison: jaxact, four papers' systems, and jax.checkpoint, on small trainings.

  python examples/benchmarks/systems.py --data DATA --resume runs.jsonl --save
  python examples/benchmarks/systems.py --tasks gcn gat --seeds 1
  python examples/benchmarks/systems.py --data DATA --ablation
  python examples/benchmarks/systems.py --tasks segmentation detection rnn
  python examples/benchmarks/systems.py --small

The systems of the papers are jaxact's presets of them (`jaxact.policies`): their rules
for bits, on jaxact's own choice of residuals; each preset lists the differences.
A seed fixes the initial parameters and the order of the data, the same for every
variant. With `--resume FILE` each finished training adds a line to FILE, and those that
FILE has are not repeated. `--save` writes results/systems.json and results/systems.png.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ablation import ablation
from drawn_tasks import DRAWN_TASKS
from environment import environment
from rich.console import Console
from rich.table import Table
from rnn_task import RecurrentTask
from runs import Effort, run
from tasks import TASKS, ImageTask, Task
from variants import VARIANTS

RESULTS = Path(__file__).parent / "results"
BASE = "uncompressed"
SMALL = ["images", "gcn"]
EVERY = TASKS | DRAWN_TASKS | {"rnn": RecurrentTask}
COLUMNS = {
    "bits": "stored_bits",
    "stored": "stored_bytes",
    "temp, H100": "temp_bytes",
    "step": "step_ratio",
    "rounding": "variance_ratio",
}
NOTE = """\
mean ± standard deviation over seeds; bits: per compressed element, scales
included; stored: all residuals; temp: of the compiled step; step: time, uncompressed
is 1; rounding: the gradient variance it adds, the variance between batches is 1"""

Record = dict[str, Any]


def effort_of(options: argparse.Namespace) -> Effort:
    if options.small:
        return Effort(draws=4, steps=2, target=None)
    return Effort(target=options.target or None)


def records_of(
    tasks: Sequence[Task], options: argparse.Namespace, console: Console
) -> Iterator[Record]:
    """A record for each training: from the file where it has one, else a new one."""
    done: dict[tuple[str, str, int], Record] = {}
    if options.resume and options.resume.exists():
        lines = map(json.loads, options.resume.read_text().splitlines())
        done = {(r["task"], r["variant"], r["seed"]): r for r in lines}
    variants = [v for v in VARIANTS if v.name in options.variants]
    effort = effort_of(options)
    for task in tasks:
        for variant in variants:
            for seed in range(options.seeds):
                record = done.get((task.name, variant.name, seed))
                if record is None:
                    with console.status(f"{task.name}: {variant.name}, seed {seed}"):
                        record = run(task, variant, seed, effort)
                    record |= environment()
                    if options.resume:
                        with options.resume.open("a") as file:
                            print(json.dumps(record), file=file)
                yield record


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The standard deviation of one value is 0."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), spread


def summary(records: Sequence[Record]) -> list[Record]:
    """One row for each task and variant: means over seeds of its measurements.

    `lost` is by how much the uncompressed network scores better with the same seed.
    """
    rows = []
    base = {(r["task"], r["seed"]): r for r in records if r["variant"] == BASE}
    key = lambda r: (r["task"], r["variant"])
    for task, variant in dict.fromkeys(map(key, records)):
        here = [r for r in records if key(r) == (task, variant)]
        row = {k: here[0][k] for k in ("task", "variant", "metric")}
        row["seeds"] = len(here)
        row["score"], row["spread"] = mean_and_spread([r["score"] for r in here])
        if (task, here[0]["seed"]) in base:
            lost = [
                r["sign"] * (base[task, r["seed"]]["score"] - r["score"]) for r in here
            ]
            row["lost"], row["lost_spread"] = mean_and_spread(lost)
        for name in (*COLUMNS.values(), "exact_bytes"):
            values = [r[name] for r in here if r[name] is not None]
            row[name] = statistics.mean(values) if values else None
        rows.append(row)
    return rows


def cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("bytes"):
        return f"{value / 2**20:.2f} MiB"
    return f"{value:.2g}" if name == "variance_ratio" else f"{value:.2f}"


def table_of(task: str, rows: Sequence[Record]) -> Table:
    table = Table(title=task)
    table.add_column("", no_wrap=True)
    for column in (rows[0]["metric"], *COLUMNS):
        table.add_column(column, justify="right")
    for row in rows:
        digits = 1 if row["metric"].endswith("%") else 3
        score = f"{row['score']:.{digits}f} ± {row['spread']:.{digits}f}"
        cells = (cell(name, row[name]) for name in COLUMNS.values())
        table.add_row(row["variant"], score, *cells)
    return table


def plot(rows: Sequence[Record], path: Path) -> None:
    """The loss in score against the stored bytes; a panel for each task."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    size = 4.5 * len(tasks), 4.5
    figure, (axes,) = pyplot.subplots(
        1, len(tasks), figsize=size, squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes, tasks, strict=True):
        here = [row for row in rows if row["task"] == task]
        for row in (r for r in here if "lost" in r):
            bits = 32 * row["stored_bytes"] / row["exact_bytes"]
            point = bits, row["lost"], row["lost_spread"]
            axis.errorbar(*point, marker="o", capsize=3, label=row["variant"])
        axis.axhline(0, color="gray", linewidth=0.5)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("stored bits for each 32 that JAX would keep")
        axis.set_ylabel(f"lost {here[0]['metric']}, same seeds")
        axis.set_title(task, fontsize=9)
    legend = axes[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2 * len(tasks))
    figure.savefig(path, dpi=150)


def save(records: Sequence[Record]) -> None:
    rows = summary(records)
    RESULTS.mkdir(exist_ok=True)
    content = environment() | {"summary": rows, "runs": list(records)}
    (RESULTS / "systems.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(rows, RESULTS / "systems.png")


def parse() -> argparse.Namespace:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=EVERY, help="instead of four")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"instead of all: {'; '.join(names)}",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--data", type=Path, help="folder of the three files")
    parser.add_argument("--resume", type=Path, help="JSON lines to go on from")
    parser.add_argument("--save", action="store_true", help="results/systems.*")
    parser.add_argument(
        "--ablation", action="store_true", help="ActNN's and DIVISION's, instead"
    )
    parser.add_argument("--target", default="h100", help="'' compiles for none")
    parser.add_argument("--small", action="store_true", help="a toy, in seconds")
    options = parser.parse_args()
    if options.save and importlib.util.find_spec("matplotlib") is None:
        parser.error("--save draws a plot: pip install 'jaxact[plots]'")
    options.tasks = options.tasks or (SMALL if options.small else list(TASKS))
    return options


def compare(options: argparse.Namespace, console: Console) -> None:
    tasks = [EVERY[name](options.data, options.small) for name in options.tasks]
    records = list(records_of(tasks, options, console))
    rows = summary(records)
    for task in tasks:
        console.print(table_of(task.name, [r for r in rows if r["task"] == task.name]))
    console.print(NOTE, style="dim", markup=False, highlight=False)
    if options.save:
        save(records)


def ablate(options: argparse.Namespace, console: Console) -> None:
    task = ImageTask(options.data, options.small)
    with console.status(f"{task.name}: ablation"):
        rows = ablation(task, effort_of(options))
    table = Table(title=task.name)
    for column in ("gradients from", "squared error", "over variance of batches"):
        table.add_column(column, justify="right" if table.columns else "left")
    for row in rows:
        error = f"{row['error']:.3g} ± {row['spread']:.1g}"
        table.add_row(row["policy"], error, f"{row['ratio']:.2g}")
    console.print(table)
    if options.save:
        content = environment() | {"task": task.name, "rows": rows}
        (RESULTS / "ablation.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    options, console = parse(), Console()
    with tempfile.TemporaryDirectory() as folder:
        # To measure sensitivities, each seed compiles the same program.
        jax.config.update("jax_compilation_cache_dir", folder)
        (ablate if options.ablation else compare)(options, console)


if __name__ == "__main__":
    main()

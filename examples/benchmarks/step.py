"""One training step taken in several ways, side by side: its time and its memory.

  python examples/benchmarks/step.py --small                   a CPU, about 15 minutes
  python examples/benchmarks/step.py                           a GPU
  python examples/benchmarks/step.py --compile-only --target h100     no GPU: memory and
                                                         predicted time
  python examples/benchmarks/step.py --model gpt --ways uncompressed "jaxact 4 bits"

A step is value, gradient and AdamW update, its state donated. All ways start from the
same parameters and see the same batches; each is timed against the uncompressed step,
the two taking turns; the uncompressed step against itself shows the noise. With
`--output results/step`, results/step.json gets each row as it is measured, and step.md
and step.png the tables and the picture; with `--resume`, rows that the file has are not
measured again; its target and its steps must be those of the run.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from step_networks import FULL, NETWORKS, SMALL
from step_report import NOTE, markdown, plot, tables
from step_runs import NUMBERS, Effort, device_counts, in_fresh_process, measure
from step_ways import WAYS

Record = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    choice("--model", choices=NETWORKS, help=f"of {', '.join(NETWORKS)}")
    choice("--ways", choices=WAYS, default=list(WAYS), help=f"of {'; '.join(WAYS)}")
    parser.add_argument("--small", action="store_true", help=f"{', '.join(SMALL)}")
    parser.add_argument("--steps", type=int, default=16, help="of each training")
    parser.add_argument("--target", help="compile for this GPU too, none attached")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="run nothing; compile for the target alone, if there is one",
    )
    parser.add_argument("--output", type=Path, help="name of files, without a suffix")
    parser.add_argument("--resume", action="store_true", help="keep the rows of OUTPUT")
    options = parser.parse_args()
    if options.resume and not options.output:
        parser.error("--resume goes on from the file that --output names")
    if options.output and importlib.util.find_spec("matplotlib") is None:
        parser.error("--output draws a plot: pip install 'jaxact[plots]'")
    if options.steps < 4:
        parser.error(f"--steps {options.steps}: quartiles need at least 4")
    options.model = options.model or list(SMALL if options.small else FULL)
    return options


def effort_of(options: argparse.Namespace) -> Effort:
    if not options.compile_only:
        return Effort(options.steps, target=options.target)
    return Effort(0, target=options.target, here=options.target is None)


def measurer() -> Callable[..., Record]:
    """Measures a row; in a process of its own where the device counts bytes."""
    if in_fresh_process(device_counts):
        return functools.partial(in_fresh_process, measure)
    return measure


def rows_of(options: argparse.Namespace) -> list[Record]:
    """Those measured now and those that the file has; each is written at once."""
    path = options.output and options.output.with_suffix(".json")
    done = json.loads(path.read_text()) if options.resume and path.exists() else []
    check_resumed(done, options)
    # A file may be from before some number was measured.
    empty = dict.fromkeys(NUMBERS)
    found = {(row["network"], row["way"]): empty | row for row in done}
    wanted = [(network, way) for network in options.model for way in options.ways]
    missing = [key for key in wanted if key not in found]
    take, effort = measurer(), effort_of(options)
    with Progress(
        *Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeElapsedColumn()
    ) as progress:
        bar = progress.add_task("", total=len(missing))
        for key in missing:
            progress.update(bar, description=", ".join(key))
            found[key] = take(*key, effort)
            progress.advance(bar)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(in_order(found), indent=1) + "\n")
    return in_order(found)


def check_resumed(rows: list[Record], options: argparse.Namespace) -> None:
    """Exit where the rows of a file were measured otherwise than this run would."""
    effort = effort_of(options)
    wanted = {"target": effort.target, "steps": effort.steps}
    for row in rows:
        found = {name: row.get(name) for name in wanted}
        if found != wanted:
            told = lambda values: ", ".join(f"{k} {v}" for k, v in values.items())
            sys.exit(
                f"--resume: {options.output.with_suffix('.json')} has rows of "
                f"{told(found)}; this run is of {told(wanted)}. Give another --output, "
                "or the same options."
            )


def in_order(found: dict[tuple[str, str], Record]) -> list[Record]:
    keys = itertools.product(NETWORKS, WAYS)
    return [found[key] for key in keys if key in found]


def main() -> None:
    options, console = parse(), Console()
    with tempfile.TemporaryDirectory() as folder:
        # Processes of their own compile the uncompressed step once.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        rows = rows_of(options)
    for table in tables(rows):
        console.print(table)
    console.print(NOTE, style="dim", markup=False, highlight=False)
    if options.output:
        options.output.with_suffix(".md").write_text(markdown(rows))
        plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()

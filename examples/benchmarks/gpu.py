"""Check and time everything on the GPU at hand, beside its predictions.

  python examples/benchmarks/gpu.py                    under ten minutes, no network
  python examples/benchmarks/gpu.py --dry-run          the same, tiny, also on a CPU
  python examples/benchmarks/gpu.py --only steps --networks resnet50

Every kernel has to give the bits of its definition, and is then timed. Training steps
are taken in turns with the uncompressed one, each way in a process of its own, in which
the device counts the bytes that it has allocated. Both are compared with what
`jaxact.predicted_time` and the compiler say without running anything. Results are
written to OUTPUT.json as they come; the table comes last. The exit status is 1 where
bits differ or a step fails.

Most of the time goes into compiling, so kernels are checked and steps are compiled side
by side first; XLA keeps what it chose for products and convolutions for all ways.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from environment import environment
from gpu_report import table
from rich.console import Console
from step_networks import NETWORKS
from step_runs import Effort, compile_step, in_fresh_process, measure
from step_ways import WAYS

KERNELS = Path(__file__).parents[2] / "kernels" / "benchmarks"
RESULTS = Path(__file__).parent / "results"
PARTS = "checks", "steps", "kernels"
# Those of `kernels/benchmarks/formats.py`, whose kernels compile fastest first.
FORMATS = "affine", "dithered", "rotated", "adaptive"
LOSSLESS, NORMALIZED = "lossless", "normalized"
Record = dict[str, Any]


@dataclass(frozen=True)
class Extent:
    """The things that are measured, the most important first.

    Attributes:
      checked: shapes of `kernels/benchmarks/shapes.py` in which every width is checked.
      timed: those in which `timed_widths` are timed too.
      networks, ways: of steps.
      steps, turn: that each way takes, and in one turn.
    """

    checked: tuple[str, ...]
    timed: tuple[str, ...]
    networks: tuple[str, ...]
    ways: tuple[str, ...]
    widths: tuple[int, ...] = (1, 2, 3, 4, 8)
    timed_widths: tuple[int, ...] = (4, 2)
    steps: int = 48
    turn: int = 8

    @property
    def subjects(self) -> list[tuple[str, str, int]]:
        """(shape, format, bits) of each check."""
        names = *FORMATS, NORMALIZED
        widths = itertools.product(self.checked, names, self.widths)
        return [*((shape, LOSSLESS, 1) for shape in self.checked), *widths]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(network, way) of each row of steps."""
        first = itertools.product(self.networks, self.ways[:2])
        others = itertools.product(self.networks, self.ways[2:])
        return [*first, *others]


FULL = Extent(
    checked=("small stream", "small padded"),
    timed=("resnet50 stage 1 wide", "gpt2-medium hidden"),
    networks=("resnet50", "gpt2-small", "vit-b"),
    ways=("uncompressed", "jaxact 4 bits", "checkpoint", "jaxact 2 bits"),
)
DRY = Extent(
    checked=("small padded",),
    timed=("small padded",),
    networks=("tiny",),
    ways=("uncompressed", "jaxact 4 bits"),
    widths=(1,),
    timed_widths=(2,),
    steps=6,
    turn=2,
)


def kernel_check(shape: str, name: str, bits: int) -> Record:
    """Compare the kernels of one format with their definitions.

    Args:
      name: of a format; 'lossless', the kernels of masks and indices; or 'normalized',
        the one that encodes a norm's values from its input.
    """
    run, activation = kernel_benchmark(shape)
    row: Record = {"shape": shape, "format": name, "bits": bits}
    try:
        if name == LOSSLESS:
            run.checked_lossless(activation)
        elif name == NORMALIZED:
            importlib.import_module("normalized").check_normalized(activation, bits)
        else:
            run.checked(run.FORMATS[name], activation, bits)
    except (Exception, SystemExit) as error:
        row |= wrong(error)
    return row


def wrong(error: BaseException) -> Record:
    """What a row has of it; the kernels' benchmark exits where bits differ."""
    if isinstance(error, SystemExit):
        return {"error": textwrap.shorten(str(error), 300)}
    text = f"{type(error).__name__}: {error}"
    return {"error": textwrap.shorten(text, 300), "failed": True}


def kernel_rows(shape: str, bits: Sequence[int], samples: int) -> list[Record]:
    """Check and time the kernels in one shape; a difference in bits is a row too."""
    import jax

    run, activation = kernel_benchmark(shape)
    on_gpu = jax.default_backend() == "gpu"
    clock = "cupti" if on_gpu and samples > 1 else "wall"
    parts = [
        functools.partial(run.measure, form, activation, b)
        for form in run.FORMATS.values()
        for b in bits
    ]
    parts.append(functools.partial(run.measure_lossless, activation))
    rows: list[Record] = []
    for part in parts:
        try:
            rows += part(samples, clock)
        except (Exception, SystemExit) as error:
            rows.append({"shape": shape} | wrong(error))
    return [row | predicted(row) for row in rows] if on_gpu else rows


def kernel_benchmark(shape: str) -> tuple[Any, Any]:
    """The kernels' own benchmark, and one of its shapes by name."""
    sys.path.insert(0, str(KERNELS))
    import run
    import shapes

    every = shapes.SMALL + shapes.RESNET50 + shapes.GPT2_MEDIUM
    (activation,) = [each for each in every if each.name == shape]
    return run, activation


def predicted(row: Record) -> Record:
    """The predicted time of a copy, by the bytes that the kernel moves instead."""
    import jax
    import jax.numpy as jnp

    import jaxact

    if "error" in row:
        return {}
    array = jax.ShapeDtypeStruct(row["dims"], row["dtype"])
    change = jnp.invert if array.dtype == bool else jnp.negative
    copy = jaxact.predicted_time(change, array)
    moved = copy.bytes / 2 + row["stored_bytes"]
    return {"predicted_microseconds": 1e6 * copy.seconds * moved / copy.bytes}


def prepared(extent: Extent, parts: Sequence[str]) -> list[Record]:
    """Rows of checks; steps are in the compilation cache after it."""
    jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    if "steps" in parts:
        jobs += [(compile_step, row) for row in extent.rows]
    if "checks" in parts:
        jobs += [(kernel_check, subject) for subject in extent.subjects]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # many share the device
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = [pool.submit(function, *args) for function, args in jobs]
        found = [job.result() for job in running]
    del os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
    return [row for row in found if row is not None]


def measured(
    extent: Extent, parts: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """In which list of the results, and how. After the first, alone on the device."""
    fresh = functools.partial(functools.partial, in_fresh_process)
    if "checks" in parts or "steps" in parts:
        yield "checks", functools.partial(prepared, extent, parts)
    if "steps" in parts:
        for network, way in extent.rows:
            effort = Effort(extent.steps, extent.turn)
            yield "steps", fresh(measure, network, way, effort)
    if "kernels" in parts:
        for shape in extent.timed:
            yield "kernels", fresh(kernel_rows, shape, extent.timed_widths, 10)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    choice = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    choice("--networks", choices=NETWORKS, help=f"of {', '.join(NETWORKS)}")
    ways = f"of {'; '.join(WAYS)}; uncompressed first"
    choice("--ways", choices=WAYS, help=ways)
    parser.add_argument(
        "--minutes", type=float, default=9, help="after which nothing new is started"
    )
    output = "without a suffix; a dry run writes nothing without it"
    parser.add_argument("--output", type=Path, help=output)
    return parser.parse_args()


def main() -> None:
    options, console = parse(), Console(width=120)
    extent = DRY if options.dry_run else FULL
    chosen = {k: tuple(getattr(options, k) or ()) for k in ("networks", "ways")}
    extent = replace(extent, **{k: names for k, names in chosen.items() if names})
    end = time.monotonic() + 60 * options.minutes
    results: Record = {"checks": [], "kernels": [], "steps": [], "left_out": 0}
    with tempfile.TemporaryDirectory() as folder:
        default = (Path(folder) if options.dry_run else RESULTS) / "gpu"
        path = (options.output or default).with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        results |= in_fresh_process(environment)
        if not options.dry_run and "NVIDIA" not in results["device"]:
            sys.exit(f"{results['device']} is no GPU: --dry-run tries the command")
        for kind, part in measured(extent, options.only):
            if time.monotonic() > end:
                results["left_out"] += 1
                continue
            found = part()
            results[kind] += found if isinstance(found, list) else [found]
            path.write_text(json.dumps(results, indent=1) + "\n")
        path.write_text(json.dumps(results, indent=1) + "\n")
    console.print(table(results))
    if problems := problems_of(results):
        sys.exit("; ".join(problems))


def problems_of(results: Record) -> list[str]:
    """What makes the exit status 1."""
    kernels = [row for row in results["checks"] + results["kernels"] if "error" in row]
    found = {
        "a kernel has not the bits of its definition": any(
            "failed" not in row for row in kernels
        ),
        "a kernel failed": any("failed" in row for row in kernels),
        "a step failed": any(row["why"] for row in results["steps"]),
    }
    return [text for text, is_so in found.items() if is_so]


if __name__ == "__main__":
    main()

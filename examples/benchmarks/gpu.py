"""Check and time everything on the GPU at hand, beside its predictions.

  python examples/benchmarks/gpu.py                    under ten minutes, no network
  python examples/benchmarks/gpu.py --dry-run          the same, tiny, also on a CPU

Every kernel has to give the bits of its definition, and is then timed. Training steps
are taken in turns with the uncompressed one, each way in a process of its own, in which
the device counts the bytes that it has allocated. Both are compared with what
`jaxact.predicted_time` and the compiler say without running anything. Results are
written to OUTPUT.json as they come; the table comes last.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import environment
from gpu_report import table
from rich.console import Console
from step_runs import Effort, in_fresh_process, measure

KERNELS = Path(__file__).parents[2] / "kernels" / "benchmarks"
RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


@dataclass(frozen=True)
class Extent:
    """The things that are measured, the most important first.

    Attributes:
      checked: shapes of `kernels/benchmarks/shapes.py` in which every width is checked.
      timed: those in which 2 and 4 bits are timed too.
      networks, ways: of steps.
      steps: that each way takes.
    """

    checked: tuple[str, ...]
    timed: tuple[str, ...]
    networks: tuple[str, ...]
    ways: tuple[str, ...]
    widths: tuple[int, ...] = tuple(range(1, 9))
    steps: int = 16


FULL = Extent(
    checked=("small stream", "small padded"),
    timed=("resnet50 stage 1 wide", "gpt2-medium hidden"),
    networks=("vit-b", "resnet50", "gpt2-small"),
    ways=("uncompressed", "jaxact 4 bits", "checkpoint", "jaxact 2 bits"),
)
DRY = Extent(
    checked=(),
    timed=("small padded",),
    networks=("tiny",),
    ways=("uncompressed", "jaxact 4 bits"),
    widths=(),
    steps=4,
)


def kernel_rows(shape: str, bits: Sequence[int], samples: int) -> list[Record]:
    """Check and time the kernels in one shape; a difference in bits is a row too."""
    sys.path.insert(0, str(KERNELS))
    import jax
    import run
    import shapes

    every = shapes.SMALL + shapes.RESNET50 + shapes.GPT2_MEDIUM
    (activation,) = [each for each in every if each.name == shape]
    on_gpu = jax.default_backend() == "gpu"
    clock = "cupti" if on_gpu and samples > 1 else "wall"
    parts = [functools.partial(run.measure, activation, b) for b in bits]
    parts.append(functools.partial(run.measure_lossless, activation))
    rows: list[Record] = []
    for part in parts:
        try:
            rows += part(samples, clock)
        except SystemExit as difference:
            rows.append({"shape": shape, "error": str(difference)})
    return [row | predicted(row) for row in rows] if on_gpu else rows


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


def parts_of(extent: Extent) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured: 'kernels' or 'steps', and the measurement in a new process."""
    fresh = functools.partial(functools.partial, in_fresh_process)
    for shape in extent.timed:
        yield "kernels", fresh(kernel_rows, shape, (4, 2), 10)
    base, *others = extent.ways
    effort = Effort(extent.steps)
    for network in extent.networks:
        for way in (base, others[0]):
            yield "steps", fresh(measure, network, way, effort)
    for shape in extent.checked:
        yield "kernels", fresh(kernel_rows, shape, extent.widths, 1)
    for way in others[1:]:
        for network in extent.networks:
            yield "steps", fresh(measure, network, way, effort)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    parser.add_argument(
        "--minutes", type=float, default=9, help="after which nothing new is started"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "gpu", help="without a suffix"
    )
    return parser.parse_args()


def main() -> None:
    options, console = parse(), Console(width=120)
    extent = DRY if options.dry_run else FULL
    path = options.output.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results: Record = {"kernels": [], "steps": [], "left_out": 0}
    with tempfile.TemporaryDirectory() as folder:
        # Each process would compile the uncompressed step.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        results |= in_fresh_process(environment)
        if not options.dry_run and "NVIDIA" not in results["device"]:
            sys.exit(f"{results['device']} is no GPU: --dry-run tries the command")
        for kind, part in parts_of(extent):
            if time.monotonic() > end:
                results["left_out"] += 1
                continue
            found = part()
            results[kind] += found if isinstance(found, list) else [found]
            path.write_text(json.dumps(results, indent=1) + "\n")
    path.write_text(json.dumps(results, indent=1) + "\n")
    console.print(table(results))
    if any("error" in row for row in results["kernels"]):
        sys.exit("a kernel has not the bits of its definition")


if __name__ == "__main__":
    main()

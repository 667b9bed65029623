"""Try block sizes for the affine kernels near those that `config.heuristic` chooses.

  python kernels/benchmarks/tune.py --dtypes bfloat16   # on a GPU: times them
  python kernels/benchmarks/tune.py --target h100       # without one: counts

The first checks each candidate's bits and times it as `run` does. The second compiles
each and ranks them by `count`'s bound; it also reports how latency is hidden: how many
warps a multiprocessor holds, and how many bytes they ask for before they wait.
No code here runs in a user's program: the outcome is the rule in `config`.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxact_kernels import affine, choose
from jaxact_kernels.config import Config, heuristic

FOLDER = Path(__file__).parent
SHAPE = (8192, 4096)  # of the arrays timed
LEAST, MOST = 0.5, 2  # elements in a thread worth a try, relative to the heuristic
CLOSE = 0.97  # share of the best speed: nearer is no reason to change a rule

# One multiprocessor of an H100: CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability", 9.0.
REGISTERS, WARPS, BLOCKS, SHARED_BYTES = 65536, 64, 32, 228 * 1024
BLOCK_SHARED_BYTES = 1024  # that the driver takes from each block
FEWEST_WARPS = 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """One kernel on one kind of array."""

    operation: str
    implementation: str
    bits: int
    dtype: str
    group_size: int

    @property
    def heuristic(self) -> Config:
        return heuristic(self.group_size, jnp.dtype(self.dtype).itemsize)

    def candidates(self) -> list[Config]:
        """The heuristic's block first, and others around it.

        They vary, one at a time, how much a thread holds and how many threads make a
        block.
        """
        start, configs = self.heuristic, [self.heuristic]
        warps = (1, 2, 4, 8) if self.implementation == "triton" else (start.num_warps,)
        for factor, num_warps in itertools.product((0.25, 0.5, 1, 2, 4), warps):
            groups = start.groups * factor
            threads = num_warps / start.num_warps  # relative to the heuristic
            per_thread = factor / threads  # elements, relative to the heuristic
            if groups < 1 or 1 not in (per_thread, threads):
                continue
            if LEAST <= per_thread <= MOST:
                configs.append(Config(int(groups), num_warps))
        return list(dict.fromkeys(configs))

    def __str__(self) -> str:
        kernel = f"{self.operation} by {self.implementation}: {self.bits} bits"
        return f"{kernel}, {self.dtype}, groups of {self.group_size}"


def counted(problem: Problem, configs: list[Config]) -> Iterator[dict]:
    """Each candidate's counts, from its machine code."""
    import count

    make = functools.partial(count.Subject, "affine", **dataclasses.asdict(problem))
    subjects = [make(config=config) for config in configs]
    # Mosaic GPU raises blocks that are too small to the same one, compiled once here.
    for subject in {subject.block: subject for subject in subjects}.values():
        row = count.count(subject)
        warps = resident_warps(row)
        yield {
            "config": row["config"],
            **{key: row[key] for key in ("registers", "spilled_bytes", "per_element")},
            "resident_warps": warps,
            "bytes_in_flight": 32 * warps * row["bytes_in_flight_per_thread"],
            "compute_bytes_per_second": row["compute_bytes_per_second"],
            "bytes_per_second": row["expected_bytes_per_second"],
        }


def resident_warps(row: dict) -> int:
    """Warps that a multiprocessor holds; registers go to a warp 256 at a time.

    Each block is assumed to share all elements that it holds; no kernel shares more.
    """
    num_warps, shared = row["config"]["num_warps"], BLOCK_SHARED_BYTES
    if row["uses_shared"]:
        elements = 32 * num_warps * row["elements_per_thread"]
        shared += int(elements) * jnp.dtype(row["dtype"]).itemsize
    of_warp = 256 * math.ceil(row["registers"] / 8)
    blocks = REGISTERS // (of_warp * num_warps), WARPS // num_warps, BLOCKS
    return num_warps * min(*blocks, SHARED_BYTES // shared)


def timed(
    problem: Problem, configs: list[Config], num_samples: int, clock: str
) -> Iterator[dict]:
    """Each candidate's times on the device at hand, once its bits are right."""
    import run
    import shapes

    activation = shapes.Activation("tuned", SHAPE, problem.dtype)
    count = max(2, math.ceil(run.CACHE_BYTES / activation.num_bytes))
    xs = run.samples_of(activation, count)
    inputs = [(x, jnp.uint32(run.SEED + i)) for i, x in enumerate(xs)]
    cases = [_case(problem, config, inputs) for config in (None, *configs)]
    run.check(cases, cases[0].inputs)
    for config, case in zip(configs, cases[1:], strict=True):
        times = run.microseconds([case], num_samples, clock)[case]
        yield {
            "config": dataclasses.asdict(config),
            "microseconds": times,
            "bytes_per_second": activation.num_bytes / statistics.median(times) * 1e6,
        }


def _case(problem: Problem, config: Config | None, inputs: list[Any]) -> Any:
    """A candidate; None is the definition."""
    import run

    options: dict[str, Any] = {"bits": problem.bits, "group_size": problem.group_size}
    reference = functools.partial(affine.encode, **options, implementation="reference")
    if problem.operation == "decode":
        inputs = [reference(*arguments) for arguments in inputs]
        options |= {"shape": SHAPE, "dtype": jnp.dtype(problem.dtype)}
    module, name = affine, "reference"
    if config is None:
        options["implementation"] = "reference"
    else:
        module = importlib.import_module(f"{affine.__name__}.{problem.implementation}")
        options["config"], name = config, str(config)
        options |= {"stochastic": True} if problem.operation == "encode" else {}
    function = functools.partial(getattr(module, problem.operation), **options)
    called = function if problem.operation == "decode" else lambda each: function(*each)
    return run.Case(problem.operation, name, called, inputs)


def finding(problem: Problem, rows: list[dict]) -> str:
    """The heuristic's faults, from the first row; empty if there are none."""
    best = max(rows, key=_rank)
    first, reasons = rows[0], []
    share = first["bytes_per_second"] / best["bytes_per_second"]
    if share < CLOSE:
        reasons.append(f"{share:.3f} of the speed of {best['config']}")
    if first.get("spilled_bytes"):
        reasons.append(f"spills {first['spilled_bytes']} bytes")
    if first.get("resident_warps", FEWEST_WARPS) < FEWEST_WARPS:
        reasons.append(f"{first['resident_warps']} warps resident")
    if not reasons:
        return ""
    return f"{problem}: {first['config']} has {', '.join(reasons)}"


def _rank(row: dict) -> tuple[float, ...]:
    """The faster; among equals by memory, the one that hides its latency better."""
    speed = row["bytes_per_second"]
    hides = row.get("resident_warps", FEWEST_WARPS) >= FEWEST_WARPS
    return speed, hides, row.get("compute_bytes_per_second", speed)


def table(results: list[dict]) -> str:
    """The heuristic's block and the best one, for each problem."""
    lines = [
        "| problem | block | TB/s | pipes alone | registers | spilled | warps | KiB in "
        "flight | issue | ALU |",
        "|---" * 10 + "|",
    ]
    for result in results:
        rows = {"heuristic": result["candidates"][0], "best": result["best"]}
        for name, row in rows.items():
            block = row["config"]
            speeds = (row["bytes_per_second"], row.get("compute_bytes_per_second"))
            cells = [f"{result['problem']}", f"{name} {tuple(block.values())}"]
            cells += [
                "" if speed is None else f"{speed / 1e12:.2f}" for speed in speeds
            ]
            if "registers" not in row:
                cells += [""] * 6
            else:
                cells += [row[k] for k in ("registers", "spilled_bytes")]
                cells += [row["resident_warps"], f"{row['bytes_in_flight'] / 1024:.0f}"]
                cells += [f"{row['per_element'][k]:.2f}" for k in ("issue", "alu")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def problems(options: argparse.Namespace) -> list[Problem]:
    """Those asked for that the device serves; prints why it declines the others."""
    served, reasons = [], {}
    for each in itertools.product(
        options.ops,
        options.implementations,
        options.bits,
        options.dtypes,
        options.groups,
    ):
        problem = Problem(*each)
        kind = {"encode": affine.Encode, "decode": affine.Decode}[problem.operation]
        dtype = jnp.dtype(problem.dtype)
        operation = kind(SHAPE, dtype, problem.bits, problem.group_size)
        try:
            choose(operation, options.target, problem.implementation)
        except NotImplementedError as reason:
            reasons.setdefault(str(reason), problem)
            continue
        served.append(problem)
    for reason, problem in reasons.items():
        print(f"{problem} and perhaps others: {reason}", file=sys.stderr)
    return served


def tune(problem: Problem, options: argparse.Namespace) -> dict:
    configs = problem.candidates()[: options.most]
    print(f"{problem}: {len(configs)} blocks", file=sys.stderr, flush=True)
    if options.target:
        rows = list(counted(problem, configs))
    else:
        rows = list(timed(problem, configs, options.samples, options.clock))
    return {
        **dataclasses.asdict(problem),
        "problem": str(problem),
        "best": max(rows, key=_rank),
        "finding": finding(problem, rows),
        "candidates": rows,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("h100",), help="count, for this GPU")
    parser.add_argument("--out", type=Path, help="results/<device>-tune.json else")
    operations = ["encode", "decode"]
    parser.add_argument("--ops", nargs="+", default=operations, choices=operations)
    kernels = ["triton", "mosaic_gpu"]
    parser.add_argument(
        "--implementations", nargs="+", default=kernels, choices=kernels
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--most", type=int, help="candidates of each problem")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--clock", choices=("cupti", "wall"), default="cupti")
    return parser.parse_args()


def main() -> None:
    options = _options()
    asked = problems(options)
    if not asked:
        sys.exit("nothing to tune: attach an NVIDIA GPU or pass --target h100")
    if options.target:
        import count

        made, name = count.assumed(), f"{options.target}-tune-count"
    else:
        device = jax.devices()[0].device_kind
        today = datetime.date.today().isoformat()
        made = {"device": device, "jax": jax.__version__, "date": today}
        made |= {"clock": options.clock, "shape": SHAPE}
        name = device.lower().replace(" ", "-") + "-tune"
    out = options.out or FOLDER / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    made["command"] = " ".join(["python kernels/benchmarks/tune.py", *sys.argv[1:]])
    results: list[dict] = []
    for problem in asked:
        results.append(tune(problem, options))
        # Each time, as a machine may be lent for less long than all of them take.
        out.write_text(json.dumps(made | {"results": results}, indent=1) + "\n")
    print(table(results))
    for text in filter(None, (result["finding"] for result in results)):
        print(text)


if __name__ == "__main__":
    main()

"""Time packing and unpacking on the device at hand, after checking every bit of it.

  python kernels/benchmarks/run.py [--small] [--bits 2 4] [--shapes gpt2 stage]

The rows that matter most, in a few minutes of a GPU:

  python kernels/benchmarks/run.py --bits 2 4 --shapes "resnet50 stem" \\
    "resnet50 stage 1 wide" "gpt2-medium attention" "gpt2-medium hidden"

Each implementation is compiled as a chain of calls on so many inputs that a GPU's cache
has lost most before their next turn. On a GPU CUPTI times the kernels, without the gaps
between them; elsewhere, or by `--clock wall`, time is from call to result. Timed are
the implementations that do not decline, the reference under XLA, and `naive`'s two; a
copy, which reads and writes the unpacked bytes once each, is the yardstick. Masks and
indices are timed on a few shapes alone.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shapes
from cases import (
    SEED,
    Case,
    decoders,
    encoders,
    lossless,
    num_bytes,
    samples_of,
    with_special_values,
)
from formats import FORMATS, Format

FOLDER = Path(__file__).parent
CACHE_BYTES = 128 * 2**20  # more than twice an H100's L2 of 50 MB
OUTPUT_BYTES = 4 * 2**30  # that CUPTI's repetitions may hold at a time
LOSSLESS = "resnet50 stem", "gpt2-medium hidden", "small stream"


def check(cases: list[Case], inputs: list[Any]) -> None:
    """Exit unless all give the reference's bits; `naive` has bits of its own."""
    wanted, wrong = _reference(cases).chain(inputs), []
    for case in cases:
        if case.implementation in ("reference", "naive"):
            continue
        if count := _num_differences(case.chain(inputs), wanted):
            wrong.append(f"{case.op}: {case.implementation} differs in {count} places")
    if wrong:
        sys.exit("; ".join(wrong))


def check_naive(xs: list[Any], stored: list[Any], decoded: list[Any]) -> None:
    for x, (_, _, scale), back in zip(xs, stored, decoded, strict=True):
        x, back = x.astype(jnp.float32), back.astype(jnp.float32)
        error = abs(x - back).reshape(len(scale), -1)
        # Rounding to the dtype adds half an ulp, at most 2**-8 of the value.
        if not (error <= scale * 1.001 + abs(x).max() / 2**8).all():
            sys.exit("decode: naive is off by more than one step")


def microseconds(
    cases: list[Case], num_samples: int, clock: str
) -> dict[Case, list[float]]:
    """Times for one call by each case, one a sample."""
    if clock == "cupti":
        return {case: _by_cupti(case, num_samples) for case in cases}
    for case in cases:
        jax.block_until_ready(case.chain(case.inputs))
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(num_samples):  # taking turns spreads a machine's moods evenly
        for case in cases:
            start = time.perf_counter()
            jax.block_until_ready(case.chain(case.inputs))
            seconds = time.perf_counter() - start
            times[case].append(seconds * 1e6 / len(case.inputs))
    return times


def _by_cupti(case: Case, num_samples: int) -> list[float]:
    # Imported here because it needs libraries that only a GPU's machine has.
    from jax.experimental.mosaic.gpu import profiler

    times: list[float] = []
    while len(times) < num_samples:
        repeats = max(1, min(num_samples, OUTPUT_BYTES // case.output_bytes))
        measured = profiler.measure(case.chain, iterations=repeats)(case.inputs)[1]
        if measured is None:
            sys.exit(f"CUPTI saw no kernel of {case.op} by {case.implementation}")
        runs = measured if isinstance(measured, list) else [measured]
        times += [milliseconds * 1e3 / len(case.inputs) for milliseconds in runs]
    return times


@dataclasses.dataclass(frozen=True)
class Checked:
    """Cases of one format in one shape that give the bits of their definitions."""

    xs: list[jax.Array]
    encode: list[Case]
    decode: list[Case]
    sizes: dict[str, int]


def checked(
    form: Format, activation: shapes.Activation, bits: float, count: int = 1
) -> Checked:
    """Try every implementation on `count` arrays of ordinary and special values."""
    xs = samples_of(activation, count)
    # Seeds differ, so that calls have no noise in common that XLA computes once.
    seeds = [jnp.uint32(SEED + i) for i in range(count)]
    inputs = list(zip(xs, seeds, strict=True))
    encode = encoders(form, activation, bits, inputs)
    special = [(with_special_values(x), seed) for x, seed in inputs]
    check(encode, special)
    stored = {
        case.implementation: case.chain(inputs)
        for case in encode
        if case.implementation in ("reference", "naive")
    }
    decode = decoders(form, activation, bits, stored)
    check(decode, _reference(encode).chain(special))
    if "naive" in stored:
        check_naive(xs, stored["naive"], decode[-1].chain(stored["naive"]))
    sizes = {name: num_bytes(outputs[0]) for name, outputs in stored.items()}
    return Checked(xs, encode, decode, sizes)


def measure(
    form: Format,
    activation: shapes.Activation,
    bits: float,
    num_samples: int,
    clock: str,
) -> list[dict]:
    """Rows for one format in one shape, checked; a copy's beside the first format's."""
    found = checked(form, activation, bits, num_inputs(activation.num_bytes))
    cases = [*found.encode, *found.decode]
    if form.name == "affine":
        # XLA would elide a plain copy.
        cases.append(Case("copy", "negation", lambda x: -x, found.xs))
    times = microseconds(cases, num_samples, clock).items()
    return [row(form.name, activation, bits, *timed, found.sizes) for timed in times]


def checked_lossless(activation: shapes.Activation, count: int = 1) -> list[list[Case]]:
    """Those of masks and indices."""
    xs = samples_of(activation, count)
    found = lossless(activation, xs)
    for cases in found:
        inputs = cases[0].inputs
        check(cases, [with_special_values(x) for x in xs] if inputs is xs else inputs)
    return found


def measure_lossless(
    activation: shapes.Activation, num_samples: int, clock: str
) -> list[dict]:
    """Rows for masks and indices with one shape."""
    rows = []
    count = num_inputs(math.prod(activation.shape))
    for cases in checked_lossless(activation, count):
        kind, op = cases[0].op.split()[:2]
        unpacked = activation
        if cases[0].op != "mask encode above 0":
            dtype = {"mask": "bool", "index": "int8"}[kind]
            unpacked = dataclasses.replace(activation, dtype=dtype)
        bits = {"mask": 1, "index": 2}[kind]
        inputs = cases[0].inputs
        packed = inputs[0] if op == "decode" else cases[0].chain(inputs)[0]
        sizes = {"reference": num_bytes(packed)}
        times = microseconds(cases, num_samples, clock)
        rows += [row(kind, unpacked, bits, *timed, sizes) for timed in times.items()]
    return rows


def num_inputs(size: int) -> int:
    """How many arrays of so many bytes a chain takes."""
    on_gpu = jax.default_backend() == "gpu"
    return max(2, math.ceil(CACHE_BYTES / size)) if on_gpu else 1


def row(
    form: str, activation, bits: float, case: Case, times: list[float], sizes: dict
) -> dict:
    p20, median, p80 = np.percentile(times, (20, 50, 80)).tolist()
    stored = sizes.get(case.implementation, sizes["reference"])
    return {
        "shape": activation.name,
        "dims": list(activation.shape),
        "dtype": activation.dtype,
        "format": form,
        "bits": bits,
        "op": case.op,
        "implementation": case.implementation,
        "is_chosen": case.is_chosen,
        "microseconds": {"median": median, "p20": p20, "p80": p80},
        "logical_bytes_per_second": activation.num_bytes / median * 1e6,
        "stored_bytes": activation.num_bytes if case.op == "copy" else stored,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| shape | format | bits | op | implementation | us | 20 % | 80 % | GB/s "
        "| stored |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = (f"{r['microseconds'][key]:.1f}" for key in ("median", "p20", "p80"))
        name = r["implementation"] + (" (chosen)" if r["is_chosen"] else "")
        lines.append(
            f"| {r['shape']} | {r['format']} | {r['bits']} | {r['op']} | {name} "
            f"| {' | '.join(times)} | {r['logical_bytes_per_second'] / 1e9:.1f} "
            f"| {r['stored_bytes']} |"
        )
    return "\n".join(lines)


def _reference(cases: list[Case]) -> Case:
    (reference,) = (case for case in cases if case.implementation == "reference")
    return reference


def _num_differences(got: Any, wanted: Any) -> int:
    """Elements that have other bits."""

    @jax.jit
    def differences(a, b):
        bits = f"uint{8 * a.dtype.itemsize}"
        is_same = a.view(bits) == b.view(bits)
        return (~is_same & ~((a != a) & (b != b))).sum()  # any NaN is as good

    counts = jax.tree.map(differences, list(got), list(wanted))
    return int(sum(jax.tree.leaves(counts)))


def device_name() -> str:
    kind = jax.devices()[0].device_kind
    return f"{platform.machine()}, {os.cpu_count()} cores" if kind == "cpu" else kind


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results/<device>.json if not given")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=["affine"])
    parser.add_argument(
        "--shapes", nargs="+", default=[""], help="parts of their names"
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--clock", choices=("cupti", "wall"))
    return parser.parse_args()


def main() -> None:
    options = _options()
    clock = options.clock or ("cupti" if jax.default_backend() == "gpu" else "wall")
    every = shapes.SMALL if options.small else shapes.RESNET50 + shapes.GPT2_MEDIUM
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    out = options.out or FOLDER / "results" / f"{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "device": device_name(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python kernels/benchmarks/run.py", *sys.argv[1:]]),
        "clock": clock,
    }
    rows: list[dict] = []

    def add(title: str, measured: Callable[..., list[dict]], *arguments: Any) -> None:
        start = time.perf_counter()
        rows.extend(measured(*arguments, options.samples, clock))
        print(
            f"{title}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True
        )
        # Each time, as a machine may be lent for less long than all of them take.
        out.write_text(json.dumps(results | {"rows": rows}, indent=1) + "\n")

    for activation in every:
        if not any(part in activation.name for part in options.shapes):
            continue
        for name, bits in itertools.product(options.formats, options.bits):
            title = f"{name}, {activation}, {bits} bits"
            add(title, measure, FORMATS[name], activation, bits)
        if activation.name in LOSSLESS:
            add(f"{activation}, lossless", measure_lossless, activation)
    print(table(rows))


if __name__ == "__main__":
    main()

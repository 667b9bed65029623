"""The networks whose training step is measured: at full size, and small, for a CPU."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_ways import BASE, Way

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from models import adapters, gnn, gpt, llama, resnet, vit

# (parameters, statistics, batch) -> (loss, statistics)
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Classifier:
    """A Linen network of images [batch, size, size, 3], trained on handwritten digits.

    Attributes:
      module: makes the network, given its `blocks` by name.
      arguments: of a call, after the images.
    """

    name: str
    module: Callable[..., nn.Module]
    blocks: Mapping[str, type[nn.Module]]
    size: int
    batch: int
    arguments: tuple[Any, ...] = ()
    unit: str = "images"

    @property
    def about(self) -> str:
        return f"{self.name}, {self.size}x{self.size}, batch {self.batch}, bfloat16"

    @property
    def items(self) -> int:
        return self.batch

    def net(self, way: Way) -> nn.Module:
        blocks = {name: way.block(block) for name, block in self.blocks.items()}
        return way.network(self.module(**blocks))

    @property
    def example(self) -> jax.Array:
        """An input of one."""
        return jnp.zeros((1, self.size, self.size, 3))

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Parameters and running statistics."""
        variables = dict(self.net(BASE).init(key, self.example, *self.arguments))
        return variables.pop("params"), variables

    def loss(self, way: Way) -> Loss:
        net = self.net(way)

        def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            images, labels = batch
            logits, statistics = net.apply(
                {"params": params, **statistics},
                images,
                *self.arguments,
                mutable=list(statistics),
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), statistics

        return loss

    def batches(self, num_batches: int) -> Iterator[Any]:
        digits, rng = data.load(), np.random.default_rng(0)
        images, labels = digits.train_images, digits.train_labels
        larger = self.size // images.shape[1]
        for _ in range(num_batches):
            chosen = rng.integers(len(images), size=self.batch)
            found = images[chosen].repeat(larger, 1).repeat(larger, 2).repeat(3, 3)
            yield found, labels[chosen]


@dataclass(frozen=True)
class TextClassifier(Classifier):
    """The same of `size` characters, whose class is the next character."""

    unit: str = "texts"

    @property
    def about(self) -> str:
        return f"{self.name}, length {self.size}, batch {self.batch}, bfloat16"

    @property
    def example(self) -> jax.Array:
        return jnp.zeros((1, self.size), jnp.int32)

    def batches(self, num_batches: int) -> Iterator[Any]:
        text = data.load_text().train
        for found in data.windows(text, self.size + 1, self.batch, num_batches, seed=0):
            yield found[:, :-1], found[:, -1]


@dataclass(frozen=True)
class Decoder:
    """A decoder of text, trained on the characters of Python's help."""

    name: str
    net: gpt.GPT | llama.Llama
    batch: int
    unit: str = "tokens"

    @property
    def about(self) -> str:
        size = f"{self.name}, batch {self.batch}, length {self.net.length}, bfloat16"
        layers = "scanned" if getattr(self.net, "scanned", True) else "unrolled"
        twice = "scores of attention and logits are computed twice in every row"
        if getattr(self.net, "fused_attention", False):
            twice += ", the scores by Pallas kernels, whose arithmetic is not counted"
        return f"{size}, {layers}; {twice}"

    @property
    def items(self) -> int:
        return self.batch * self.net.length

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Parameters, and no running statistics."""
        return self.net.init(key), {}

    def loss(self, way: Way) -> Loss:
        net = way.network(self.net)
        block = way.block(net.block)
        return lambda params, statistics, batch: (
            net.loss(params, batch, block),
            statistics,
        )

    def batches(self, num_batches: int) -> Iterator[Any]:
        text = data.load_text().train
        return data.windows(text, self.net.length + 1, self.batch, num_batches, seed=0)


@dataclass(frozen=True)
class Adapted(Decoder):
    """A frozen decoder in bfloat16, with an adapter beside each of its maps.

    Frozen parameters stand where others have running statistics.
    """

    rank: int = 8

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Adapters and frozen parameters."""
        net: Any = self.net
        frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), net.init(key))
        return adapters.new_adapters(net, [*net.maps], self.rank, key), frozen

    def loss(self, way: Way) -> Loss:
        inner = super().loss(way)
        return lambda params, frozen, batch: (
            inner(adapters.adapted(frozen, params, 2.0 * self.rank), (), batch)[0],
            frozen,
        )


@dataclass(frozen=True)
class NodeClassifier:
    """A graph network on a random graph, each node of which has `degree` senders."""

    name: str
    net: gnn.GCN
    batch: int
    degree: int
    unit: str = "nodes"

    @property
    def about(self) -> str:
        width, layers = self.net.width, self.net.layers
        return (
            f"{self.name}, {layers} layers of width {width}, batch {self.batch} nodes, "
            f"{self.degree} edges each, float32"
        )

    @property
    def items(self) -> int:
        return self.batch

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Parameters, and no running statistics."""
        return self.net.init(key), {}

    def loss(self, way: Way) -> Loss:
        layers = [way.block(self.net.layer)] * self.net.layers
        head = way.block(self.net.head)

        def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            x, senders, labels = batch
            receivers = jnp.repeat(jnp.arange(len(x)), self.degree)
            weights = jnp.full(receivers.shape, 1 / self.degree)
            edges = senders.reshape(-1), receivers, weights
            logits = self.net.apply(params, x, edges, layers, head)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), statistics

        return loss

    def batches(self, num_batches: int) -> Iterator[Any]:
        rng = np.random.default_rng(0)
        for _ in range(num_batches):
            features = rng.normal(size=(self.batch, self.net.features))
            senders = rng.integers(self.batch, size=(self.batch, self.degree))
            labels = rng.integers(self.net.classes, size=self.batch)
            yield features.astype(np.float32), senders.astype(np.int32), labels


Network = Classifier | Decoder | NodeClassifier


def decoder(name: str, fused_attention: bool = False, **size: Any) -> Decoder:
    """Recomputes attention, as a fused kernel does.

    Else scores of length x length fill the memory of every way that keeps them.
    """
    attention = {"fused_attention" if fused_attention else "recompute_attention": True}
    return Decoder(name, gpt.GPT(**size, **attention), batch=8)


# The shape of Llama 3.2 1B.
LLAMA = llama.Llama(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    head_width=64,
    hidden=8192,
    vocabulary=128_256,
    length=2048,
    tied=True,
    recompute_attention=True,
)
FULL: dict[str, Network] = {
    "resnet50": Classifier(
        name="ResNet-50",
        module=functools.partial(resnet.ResNet50, 1000),
        blocks={"block": resnet.Bottleneck, "stem": resnet.Stem},
        size=224,
        batch=64,
        arguments=(True,),
    ),
    "gpt2-small": decoder("GPT-2 small", scanned=False),
    "gpt2-small-scanned": decoder("GPT-2 small"),
    "gpt2-small-fused": decoder(
        "GPT-2 small, fused attention", fused_attention=True, scanned=False
    ),
    "gpt2-medium": decoder("GPT-2 medium", layers=24, width=1024, heads=16),
    "llama-1b": Decoder("a decoder like Llama, 1.2 billion parameters", LLAMA, batch=4),
    "vit-b": Classifier(
        name="ViT-B/16",
        module=functools.partial(vit.ViTB16, 1000),
        blocks={"block": vit.Block},
        size=224,
        batch=64,
    ),
}
# For tables of the largest sizes.
LARGE: dict[str, Network] = {
    "resnet152": Classifier(
        name="ResNet-152, scanned",
        module=functools.partial(resnet.ResNet152, 1000, scanned=True),
        blocks={"block": resnet.Bottleneck, "stem": resnet.Stem},
        size=224,
        batch=64,
        arguments=(True,),
    ),
    "vit-l": Classifier(
        name="ViT-L/16, scanned",
        module=functools.partial(vit.ViTL16, 1000, scanned=True),
        blocks={"block": vit.Block},
        size=224,
        batch=64,
    ),
    # A class token and 511 more.
    "bert-large": TextClassifier(
        name="BERT-large with norms first, scanned",
        module=functools.partial(vit.TextEncoder, 256, scanned=True),
        blocks={"block": vit.Block},
        size=511,
        batch=16,
    ),
    # As many nodes, edges, features and classes as ogbn-arxiv (Hu et al. 2020,
    # arXiv:2005.00687) has with edges in both directions.
    "gcn": NodeClassifier(
        "GCN", gnn.GCN(features=128, classes=40, width=256), batch=169_343, degree=14
    ),
    "llama-1b-lora": Adapted(
        "LoRA on a decoder like Llama, 1.2 billion parameters",
        LLAMA,
        batch=4,
    ),
}
SMALL: dict[str, Network] = {
    "resnet": Classifier(
        name="small ResNet",
        module=functools.partial(resnet.ResNet, 10),
        blocks={"block": resnet.Block},
        size=32,
        batch=64,
        arguments=(True,),
    ),
    "gpt": decoder(
        "small GPT", layers=4, width=256, heads=4, length=256, vocabulary=256
    ),
    "vit": Classifier(
        name="small ViT",
        module=functools.partial(vit.ViT, 10, layers=4),
        blocks={"block": vit.Block},
        size=32,
        batch=32,
    ),
}
TINY: dict[str, Network] = {
    "tiny": decoder("tiny GPT", layers=2, width=32, heads=2, length=32, vocabulary=256),
}
NETWORKS = FULL | LARGE | SMALL | TINY

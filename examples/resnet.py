"""Train a residual network on images (Flax Linen).

  python examples/resnet.py                                  handwritten digits
  python examples/resnet.py --data cifar10.npz               see examples/data.py
  python examples/resnet.py --data IMAGENET --size full      see examples/folders.py

Small: three stages of two blocks, 132 steps of 128 images; 1 minute of CPU time for the
digits and 4 for CIFAR-10. At 4 bits, in brackets uncompressed (`--policy none`; one
seed, JAX 0.12.0; the file has 10,000 images of CIFAR-10, of which 132 steps see each
about twice):

              test accuracy    stored, MiB     temp, CPU, MiB
  digits      99.2 %           9.1 (55.2)      20.6 (60.3)
  CIFAR-10    41.0 (40.3) %    36.9 (220.1)    83.4 (240.2)

Full: ResNet-50 and 450,000 steps of 256 images. A step of 64 takes 686 MiB of
temporaries on an H100, uncompressed 2762, `--bits 2` 490, as compiled for one by
`benchmarks/step.py`. On an H100 such steps took 1.14 times as long as uncompressed at 4
bits (`benchmarks/gpu.py`); a full training was not run.
"""

import argparse
import functools
from dataclasses import dataclass
from typing import Any

import data
import jax
import loop
import optax
from models.resnet import Block, Bottleneck, ResNet, Stem

import jaxact


@dataclass(frozen=True)
class Size:
    """Of the network and of its training."""

    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    block: Any
    stem: Any
    batch: int
    steps: int


SMALL = Size((16, 32, 64), (2, 2, 2), Block, None, batch=128, steps=132)
# ResNet-50 as it is trained on ImageNet, for 90 epochs.
FULL = Size((64, 128, 256, 512), (3, 4, 6, 3), Bottleneck, Stem, 256, 450_000)


def training(options: argparse.Namespace) -> loop.Training:
    """The training that the options describe."""
    size, pixels = (FULL, 224) if options.size == "full" else (SMALL, 64)
    images = data.load_images(options.data, pixels)
    batch, steps = options.batch or size.batch, options.steps or size.steps

    def network(policy: jaxact.Policy | None) -> ResNet:
        wrap = lambda module: module
        if policy is not None:
            wrap = functools.partial(jaxact.compress, policy=policy)
        return ResNet(
            len(images.class_names),
            size.channels,
            size.blocks,
            block=wrap(size.block),
            stem=size.stem and wrap(size.stem),
        )

    def init() -> tuple[Any, Any]:
        example, _ = next(images.training_batches(1, options.seed, 0))
        make = functools.partial(network(None).init, train=True)
        variables = jax.jit(make)(jax.random.key(options.seed), example)
        return variables["params"], variables["batch_stats"]

    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    return loop.Training(
        name=f"ResNet on {images.name}, {steps} steps of {batch}",
        num_steps=steps,
        init=init,
        loss=lambda policy: loss_of(network(policy)),
        optimizer=optax.adamw(schedule, weight_decay=1e-2),
        batches=lambda start: images.training_batches(batch, options.seed, start),
        score=functools.partial(score, network(None), images),
        part=lambda batch: jax.tree.map(lambda x: x[:8], batch),
    )


def loss_of(net: ResNet) -> loop.Loss:
    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = net.apply(
            variables, images, train=True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updated["batch_stats"]

    return loss


def score(net: ResNet, images: Any, params: Any, statistics: Any) -> str:
    variables = {"params": params, "batch_stats": statistics}
    classify = jax.jit(lambda x: net.apply(variables, x, train=False).argmax(-1))
    return f"test accuracy {data.accuracy(images, classify):.1%}"


if __name__ == "__main__":
    loop.main(__doc__, training)

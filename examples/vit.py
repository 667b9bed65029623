"""Train a vision transformer on images (Flax Linen).

  python examples/vit.py                                  handwritten digits
  python examples/vit.py --data cifar10.npz               see examples/data.py
  python examples/vit.py --data IMAGENET --size full      see examples/folders.py

Small: 4 layers of width 64, 220 steps of 128 images, about 1 minute of CPU time for the
digits. At 4 bits, in brackets uncompressed (`--policy none`; one seed, JAX 0.12.0):

            test accuracy    stored, MiB    temp, CPU, MiB
  digits    89.7 (90.3) %    6.2 (45.1)     11.3 (52.2)

Full: ViT-B/16 and 1,500,000 steps of 256 images. A step of 64 takes 1156 MiB of
temporaries on an H100, uncompressed 6023, `--bits 2` 732, as compiled for one by
`benchmarks/step.py`. On an H100 such steps took 1.04 times as long as uncompressed at 4
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
from models.vit import Block, ViT

import jaxact


@dataclass(frozen=True)
class Size:
    """Of the network and of its training."""

    patch: int
    width: int
    layers: int
    heads: int
    batch: int
    steps: int


SMALL = Size(patch=4, width=64, layers=4, heads=4, batch=128, steps=220)
# ViT-B/16 on ImageNet, for 300 epochs.
FULL = Size(patch=16, width=768, layers=12, heads=12, batch=256, steps=1_500_000)


def training(options: argparse.Namespace) -> loop.Training:
    """The training that the options describe."""
    size, pixels = (FULL, 224) if options.size == "full" else (SMALL, 32)
    images = data.load_images(options.data, pixels)
    batch, steps = options.batch or size.batch, options.steps or size.steps

    def network(policy: jaxact.Policy | None) -> ViT:
        block = Block
        if policy is not None:
            block = jaxact.compress(Block, policy=policy)
        return ViT(
            len(images.class_names),
            size.patch,
            size.width,
            size.layers,
            size.heads,
            block=block,
        )

    def init() -> tuple[Any, Any]:
        example, _ = next(images.training_batches(1, options.seed, 0))
        variables = jax.jit(network(None).init)(jax.random.key(options.seed), example)
        return variables["params"], ()

    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    return loop.Training(
        name=f"ViT on {images.name}, {steps} steps of {batch}",
        num_steps=steps,
        init=init,
        loss=lambda policy: loss_of(network(policy)),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05)
        ),
        batches=lambda start: images.training_batches(batch, options.seed, start),
        score=functools.partial(score, network(None), images),
        part=lambda batch: jax.tree.map(lambda x: x[:8], batch),
    )


def loss_of(net: ViT) -> loop.Loss:
    def loss(params: Any, _: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        logits = net.apply({"params": params}, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), ()

    return loss


def score(net: ViT, images: Any, params: Any, _: Any) -> str:
    classify = jax.jit(lambda x: net.apply({"params": params}, x).argmax(-1))
    return f"test accuracy {data.accuracy(images, classify):.1%}"


if __name__ == "__main__":
    loop.main(__doc__, training)

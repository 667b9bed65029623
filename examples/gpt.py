"""Train a GPT on the characters of a text (Flax NNX).

  python examples/gpt.py                               Python's help
  python examples/gpt.py --data tinyshakespeare.txt    or another file of text
  python examples/gpt.py --data TEXT --size full       GPT-2-small's shape

Small: 4 layers of width 128, sequences of 64 characters, 600 steps of 16; about 140 s
of CPU time and 0.9 GB. Validation loss in nats, stored residuals and the compiled
step's temporary memory in MiB (2-core CPU, JAX 0.12.0, Python 3.12, one seed):

                    Python's help    tinyshakespeare    stored    temp
  --policy none             1.762              2.057      48.8    57.4
  (4 bits)                  1.770              2.056       6.0    15.5
  --bits 2                  1.835              2.108       4.1    13.5

Full: 12 layers of width 768, sequences of 1024, 20,000 steps of 32. On an H100 a step
has 54,985 MiB of temporaries uncompressed and 8,290 MiB with 4 bits, as compiled for
one by `--size full --data tinyshakespeare.txt --dry-run --target h100`, in 1 minute of
CPU time; it was not run on a GPU.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import data
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
from flax import nnx
from models.gpt_nnx import GPT, Block, Shape

import jaxact


@dataclass(frozen=True)
class Size:
    """Of the network and of its training."""

    shape: Shape
    batch: int
    steps: int
    rate: float


SMALL_SHAPE = Shape(layers=4, width=128, heads=4, length=64, chunks=1)
SMALL = Size(SMALL_SHAPE, batch=16, steps=600, rate=3e-3)
FULL = Size(Shape(), batch=32, steps=20_000, rate=6e-4)


def training(options: argparse.Namespace, block: type[Block] = Block) -> loop.Training:
    """The training that the options describe, of a network of these blocks."""
    text = data.load_text(options.data)
    size = FULL if options.size == "full" else SMALL
    shape = replace(size.shape, vocabulary=len(text.alphabet))
    batch, steps = options.batch or size.batch, options.steps or size.steps
    if len(text.validation) <= shape.length:
        raise ValueError(
            f"the last tenth of {text.name} has {len(text.validation)} characters; "
            f"{shape.length + 1} are required for one sequence: give a longer text."
        )

    def network(block: type[Block]) -> GPT:
        return GPT(shape, block, rngs=nnx.Rngs(options.seed))

    def loss(policy: jaxact.Policy | None) -> loop.Loss:
        kept = block if policy is None else jaxact.compress(block, policy=policy)
        graph = nnx.graphdef(nnx.eval_shape(lambda: network(kept)))
        return lambda params, _, tokens: (nnx.merge(graph, params).loss(tokens), ())

    def batches(start: int) -> Iterator[np.ndarray]:
        drawn = data.windows(text.train, shape.length + 1, batch, steps, options.seed)
        return itertools.islice(drawn, start, None)

    def score(params: nnx.State, _: Any) -> str:
        graph = nnx.graphdef(nnx.eval_shape(lambda: network(Block)))
        nats = validation_loss(graph, params, text.validation, shape.length, batch)
        prompt = text.validation[: shape.length]
        drawn = sample(graph, params, prompt, jax.random.key(options.seed))
        letters = "".join(text.alphabet[i] for i in np.asarray(drawn))
        return f"validation loss {nats:.3f} nats a character; it writes:\n{letters}"

    schedule = optax.warmup_cosine_decay_schedule(0.0, size.rate, steps // 10, steps)
    return loop.Training(
        name=f"GPT on {text.name}, {steps} steps of {batch}",
        num_steps=steps,
        init=lambda: (jax.jit(lambda: nnx.state(network(Block)))(), ()),
        loss=loss,
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)
        ),
        batches=batches,
        score=score,
        part=lambda batch: batch[:8],
    )


def validation_loss(
    graph: nnx.GraphDef[GPT],
    params: nnx.State,
    text: np.ndarray,
    length: int,
    batch: int,
) -> float:
    """The mean over at most 512 stretches of the text that do not overlap.

    Whatever the batch: the last piece may be smaller and weighs less.
    """
    loss = jax.jit(lambda params, tokens: nnx.merge(graph, params).loss(tokens))
    windows = text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    windows = windows[:512]
    pieces = [windows[i:][:batch] for i in range(0, len(windows), batch)]
    losses = [loss(params, piece) for piece in pieces]
    return float(np.average(losses, weights=[len(piece) for piece in pieces]))


@functools.partial(jax.jit, static_argnums=(0,))
def sample(
    graph: nnx.GraphDef[GPT], params: nnx.State, prompt: jax.Array, key: jax.Array
) -> jax.Array:
    """200 tokens that go on from a prompt, each drawn given as many before it."""

    def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        net = nnx.merge(graph, params, copy=True)  # of this trace
        logits = net.logits(net.features(window[None])[0, -1])
        token = jax.random.categorical(key, logits)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(one, prompt, jax.random.split(key, 200))[1]


if __name__ == "__main__":
    loop.main(__doc__, training)

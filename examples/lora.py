"""Fine-tune a decoder on a text with low-rank adapters; its own weights stay frozen.

  python examples/lora.py                              a small decoder, trained first
  python examples/lora.py --data TEXT                  the same, on your text
  python examples/lora.py --model FOLDER --data TEXT --size full
                                  Llama, Mistral or Qwen2: see examples/huggingface.py

Beside a frozen map of weight W stand two trained ones: x W + x A B alpha / rank (Hu et
al. 2021, https://arxiv.org/abs/2106.09685, eq. 3). `--output FOLDER` has the adapters
in the end, as the library `peft` reads them, and the small decoder in FOLDER/base.

Small: 4 layers of width 128, 200 steps of 16 sequences of 128 bytes, after 300 for the
decoder; about 140 s of CPU time. Validation loss in nats, stored residuals and the
compiled step's temporary memory in MiB (2-core CPU, JAX 0.12.0, Python 3.12, one seed):

                      Python's source    tinyshakespeare    stored    temp
  without adapters              2.568              3.165
  --policy none                 2.244              2.402      72.8    85.6
  (4 bits)                      2.251              2.421      11.3    22.0

Full: 1000 steps of 8 sequences of 1024 tokens, attention recomputed. With a config.json
of Mistral-7B-v0.3 (32 layers of width 4096) as FOLDER, `--size full --dry-run --target
h100` has a step on an H100 take, beside 13.5 GiB of weights, 61.4 GiB of temporaries
uncompressed, 11.1 GiB with 4 bits and 7.7 GiB with `--bits 2`, in 1 minute of CPU time;
it was not run on a GPU. A frozen map's input is stored only where its adapter needs it.
"""

import argparse
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import command
import data
import huggingface
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
from models.adapters import adapted, new_adapters
from models.llama import Llama

import jaxact

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Of a training."""

    batch: int
    length: int
    steps: int
    peak_rate: float
    recompute_attention: bool


SMALL = Size(batch=16, length=128, steps=200, peak_rate=5e-3, recompute_attention=False)
FULL = Size(batch=8, length=1024, steps=1000, peak_rate=2e-4, recompute_attention=True)
NOTE = "base.json"  # in the base's folder: how it was trained
# The base that is trained first without --model: 0.9 million parameters.
BASE = Llama(
    layers=4,
    width=128,
    heads=4,
    kv_heads=2,
    head_width=32,
    hidden=384,
    vocabulary=256,
    length=128,
)


def training(folder: Path, text: str, options: argparse.Namespace) -> loop.Training:
    """Of adapters for the decoder in `folder`, on the text."""
    size = FULL if options.size == "full" else SMALL
    size = replace(
        size, batch=options.batch or size.batch, steps=options.steps or size.steps
    )
    net, frozen = (huggingface.shapes if options.dry_run else huggingface.load)(folder)
    net = replace(net, recompute_attention=size.recompute_attention)
    length = min(size.length, net.length)
    name = options.data.stem if options.data else "the source of Python"
    learned, held_out = split(huggingface.encoder(folder, net.vocabulary)(text))
    if len(held_out) <= length:
        raise ValueError(
            f"{name} has {len(learned) + len(held_out)} tokens, {10 * length + 10} are "
            f"required, a tenth of them to score sequences of {length}."
        )

    def init() -> tuple[Params, Any]:
        key = jax.random.key(options.seed)
        make = lambda key: new_adapters(net, options.adapt, options.rank, key)
        return jax.jit(make)(key), ()

    def batches(start: int) -> Iterator[Any]:
        for tokens in windows(learned, length, size, options.seed, start):
            # Frozen weights come with the data: no step changes or saves them.
            yield frozen, tokens

    return loop.Training(
        name=f"LoRA on {name}, {size.steps} steps of {size.batch} x {length}",
        num_steps=size.steps,
        init=init,
        loss=functools.partial(loss_of, net, options.alpha),
        optimizer=optax.adam(schedule(size.peak_rate, size.steps)),
        batches=batches,
        score=lambda adapters, _: score(
            loss_of(net, options.alpha, None),
            adapters,
            frozen,
            list(data.windows(held_out, length + 1, size=8, num_batches=16, seed=0)),
        ),
        part=lambda batch: (batch[0], batch[1][:8]),
    )


def loss_of(net: Llama, alpha: float, policy: jaxact.Policy | None) -> loop.Loss:
    block = block_of(net, policy)

    def loss(adapters: Params, _: Any, batch: Any) -> tuple[jax.Array, Any]:
        frozen, tokens = batch
        return net.loss(adapted(frozen, adapters, alpha), tokens, block), ()

    return loss


def score(
    loss: loop.Loss, adapters: Params, frozen: Params, texts: Sequence[np.ndarray]
) -> str:
    evaluate = jax.jit(lambda adapters, batch: loss(adapters, (), batch)[0])
    mean = lambda of: np.mean([evaluate(of, (frozen, tokens)) for tokens in texts])
    before = mean(jax.tree.map(jnp.zeros_like, adapters))
    return (
        f"validation loss {mean(adapters):.3f} nats a token, {before:.3f} without "
        "adapters"
    )


def block_of(net: Llama, policy: jaxact.Policy | None) -> Callable[..., jax.Array]:
    """A layer that keeps its residuals as the policy says; None: as JAX does."""
    if policy is None:
        return net.block
    return jaxact.compress(net.block, policy=policy, activations="x")


def pretrained(folder: Path, options: argparse.Namespace) -> Path:
    """Train a small decoder on Python's help, all its weights, unless it is there.

    Uncompressed, whatever the policy: all policies are compared on one base.

    Raises:
      ValueError: the folder is there, and not of this base.
    """
    told = {"seed": options.seed, "base_steps": options.base_steps}
    if folder.exists():
        check_base(folder, told)
        return folder
    size = replace(SMALL, steps=options.base_steps)
    learned, _ = split(np.frombuffer(data.python_help().encode(), np.uint8))
    block = block_of(BASE, None)
    # Adapters of its own first weights would add nothing new to them.
    key = jax.random.fold_in(jax.random.key(options.seed), 1)
    print(f"Without --model: a small decoder learns Python's help, {size.steps} steps")
    first = loop.Training(
        name="a small decoder on Python's help",
        num_steps=size.steps,
        init=lambda: (jax.jit(BASE.init)(key), ()),
        loss=lambda _: lambda params, _, tokens: (BASE.loss(params, tokens, block), ()),
        optimizer=optax.adam(schedule(size.peak_rate, size.steps)),
        batches=functools.partial(windows, learned, BASE.length, size, options.seed),
        score=lambda *_: "",
    )
    step = loop.training_step(first.loss(None), first.optimizer)
    state, _ = loop.train(first, step, loop.fresh(first), 0, None)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    part = folder.with_suffix(".part")  # a folder of the right name is whole
    huggingface.save(part, BASE, params)
    (part / NOTE).write_text(json.dumps(told), encoding="utf-8")
    part.rename(folder)
    return folder


def check_base(folder: Path, told: dict[str, int]) -> None:
    """Raise unless the decoder in the folder is noted as this one."""
    note = folder / NOTE
    found = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
    if found != told:
        described = lambda base: ", ".join(f"{k} {v}" for k, v in base.items())
        raise ValueError(
            f"{folder} holds {described(found) if found else f'no {NOTE}'}; a base of "
            f"{described(told)} is required: give another --output, or those options."
        )


def schedule(peak: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)


def source() -> str:
    """Python's standard library, as far as it is in files of one folder."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first nine tenths, to learn from, and the rest."""
    learned, held_out = np.split(tokens.astype(np.int32), [len(tokens) * 9 // 10])
    return learned, held_out


def windows(
    tokens: np.ndarray, length: int, size: Size, seed: int, start: int
) -> Iterator[np.ndarray]:
    """Batches [batch, length + 1] of stretches of the text, from step `start` on."""
    found = data.windows(tokens, length + 1, size.batch, size.steps, seed)
    return itertools.islice(found, start, None)


def parser() -> argparse.ArgumentParser:
    options = loop.parser(__doc__)
    add = options.add_argument
    add("--model", type=Path, help="a folder of Hugging Face")
    add(
        "--adapt",
        nargs="+",
        choices=BASE.maps,
        default=[*BASE.maps],
        help="maps that get an adapter",
    )
    add("--rank", type=command.at_least_one, default=8, help="of an adapter")
    add("--alpha", type=float, default=16.0, help="an adapter's factor, times its rank")
    add("--output", type=Path, help="a folder for the adapters")
    steps = "without --model: of a small one"
    add("--base-steps", type=command.at_least_one, default=300, help=steps)
    return options


def main() -> None:
    options = parser().parse_args()
    with command.short_errors(), tempfile.TemporaryDirectory() as temporary:
        folder = options.model
        if folder is None and options.dry_run:
            raise ValueError("--dry-run requires --model; its config.json is enough")
        text = data.read_text(options.data) if options.data else source()
        if folder is None:
            folder = pretrained((options.output or Path(temporary)) / "base", options)
        state = loop.run(training(folder, text, options), options)
        if options.output and not options.dry_run:
            base = str(folder)
            huggingface.save_adapters(options.output, state.params, options.alpha, base)


if __name__ == "__main__":
    main()

"""Does training hold? Scores over several seeds, with residuals compressed and not.

  python examples/benchmarks/training.py --task text --output runs.jsonl
  python examples/benchmarks/training.py --task text --configs 2bits --ablate
  python examples/benchmarks/training.py --small

`--task text` trains a character-level transformer, scored by its loss on the last tenth
of the text; `--task images` a residual network, scored by its test accuracy. With
`--data FOLDER` they learn FOLDER/tinyshakespeare.txt and FOLDER/cifar10_subset.npz (see
examples/data.py), else data that comes with a dependency.

A seed fixes the initial parameters and the order of the data, the same for every
configuration. `1bit-allocated` measures four times in a training which residuals add
most noise, and gives them the second bit that exponentials have before; with `-half`
those that add least have half a bit, for others. Each run adds a line of JSON to
`--output`, and the table that is printed sums up all of that file: long jobs can be
split by task, configuration and seed.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxact

sys.path.insert(0, str(Path(__file__).parent.parent))
import command
import data
import quickstart
from environment import environment
from models.gpt import GPT
from models.resnet import Block, ResNet

DOTS = jax.checkpoint_policies.dots_saveable


def dithered(bits: int) -> jaxact.Policy:
    """`Dithered`, but for exponentials, which are stored as by `Policy(bits)`."""
    width = bits + (bits < 4)
    rule = jaxact.Rule(jaxact.Quantize(width), primitive="exp")
    return jaxact.Policy(default=jaxact.Dithered(bits), rules=(rule,))


@dataclasses.dataclass(frozen=True)
class Allocated:
    """As many bits as a policy has, given to those residuals whose noise they reduce.

    Attributes:
      first: the policy, whose formats are measured; in use until then.
      ladder: the bits to choose from.
      at: when they are measured and bits are given anew, as shares of the training.
    """

    first: jaxact.Policy
    ladder: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 16)
    at: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75)

    def steps(self, num_steps: int) -> list[int]:
        return [int(share * num_steps) for share in self.at]

    def policy(self, measured: jaxact.Sensitivity) -> jaxact.Policy:
        used = {row.key: row.bits or row.exact_bits for row in measured.rows}
        bits = measured.average_bits(used)
        formats = jaxact.Policy(default=self.first.default)
        allocation = jaxact.allocate(measured, bits=bits, ladder=self.ladder)
        return allocation.policy(formats)


Config: TypeAlias = jaxact.Policy | Allocated | None

ONE_BIT = jaxact.Policy(
    default=jaxact.Adaptive(1),
    rules=(jaxact.Rule(jaxact.Adaptive(2), primitive="exp"),),
)
CONFIGS: dict[str, Config] = {
    "uncompressed": None,
    "4bits": jaxact.Policy(),
    "2bits": jaxact.Policy(bits=2),
    "1bit": jaxact.Policy(bits=1),
    "4bits-dithered": dithered(4),
    "2bits-dithered": dithered(2),
    "1bit-dithered": dithered(1),
    "2bits-adaptive": jaxact.Policy(default=jaxact.Adaptive(2)),
    "1bit-adaptive": jaxact.Policy(default=jaxact.Adaptive(1)),
    "1bit-allocated": Allocated(ONE_BIT),
    "1bit-allocated-half": Allocated(ONE_BIT, (0.5, 1, 2, 3, 4, 6, 8, 16)),
    "4bits-dots": jaxact.Policy(bits=4, recompute=DOTS),
    "2bits-dots": jaxact.Policy(bits=2, recompute=DOTS),
}


def schedule(peak: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)


class TextTask:
    """A character-level transformer; scored in nats a character, less is better."""

    metric = "validation loss"
    file = "tinyshakespeare.txt"
    steps = 600

    def __init__(self, options: argparse.Namespace, policy: jaxact.Policy | None):
        path = options.data and options.data / self.file
        self.text, small = data.load_text(path), options.small
        self.num_steps = options.steps or (4 if small else self.steps)
        self.net = GPT(
            layers=1 if small else 4,
            width=32 if small else 128,
            heads=4,
            length=16 if small else 128,
            vocabulary=len(self.text.alphabet),
            scanned=False,
            dtype=jnp.float32,
        )
        block = self.net.block
        if policy is not None:
            block = jaxact.compress(block, policy=policy, activations="x")
        self.loss = functools.partial(self.net.loss, block=block)
        self.optimizer = optax.adamw(schedule(2e-3, self.num_steps), weight_decay=0.1)
        self.step = jax.jit(self._step, donate_argnums=0)
        self.evaluate = jax.jit(self.net.loss)
        held_out, length = len(self.text.validation), self.net.length + 1
        if held_out < length:
            raise ValueError(
                f"the last tenth of {self.text.name} has {held_out} characters; "
                f"{length} are required for one window: give a longer text"
            )
        self.name = f"transformer, {self.text.name}"

    def init(self, seed: int) -> Any:
        params = self.net.init(jax.random.key(seed))
        return params, self.optimizer.init(params)

    def batches(self, seed: int) -> Iterator[Any]:
        length = self.net.length + 1
        for w in data.windows(self.text.train, length, 16, self.num_steps, seed):
            yield (w,)

    def score(self, state: Any) -> float:
        """The mean over validation windows that do not overlap, in full pieces of 64.

        Fewer than 64 windows are one piece.
        """
        text, length = self.text.validation, self.net.length + 1
        windows = text[: len(text) // length * length].reshape(-1, length)
        size = min(64, len(windows))
        full = range(0, len(windows) - size + 1, size)
        return float(
            np.mean([self.evaluate(state[0], windows[i:][:size]) for i in full])
        )

    def residuals(self) -> jaxact.ResidualTable:
        tokens = jax.ShapeDtypeStruct((16, self.net.length + 1), jnp.int32)
        return jaxact.residuals(self.loss, self.net.shapes, tokens)

    def sensitivity(self, state: Any, batch: Any) -> jaxact.Sensitivity:
        return jaxact.sensitivity(self.loss, state[0], *batch)

    def _step(self, state: Any, tokens: Any) -> tuple[Any, Any]:
        params, optimizer = state
        loss, grads = jax.value_and_grad(self.loss)(params, tokens)
        updates, optimizer = self.optimizer.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss


class ImageTask:
    """A residual network; scored by test accuracy in percent, more is better."""

    metric = "test accuracy, %"
    file = "cifar10_subset.npz"
    steps = 390  # 5 epochs of 10,000 images

    def __init__(self, options: argparse.Namespace, policy: jaxact.Policy | None):
        path = options.data and options.data / self.file
        self.images, small = data.load(path), options.small
        self.num_steps = options.steps or (4 if small else self.steps)
        self.batch_size = 128
        net = ResNet(
            len(self.images.class_names),
            channels=(8,) if small else (16, 32, 64),
            blocks_per_stage=1,
            block=Block if policy is None else jaxact.compress(Block, policy=policy),
            dtype=jnp.float32,
        )
        optimizer = optax.adamw(schedule(4e-3, self.num_steps), weight_decay=1e-2)
        self.trainer = quickstart.Trainer(net, optimizer)
        self.step = self.trainer.step
        self.name = f"residual network, {self.images.name}"

    def init(self, seed: int) -> Any:
        return self.trainer.init(seed, self.images.train_images)

    def batches(self, seed: int) -> Iterator[Any]:
        batches = self.images.training_batches(self.batch_size, seed, start=0)
        return itertools.islice(batches, self.num_steps)

    def score(self, state: Any) -> float:
        images, labels = self.images.test_images, self.images.test_labels
        return 100 * self.trainer.accuracy(state, images, labels)

    def residuals(self) -> jaxact.ResidualTable:
        state = jax.eval_shape(functools.partial(self.init, 0))
        batch = next(self.batches(0))
        return jaxact.residuals(
            self.trainer.loss, state.params, state.batch_stats, *batch
        )

    def sensitivity(self, state: Any, batch: Any) -> jaxact.Sensitivity:
        values = state.params, state.batch_stats
        return jaxact.sensitivity(self.trainer.loss, *values, *batch, has_aux=True)


TASKS = {"text": TextTask, "images": ImageTask}


def only(primitive: str) -> jaxact.Policy:
    """Two bits for the results of this primitive; everything else exact."""
    exact = jaxact.Rule(jaxact.Exact(), where=lambda r: r.primitive != primitive)
    return jaxact.Policy(bits=2, rules=(exact,))


def groups(options: argparse.Namespace) -> list[str]:
    """The primitives whose results two bits would round; '' is an argument."""
    rows = TASKS[options.task](options, jaxact.Policy(bits=2)).residuals().rows
    rounded = (row for row in rows if isinstance(row.action, jaxact.Quantize))
    return sorted({row.primitive for row in rounded})


def run(
    make: Callable[[jaxact.Policy | None], TextTask | ImageTask],
    config: Config,
    seed: int,
) -> dict[str, Any]:
    """Train once: the score, and the time it took."""
    task = first = make(config.first if isinstance(config, Allocated) else config)
    start, state, seconds = time.perf_counter(), task.init(seed), []
    for step, batch in enumerate(task.batches(seed)):
        if isinstance(config, Allocated) and step in config.steps(task.num_steps):
            task = make(config.policy(first.sensitivity(state, batch)))
        before = time.perf_counter()
        state, loss = jax.block_until_ready(task.step(state, *batch))
        seconds.append(time.perf_counter() - before)
    return {
        "task": task.name,
        "seed": seed,
        "metric": task.metric,
        "score": task.score(state),
        "training_loss": float(loss),
        "steps": task.num_steps,
        "step_seconds": statistics.median(seconds),
        "seconds": time.perf_counter() - start,
    }


def table_of(records: list[dict[str, Any]]) -> str:
    """Markdown: a table for each task, a row for each configuration."""
    lines: list[str] = []
    key = lambda r: (r["task"], r["steps"], r["metric"])
    for task, steps, metric in dict.fromkeys(map(key, records)):
        here = [r for r in records if key(r) == (task, steps, metric)]
        lines += [
            f"\n{task}, {steps} steps\n",
            f"| | runs | {metric} | ms a step |",
            "|---|---|---|---|",
        ]
        for config in dict.fromkeys(r["config"] for r in here):
            runs = {r["seed"]: r for r in here if r["config"] == config}.values()
            scores = [r["score"] for r in runs]
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            step = 1e3 * statistics.median(r["step_seconds"] for r in runs)
            mean = f"{statistics.mean(scores):.3f}{spread}"
            lines.append(f"| {config} | {len(scores)} | {mean} | {step:.0f} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="text")
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--data", type=Path, help="folder of the two files")
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--small", action="store_true", help="a toy, in seconds")
    parser.add_argument(
        "--ablate",
        nargs="*",
        metavar="PRIMITIVE",
        help="also, one at a time: 2 bits for the results of one primitive, and "
        "everything else exact; every primitive, if none is named",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    configs = {name: CONFIGS[name] for name in options.configs}
    if options.ablate is not None:
        for primitive in options.ablate or groups(options):
            configs[f"2bits only {primitive or 'arguments'}"] = only(primitive)
    records: list[dict[str, Any]] = []
    if options.output and options.output.exists():
        records = [json.loads(line) for line in options.output.open()]
    make = functools.cache(functools.partial(TASKS[options.task], options))
    for name, config in configs.items():
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            record = {"config": name} | run(make, config, seed) | environment()
            records.append(record)
            print(f"{name}, seed {seed}: {record['score']:.3f}", file=sys.stderr)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(table_of(records))


if __name__ == "__main__":
    with command.short_errors():
        main()

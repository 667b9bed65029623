"""A recurrent network of characters: a GRU, scanned over time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax
from tasks import Keep, TextTask, kept_module, schedule


class Recurrent(nn.Module):
    """The next character's logits, from all before it."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        del train  # both are alike
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        for _ in range(2):
            x = nn.LayerNorm()(x + nn.RNN(nn.GRUCell(self.width))(x))
        return nn.Dense(self.vocabulary)(x)


class RecurrentTask(TextTask):
    """Trained on windows of text; scored by its loss on the last tenth."""

    def __init__(self, folder: Path | None, small: bool):
        super().__init__(folder, small)
        self.width = 16 if small else 128
        self.optimizer = optax.adam(schedule(4e-3, self.num_steps))
        self.name = f"GRU, {self.text.name}, {self.num_steps} steps"
        self.evaluate = jax.jit(
            lambda params, windows: self.mean("all", params, windows)
        )

    def mean(self, keep: Keep, params: Any, windows: Any, seed: Any = 0) -> jax.Array:
        network = kept_module(Recurrent, keep)(len(self.text.alphabet), self.width)
        rngs = {"jaxact": jax.random.key(seed)}
        logits: Any = network.apply(params, windows[:, :-1], True, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean()

    def variables(self, seed: int) -> tuple[Any, Any]:
        windows = next(self.batches(seed))
        network = Recurrent(len(self.text.alphabet), self.width)
        return network.init(jax.random.key(seed), windows[:, :-1], True), ()

    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        return lambda params, statistics, windows, seed: (
            self.mean(keep, params, windows, seed),
            statistics,
        )

"""ActNN's and DIVISION's ablations: the effect of each idea on the gradient.

After Chen et al. 2021 (arXiv:2104.14129), section 5.1: the error that rounding adds to
the gradient of a trained residual network, with one range per tensor, with groups of
256, then with bits shared out over samples, then over layers too. After Wang et al.
2023 ("Division", ICML), section 4: with means over blocks, with these alone, and with
what remains beside them alone.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from runs import (
    Effort,
    exact_gradients,
    gradient_at,
    sensitivity,
    train,
    variance,
)
from tasks import ImageTask
from variants import Variant

import jaxact

BATCH = 32
# The largest that Quantize takes; a first-stage array of 32 images of 32x32 has half.
LARGEST_GROUP = 2**20 - 32


@dataclasses.dataclass(frozen=True)
class PerTensor(jaxact.Codec):
    """One range for a whole array, for this comparison only.

    Quantize never joins samples, so its largest group is one sample. Here the array is
    one row; one of more than `LARGEST_GROUP` elements has several ranges all the same.
    """

    bits: int
    bias = jaxact.Bias.UNBIASED

    @property
    def _quantize(self) -> jaxact.Quantize:
        return jaxact.Quantize(self.bits, LARGEST_GROUP)

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        return self._quantize.encode(x.reshape(1, -1), seed)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Any:
        return self._quantize.encode_fused(x.reshape(1, -1), seed)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        row = 1, math.prod(shape)
        return self._quantize.decode(stored, row, dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class OnePart(jaxact.Codec):
    """Half of `DualPrecision(2)`, for this comparison only.

    Attributes:
      frequency: "low", the means over 8 x 8 pixels; or "high", what remains beside
        them, at 2 bits. Arrays that are no images are stored whole, at 2 bits.
    """

    frequency: str
    bias = jaxact.Bias.BIASED
    bits = 2

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        if x.ndim != 4:
            return jaxact.Quantize(2).encode(x, seed)
        if self.frequency == "low":
            return _means(x)
        return jaxact.Quantize(2).encode(x - _spread(_means(x), x.shape), seed)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 4 and self.frequency == "low":
            return _spread(stored, shape).astype(dtype)
        return jaxact.Quantize(2).decode(stored, shape, dtype)


def _means(images: jax.Array) -> jax.Array:
    """Over squares of 8 x 8 pixels, or whole small images."""
    count, height, width, channels = images.shape
    rows, columns = max(1, height // 8), max(1, width // 8)
    shape = count, rows, height // rows, columns, width // columns, channels
    return images.reshape(shape).mean((2, 4))


def _spread(means: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    for axis in (1, 2):
        means = jnp.repeat(means, shape[axis] // means.shape[axis], axis)
    return means


def policies(measured: Any) -> dict[str, jaxact.Policy]:
    """The rows of the table; `measured` is a jaxact.Sensitivity."""
    default = lambda action: jaxact.Policy(default=action)
    groups = default(jaxact.Quantize(2))
    layers = jaxact.allocate(measured, bits=2, ladder=range(1, 9))
    return {
        "4 bits, a range per tensor": default(PerTensor(4)),
        "2 bits, a range per tensor": default(PerTensor(2)),
        "2 bits, a range per sample": default(jaxact.Quantize(2, LARGEST_GROUP)),
        "2 bits, groups of 256": groups,
        "and bits per sample": jaxact.policies.actnn(3),
        "and bits per layer": jaxact.policies.actnn(3, measured=measured),
        "groups, bits per layer only": layers.policy(groups),
        "2 bits and means of 8 x 8": default(jaxact.DualPrecision(2)),
        "those means only": default(OnePart("low")),
        "2 bits of the rest only": default(OnePart("high")),
    }


def ablation(task: ImageTask, effort: Effort) -> list[dict[str, Any]]:
    """One row for each policy: the rounding error, and its reference.

    The network is trained uncompressed. `error` is the mean squared distance from the
    exact gradient over batches of 32 images, `spread` its standard error; `ratio` is
    relative to the variance between such batches.
    """
    state, _, _ = train(task, Variant("", "all"), seed=0)
    task.batch_size = BATCH
    batches = list(itertools.islice(task.batches(1000), effort.draws))
    exact = exact_gradients(task, state, batches)
    measured = sensitivity(task, jaxact.Policy(bits=2), state, batches[0])
    rows = []
    for name, policy in policies(measured).items():
        gradient = gradient_at(task, policy, state)
        some = slice(effort.draws // 2)
        found = [
            _squared_error(gradient, batch, g, effort.draws)
            for batch, g in zip(batches[some], exact[some], strict=True)
        ]
        mean = statistics.mean(found)
        error = statistics.stdev(found) / math.sqrt(len(found)) if found[1:] else 0.0
        rows.append(
            {
                "policy": name,
                "error": mean,
                "spread": error,
                "ratio": mean / variance(exact),
            }
        )
    return rows


def _squared_error(
    gradient: Callable[..., np.ndarray], batch: Any, exact: np.ndarray, draws: int
) -> float:
    """The mean squared distance from `exact`: variance, and squared bias."""
    found = (gradient(batch, seed) - exact for seed in range(draws))
    return statistics.mean(float(np.sum(distance**2)) for distance in found)

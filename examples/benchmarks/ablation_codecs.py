"""Codecs of the ablations: none is of use but to tell what one idea does."""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxact

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


@dataclasses.dataclass(frozen=True)
class ByTable(jaxact.Codec):
    """Widths for the samples of one batch, from a table that is known beforehand.

    Attributes:
      widths: bits of each sample.
    """

    widths: tuple[int, ...]
    bias = jaxact.Bias.UNBIASED

    @property
    def bits(self) -> float:
        return sum(self.widths) / len(self.widths)

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        is_batch = len(shape) > 1 and shape[0] == len(self.widths)
        return None if is_batch else "it has no such samples"

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        return [
            jaxact.Quantize(bits).encode(x[samples], seed)
            for bits, samples in self._samples.items()
        ]

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        parts = [
            jaxact.Quantize(bits).decode(part, (len(samples), *shape[1:]), dtype)
            for part, (bits, samples) in zip(stored, self._samples.items(), strict=True)
        ]
        order = np.argsort(np.concatenate(list(self._samples.values())))
        return jnp.concatenate(parts)[order]

    @property
    def _samples(self) -> dict[int, np.ndarray]:
        """The samples that have each width."""
        widths = np.asarray(self.widths)
        return {int(bits): np.flatnonzero(widths == bits) for bits in np.unique(widths)}


def shared_out(weights: Sequence[float], bits: int) -> tuple[int, ...]:
    """Widths from 1 to 8 with this mean, of the least sum of weights / (2^b - 1)^2.

    ActNN's equation 10 with equal ranges. Each next bit goes where it lowers the sum
    most, which is optimal for convex terms.
    """

    def gain(i: int) -> float:
        """By how much one more bit for a sample lowers the sum."""
        b = widths[i]
        less = (2**b - 1) ** -2 - (2 ** (b + 1) - 1) ** -2
        return weights[i] * less if b < 8 else 0.0

    widths = [1] * len(weights)
    heap = [(-gain(i), i) for i in range(len(weights))]
    heapq.heapify(heap)
    for _ in range((bits - 1) * len(weights)):
        _, i = heapq.heappop(heap)
        widths[i] += 1
        heapq.heappush(heap, (-gain(i), i))
    return tuple(widths)

"""More bits for the samples that need them (ActNN, Chen et al. 2021)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxact._codec.affine import Quantize
from jaxact._codec.base import Action
from jaxact_kernels import planes


@dataclasses.dataclass(frozen=True)
class PerSample(Action):
    """Store like `Quantize`, with 1 to 8 bits for each sample and `bits` on average.

    A sample is an index of the first axis (under `vmap`, of the first that is left).
    All together have `floor(bits * samples)` bits an element, so what is stored has a
    static size; beside it are 32 bits a group and a byte a sample. Which sample gets
    how many is decided on the device from the squared ranges of its groups (ActNN, Chen
    et al. 2021, arXiv:2104.14129, section 4.2), by taking the largest decrease of the
    variance one bit at a time, which is optimal. The other factor, the norm of the
    sample's gradient, is not known in the forward pass; its mean over the batch stands
    for it and drops out. Samples of equal ranges share evenly. A single sample, or an
    array of one axis, has `floor(bits)`.

    The decoded value's mean is the encoded value, and constant groups and zeros at a
    group's minimum come back exactly, as with `Quantize`.

    Attributes:
      bits: per element on average, 1 to 8, not necessarily an integer.
      group_size: elements that share a scale and a zero point (32 bits together); a
        multiple of 32.
      shards: equal parts of the samples, each with a budget of its own. Set it to the
        number of devices that the first axis is sharded over under `jit`: nothing is
        exchanged then. Otherwise samples of all devices share one budget, for which the
        sums of all samples are gathered, and all words on every device. Arrays whose
        samples it does not divide have one budget.
    """

    bits: float = 2.0
    group_size: int = 256
    shards: int = 1

    def __post_init__(self) -> None:
        is_real = isinstance(self.bits, int | float) and not isinstance(self.bits, bool)
        if not is_real or not 1 <= self.bits <= 8:
            raise ValueError(
                f"PerSample(bits={self.bits!r}): bits must be a number from 1 to 8. "
                "To keep 16 bits use Cast(jnp.bfloat16), to keep all use Exact()."
            )
        Quantize(group_size=self.group_size)  # validates
        is_int = isinstance(self.shards, int) and not isinstance(self.shards, bool)
        if not is_int or self.shards < 1:
            raise ValueError(
                f"PerSample(shards={self.shards!r}): the number of devices that the "
                "first axis is sharded over is required, 1 if it is not."
            )

    def declines(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        real = jnp.issubdtype(dtype, jnp.floating)
        return None if real else f"PerSample stores real floats, not {dtype}"

    def encode(
        self, x: jax.Array, seed: jax.Array, is_fused: bool = False
    ) -> planes.Stored:
        return planes.encode(
            x,
            seed,
            bits=self.bits,
            group_size=self.group_size,
            shards=self.shards,
        )

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return planes.decode(
            stored, shape=shape, dtype=dtype, group_size=self.group_size
        )

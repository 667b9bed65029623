"""More bits for the samples that need them (ActNN, Chen et al. 2021)."""

import dataclasses

import jax
from jax.typing import DTypeLike

from jaxact._codec.base import Bias, Codec
from jaxact._codec.checks import checked_group_size, checked_int, checked_number
from jaxact._codec.rows import short_rows
from jaxact._written_as import written_as
from jaxact_kernels import planes


@written_as("PerSample(2)")
@dataclasses.dataclass(frozen=True)
class PerSample(Codec[planes.Stored]):
    """Store like `Quantize`, with 1 to 8 bits for each sample and `bits` on average.

    A sample is an index along the first axis (under `vmap`, the first that is left).
    All together have `floor(bits * samples)` bits an element, so the stored size is
    static; beside them are 32 bits a group and a byte a sample. How many bits a sample
    gets is decided on the device from the squared ranges in its groups (ActNN, Chen et
    al. 2021, arXiv:2104.14129, section 4.2), by taking the largest decrease in variance
    one bit at a time, which is optimal. The other factor, the norm that the sample's
    gradient has, is not known in the forward pass; its mean over the batch stands for
    it and drops out. Samples with equal ranges share evenly. A single sample, or an
    array with one axis, has `floor(bits)`.

    The decoded value's mean is the encoded value, and constant groups and zeros at a
    group's minimum come back exactly, as with `Quantize`.

    Attributes:
      bits: per element on average, 1 to 8, not necessarily an integer.
      group_size: elements that share a scale and a zero point (32 bits together); a
        multiple of 32.
      shards: equal parts of the samples, each with a budget to itself. Set it to the
        number of devices that the first axis is sharded over under `jit`: nothing is
        exchanged then. Otherwise all devices share one budget, for which the sums of
        all samples are gathered, and all words on every device. Arrays whose samples it
        does not divide have one budget.

    Raises:
      ValueError: bits, group_size or shards out of range.
    """

    bits: float = 2.0
    group_size: int = 256
    shards: int = 1

    bias = Bias.UNBIASED
    is_float32 = True

    def __post_init__(self) -> None:
        bits = checked_number(
            self.bits,
            lambda x: 1 <= x <= 8,
            f"PerSample(bits={self.bits!r}): bits must be a number from 1 to 8. "
            "To keep 16 bits use Cast(jnp.bfloat16), to keep all use Exact().",
        )
        if not isinstance(self.bits, int | float):
            object.__setattr__(self, "bits", bits)
        group_size = checked_group_size("PerSample", self.group_size)
        object.__setattr__(self, "group_size", group_size)
        shards = checked_int(
            self.shards,
            range(1, 1 << 31),
            f"PerSample(shards={self.shards!r}): the number of devices that the first "
            "axis is sharded over is required, 1 if it is not.",
        )
        object.__setattr__(self, "shards", shards)

    @property
    def label(self) -> str:
        return f"{self.bits:g} bits, per sample"

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        return super().declines(shape, dtype) or short_rows(self, shape, dtype)

    def encode(self, x: jax.Array, seed: jax.Array) -> planes.Stored:
        return planes.encode(
            x,
            seed,
            bits=self.bits,
            group_size=self.group_size,
            shards=self.shards,
        )

    def decode(
        self, stored: planes.Stored, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        return planes.decode(
            stored, shape=shape, dtype=dtype, group_size=self.group_size
        )

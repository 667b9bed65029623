"""Every stored format under test; a new one is one line of `SUBJECTS`.

A subject has `encode(x, seed)`, `decode(stored, shape)`, `stored_bytes(shape)`, the
`dtype` it stores, and `is_exact`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import affine, index, mask, planes, rotated


@dataclasses.dataclass(frozen=True)
class Affine:
    bits: int
    dtype: str = "float32"
    group_size: int = 256
    stochastic: bool = True
    is_exact = False

    @property
    def options(self):
        return {"bits": self.bits, "group_size": self.group_size}

    def encode(self, x, seed):
        return affine.encode(x, seed, **self.options, stochastic=self.stochastic)

    def decode(self, stored, shape):
        return affine.decode(stored, shape=shape, dtype=self.dtype, **self.options)

    def stored_bytes(self, shape):
        return affine.stored_bytes(shape, **self.options)

    @property
    def most_error(self):
        """In scales."""
        return 1 if self.stochastic else 0.5

    def __str__(self):
        nearest = "" if self.stochastic else "-nearest"
        return f"affine{self.bits}-{self.dtype}-{self.group_size}{nearest}"


class DitheredStored(NamedTuple):
    words: jax.Array
    metadata: jax.Array
    seed: jax.Array


@dataclasses.dataclass(frozen=True)
class Dithered:
    """The affine format, decoded with the seed."""

    bits: int
    dtype: str = "float32"
    group_size: int = 256
    is_exact = False

    @property
    def options(self):
        return {"bits": self.bits, "group_size": self.group_size}

    def encode(self, x, seed):
        stored = affine.encode(x, seed, **self.options, is_dithered=True)
        return DitheredStored(*stored, seed)

    def decode(self, stored, shape):
        codes, seed = affine.Stored(*stored[:2]), stored.seed
        options = {"shape": shape, "dtype": self.dtype, "seed": seed}
        return affine.decode(codes, **options, **self.options)

    def stored_bytes(self, shape):
        return affine.stored_bytes(shape, **self.options) + 4

    @property
    def most_error(self):
        """In scales: half of one, and of the noise bits that are left out."""
        return 0.5 * (1 + 2.0 ** (self.bits - 15))

    def __str__(self):
        return f"dithered{self.bits}-{self.dtype}-{self.group_size}"


@dataclasses.dataclass(frozen=True)
class Rotated:
    bits: float
    dtype: str = "float32"
    group_size: int = 256
    is_adaptive: bool = False
    is_exact = False

    @property
    def options(self):
        options = {"bits": self.bits, "group_size": self.group_size}
        return options | {"is_adaptive": self.is_adaptive}

    def encode(self, x, seed):
        return rotated.encode(x, seed, **self.options)

    def decode(self, stored, shape):
        return rotated.decode(stored, shape=shape, dtype=self.dtype, **self.options)

    def stored_bytes(self, shape):
        options = {"bits": self.bits, "group_size": self.group_size}
        return rotated.stored_bytes(shape, **options)

    def __str__(self):
        name = "adaptive" if self.is_adaptive else "rotated"
        return f"{name}{self.bits}-{self.dtype}-{self.group_size}"


@dataclasses.dataclass(frozen=True)
class Planes:
    bits: float
    dtype: str = "float32"
    group_size: int = 256
    shards: int = 1
    is_exact = False
    most_error = 1

    @property
    def options(self):
        options = {"bits": self.bits, "shards": self.shards}
        return {"group_size": self.group_size, **options}

    def encode(self, x, seed):
        return planes.encode(x, seed, **self.options)

    def decode(self, stored, shape):
        options = {"dtype": self.dtype, "group_size": self.group_size}
        return planes.decode(stored, shape=shape, **options)

    def stored_bytes(self, shape):
        return planes.stored_bytes(shape, **self.options)

    def __str__(self):
        return f"planes{self.bits}-{self.dtype}-{self.group_size}-{self.shards}"


@dataclasses.dataclass(frozen=True)
class Mask:
    dtype: str = "bool"
    is_exact = True

    def encode(self, x, seed):
        return mask.encode(x)

    def decode(self, stored, shape):
        return mask.decode(stored, shape=shape)

    def stored_bytes(self, shape):
        return mask.stored_bytes(shape)

    def __str__(self):
        return "mask"


@dataclasses.dataclass(frozen=True)
class Index:
    bits: int
    dtype: str = "int32"
    is_exact = True

    def encode(self, x, seed):
        return index.encode(x, bits=self.bits)

    def decode(self, stored, shape):
        return index.decode(stored, shape=shape, dtype=self.dtype, bits=self.bits)

    def stored_bytes(self, shape):
        return index.stored_bytes(shape, bits=self.bits)

    def __str__(self):
        return f"index{self.bits}-{self.dtype}"


AFFINE = [
    *(Affine(bits) for bits in range(1, 9)),
    Affine(2, "bfloat16", 64),
    Affine(4, "float16", 1024),
    Affine(3, "bfloat16", 32),
    Affine(5, "float8_e4m3fn", 96),
    Affine(8, "float32", 64, stochastic=False),
]
PLANES = [Planes(2.0), Planes(2.5, "bfloat16", 64), Planes(4.3, "float16", 96, 3)]
DITHERED = [Dithered(2), Dithered(8), Dithered(3, "bfloat16", 96), Dithered(1)]
ROTATED = [
    *(Rotated(bits) for bits in (0.5, 1, 2, 3)),
    Rotated(0.5, "bfloat16", 96),
    Rotated(4, "bfloat16", 96),
    Rotated(6, "float16", 512),
    Rotated(1, is_adaptive=True),
    Rotated(2, is_adaptive=True),
    Rotated(4, "bfloat16", 160, is_adaptive=True),
]
SUBJECTS = [*AFFINE, *PLANES, *DITHERED, *ROTATED, Index(3), Index(4, "uint8"), Mask()]

every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=str)
every_affine = pytest.mark.parametrize("subject", AFFINE, ids=str)


# For what runs once, and interpreted kernels of thousands of operations: not optimizing
# them takes half the time.
jit_interpreted = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@functools.cache
def jitted(subject, shape):
    """Compiled (encode, decode) of a subject for one shape."""
    encode = jax.jit(subject.encode)
    decode = jax.jit(lambda stored: subject.decode(stored, shape))
    return encode, decode


def sample(subject, shape, seed=0):
    """Values a subject can store: rows of different size and place, or few integers."""
    rng = np.random.default_rng(seed)
    if isinstance(subject, Index):
        return jnp.asarray(rng.integers(0, 2**subject.bits, shape), subject.dtype)
    x = rng.standard_normal(shape)
    if subject.dtype == "bool":
        return jnp.asarray(x > 0)
    rows = shape[:-1] + (1,) if shape else ()
    x = x * np.exp2(rng.integers(-4, 3, rows)) + rng.integers(-2, 3, rows)
    return jnp.asarray(np.asarray(x, np.float32)).astype(subject.dtype)

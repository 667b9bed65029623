"""The mask format, defined in plain JAX: the index format with one bit an element."""

import jax
import numpy as np
from jax import lax

from jaxact_kernels.index import reference as index


def encode(x: jax.Array, above: jax.Array | None = None) -> jax.Array:
    """See `jaxact_kernels.mask.encode`; `above` has the same dtype as `x`."""
    return index.encode(x if above is None else lax.gt(x, above), bits=1)


def decode(packed: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """See `jaxact_kernels.mask.decode`."""
    return index.decode(packed, shape=shape, dtype=np.bool_, bits=1)


def words_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The packed words' shape: `(*lead, num_words)`."""
    return index.words_shape(shape, 1)


def stored_bytes(shape: tuple[int, ...]) -> int:
    """See `jaxact_kernels.mask.stored_bytes`."""
    return index.stored_bytes(shape, 1)

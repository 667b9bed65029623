"""How large an array is as a codec stores it."""

import functools
import math

import jax
import numpy as np

from jaxact._codec.base import Codec


@functools.lru_cache(maxsize=4096)
def bytes_of(codec: Codec, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of all arrays that such an array is encoded to, metadata among them."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    stored = jax.eval_shape(codec.encode, x, seed)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(stored))

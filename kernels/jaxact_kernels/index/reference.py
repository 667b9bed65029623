"""The index format, defined in plain JAX: codes with 1 to 8 bits, packed by `words`.

Rows are as in the affine format with groups of 256. A row that such groups divide is
packed by groups, so that an array sharded along its last axis is packed where it lies.
Any other row is one group padded to whole words: no row wastes more than 31 codes.
"""

import math

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import words
from jaxact_kernels.layout import Layout, layout_of

GROUP_SIZE = 256


def encode(x: jax.Array, *, bits: int) -> jax.Array:
    """See `jaxact_kernels.index.encode`; booleans too, as 0 and 1."""
    codes = low_bits(index_layout(x.shape).split(x, 0), bits)
    return lax.reshape(words.pack(codes, bits), words_shape(x.shape, bits))


def decode(
    packed: jax.Array, *, shape: tuple[int, ...], dtype: DTypeLike, bits: int
) -> jax.Array:
    """See `jaxact_kernels.index.decode`; to booleans too, from one bit."""
    layout = index_layout(shape)
    grouped = (*layout.lead, layout.num_groups, words.num_words(layout.group, bits))
    codes = words.unpack(lax.reshape(packed, grouped), bits)
    return layout.join(lax.convert_element_type(codes, dtype), shape)


def low_bits(x: jax.Array, bits: int) -> jax.Array:
    """Codes for integers or booleans: their `bits` lowest bits, as `uint32`."""
    codes = lax.convert_element_type(x, np.uint32)
    if x.dtype == np.bool_:
        return codes
    return lax.bitwise_and(codes, np.uint32(2**bits - 1))


def index_layout(shape: tuple[int, ...]) -> Layout:
    """Where groups lie: every 256 elements in a row that 256 divides, else a row."""
    layout = layout_of(shape, GROUP_SIZE)
    if layout.length % GROUP_SIZE == 0:
        return layout
    return Layout(layout.lead, layout.length, 1, words.whole_words(layout.length))


def words_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The packed words' shape: `(*lead, num_words)`."""
    layout = index_layout(shape)
    return *layout.lead, layout.num_groups * words.num_words(layout.group, bits)


def stored_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes that the packed words take."""
    return 4 * math.prod(words_shape(shape, bits))

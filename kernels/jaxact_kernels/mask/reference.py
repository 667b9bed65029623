"""The mask format, defined in plain JAX: one bit an element, bit order of `words`.

Rows are those of the affine format with groups of 256. A row that such groups divide is
packed by groups, so that a mask sharded along its last axis is packed where it lies.
Any other row is one group padded to whole words: no row wastes more than 31 bits.
"""

import math

import jax
import numpy as np
from jax import lax

from jaxact_kernels import words
from jaxact_kernels.layout import LANES, Layout, layout_of

GROUP = 256


def encode(x: jax.Array) -> jax.Array:
    """See `jaxact_kernels.mask.encode`."""
    flags = _layout(x.shape).split(x, False)
    packed = words.pack(lax.convert_element_type(flags, np.uint32), 1)
    return lax.reshape(packed, words_shape(x.shape))


def decode(packed: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """See `jaxact_kernels.mask.decode`."""
    layout = _layout(shape)
    grouped = (*layout.lead, layout.num_groups, layout.group // LANES)
    codes = words.unpack(lax.reshape(packed, grouped), 1)
    return layout.join(lax.ne(codes, np.uint32(0)), shape)


def words_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the packed words: `(*lead, num_words)`."""
    layout = _layout(shape)
    return *layout.lead, layout.num_groups * layout.group // LANES


def stored_bytes(shape: tuple[int, ...]) -> int:
    """See `jaxact_kernels.mask.stored_bytes`."""
    return 4 * math.prod(words_shape(shape))


def _layout(shape: tuple[int, ...]) -> Layout:
    layout = layout_of(shape, GROUP)
    if layout.length % GROUP == 0:
        return layout
    group = LANES * -(-layout.length // LANES)
    return Layout(layout.lead, layout.length, 1, group)

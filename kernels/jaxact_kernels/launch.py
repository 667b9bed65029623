"""Launch a Triton kernel that encodes or decodes a format with codes and metadata.

Its grid has a program for each block of groups; words and metadata lie as groups do.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jaxact_kernels.block import elements_shape, output
from jaxact_kernels.config import Config
from jaxact_kernels.tiles import Tiles


def launch_encode(
    kernel: Callable[..., None],
    x: jax.Array,
    scalars: Sequence[jax.Array | None],
    others: Sequence[jax.Array] = (),
    *,
    tiles: Tiles,
    num_words: int,
    config: Config,
    name: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Words, `num_words` a group, and metadata of `x`.

    The kernel reads `x`, the scalars that are not None, and the other arrays, flat.
    """
    layout = tiles.layout
    packed, metadata = pl.pallas_call(
        kernel,
        grid=(tiles.num_blocks,),
        out_shape=[
            output((layout.total_groups, num_words), np.uint32),
            output((layout.total_groups,), np.uint32),
        ],
        name=name,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        lax.reshape(x, elements_shape(layout)),
        *_each(scalars),
        *(lax.reshape(other, (other.size,)) for other in others),
    )
    lead = (*layout.lead, layout.num_groups)
    return lax.reshape(packed, (*lead, num_words)), lax.reshape(metadata, lead)


def launch_decode(
    kernel: Callable[..., None],
    packed: jax.Array,
    metadata: jax.Array,
    scalars: Sequence[jax.Array | None],
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    tiles: Tiles,
    config: Config,
    name: str,
    interpret: bool,
) -> jax.Array:
    """The array; the kernel reads the scalars that are not None too."""
    layout = tiles.layout
    x = pl.pallas_call(
        kernel,
        grid=(tiles.num_blocks,),
        out_shape=output(elements_shape(layout), dtype),
        name=name,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        lax.reshape(packed, (layout.total_groups, packed.shape[-1])),
        lax.reshape(metadata, (layout.total_groups,)),
        *_each(scalars),
    )
    return lax.reshape(x, shape)


def _each(scalars: Sequence[jax.Array | None]) -> list[jax.Array]:
    """Those that there are, as arrays of one element, which kernels can read."""
    return [lax.reshape(s, (1,)) for s in scalars if s is not None]

"""The mask format by Pallas through Triton: the index kernels, with one bit."""

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels.checks import INTEGERS
from jaxact_kernels.config import Config
from jaxact_kernels.index import triton as index
from jaxact_kernels.layout import Layout

DTYPES = ("bool", *INTEGERS, "float16", "bfloat16", "float32")


def encode(
    x: jax.Array,
    above: jax.Array | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.mask.encode`; `above` has the same dtype as `x`."""
    scalars = () if above is None else (above,)
    return index.pack(
        _code,
        x,
        *scalars,
        bits=1,
        name="mask_encode",
        config=config,
        interpret=interpret,
    )


def decode(
    packed: jax.Array,
    *,
    shape: tuple[int, ...],
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.mask.decode`."""
    return index.decode(
        packed,
        shape=shape,
        dtype=np.bool_,
        bits=1,
        name="mask_decode",
        config=config,
        interpret=interpret,
    )


def declines(layout: Layout, dtype: DTypeLike) -> str | None:
    """Say why there is no kernel for such an array; None where there is.

    Args:
        layout: the array's, from `index_layout`.
        dtype: bool, or the dtype that is compared.
    """
    return index.declines_outside(DTYPES, layout, dtype, bits=1)


def _code(x: jax.Array, *above: jax.Array) -> jax.Array:
    for threshold in above:
        x = lax.gt(x, threshold)
    return lax.convert_element_type(x, np.uint32)

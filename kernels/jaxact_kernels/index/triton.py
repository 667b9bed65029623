"""The index format by Pallas through Triton: NVIDIA GPUs from Ampere on.

A program takes a block of groups, tile by tile (see `tiles`). Codes are made where they
are packed, so the mask format uses these kernels, with one bit and its own codes.
"""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jaxact_kernels import words
from jaxact_kernels.block import Block, elements_shape, output
from jaxact_kernels.checks import INTEGERS
from jaxact_kernels.config import Config
from jaxact_kernels.index.reference import index_layout, low_bits, words_shape
from jaxact_kernels.layout import Layout
from jaxact_kernels.tiles import Tiles, separate

# Elements in a program: 128 a thread, 16 warps. At 512 a thread registers spill, as do
# 128 codes with several fields: they are held until each field is cut from them.
LONGEST = 2**16


def encode(
    x: jax.Array, *, bits: int, config: Config | None = None, interpret: bool = False
) -> jax.Array:
    """See `jaxact_kernels.index.encode`."""
    code = functools.partial(low_bits, bits=bits)
    return pack(
        code, x, bits=bits, name="index_encode", config=config, interpret=interpret
    )


def decode(
    packed: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    name: str = "index_decode",
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.index.decode`; to booleans too, from one bit."""
    layout = index_layout(shape)
    config = config or heuristic(layout, bits, np.dtype(dtype).itemsize)
    tiles = Tiles(layout, bits, config.groups, separate(bits))
    num_words = words.num_words(layout.group, bits)
    x = pl.pallas_call(
        functools.partial(_decode, tiles=tiles),
        grid=(tiles.num_blocks,),
        out_shape=output(elements_shape(layout), dtype),
        name=name,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(lax.reshape(packed, (layout.total_groups, num_words)))
    return lax.reshape(x, shape)


def pack(
    code: Callable[..., jax.Array],
    x: jax.Array,
    *scalars: jax.Array,
    bits: int,
    name: str,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Pack `code(x, *scalars)`, an elementwise function, below 2**bits, to `uint32`."""
    layout = index_layout(x.shape)
    config = config or heuristic(layout, bits, x.dtype.itemsize)
    tiles = Tiles(layout, bits, config.groups, separate(bits))
    num_words = words.num_words(layout.group, bits)
    packed = pl.pallas_call(
        functools.partial(_encode, tiles=tiles, code=code),
        grid=(tiles.num_blocks,),
        out_shape=output((layout.total_groups, num_words), np.uint32),
        name=name,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        lax.reshape(x, elements_shape(layout)),
        *(lax.reshape(scalar, (1,)) for scalar in scalars),
    )
    return lax.reshape(packed, words_shape(x.shape, bits))


def declines(layout: Layout, dtype: DTypeLike, bits: int) -> str | None:
    """Say why there is no kernel for such an array; None where there is."""
    return declines_outside(INTEGERS, layout, dtype, bits)


def declines_outside(
    dtypes: tuple[str, ...], layout: Layout, dtype: DTypeLike, bits: int
) -> str | None:
    """The same for a format that holds `dtypes`."""
    dtype = np.dtype(dtype)
    if dtype.name not in dtypes:
        return f"the kernel holds {', '.join(dtypes)}, not {dtype.name}"
    num_elements = math.prod(layout.lead) * layout.length
    if not num_elements:
        return "an array without elements has nothing for a kernel to do"
    if dtype.itemsize == 1 and num_elements >= 2**31:
        # Pallas counts bytes to choose 64-bit offsets, from 2**32 on, and
        # Triton takes the 32-bit ones as signed.
        return f"{num_elements} elements of one byte have offsets beyond 31 bits"
    longest = LONGEST if len(words.widths(bits)) == 1 else LONGEST // 2
    if _program_elements(layout, bits) > longest:
        return (
            f"a row of {layout.length} elements, which 256 does not divide, is one "
            "group and too long for the registers of one program"
        )
    return None


def heuristic(layout: Layout, bits: int, item_bytes: int) -> Config:
    """Choose a block for elements that take `item_bytes` bytes each.

    A thread has 128 bytes, as in the affine format, and a program four warps, or up to
    16 for a long row. Four-byte elements may then be 128 a thread: they are packed as
    they come, and 128 registers suffice (compiled for sm_90).
    """
    item_bytes *= _program_elements(layout, bits)
    warps = max(1, item_bytes // (32 * 128))
    if warps <= 4:
        return Config(max(1, 4 * 32 * 128 // item_bytes), 4)
    return Config(1, min(warps, 16))


def _program_elements(layout: Layout, bits: int) -> int:
    """Elements in a group whose tiles are filled up to powers of two."""
    tiles = Tiles(layout, bits, 1, separate(bits))
    return tiles.count * tiles.padded_width


def _encode(
    x_ref: jax.Ref, *refs: jax.Ref, tiles: Tiles, code: Callable[..., jax.Array]
) -> None:
    *scalar_refs, words_ref = refs
    block = Block(tiles)
    scalars = [ref[0] for ref in scalar_refs]
    codes = []
    for k in range(tiles.count):
        codes.append(code(block.load(x_ref, k), *scalars))
        is_real = block.is_real(k)
        if tiles.layout.padding and is_real is not None:
            codes[k] = lax.select(is_real, codes[k], lax.full_like(codes[k], 0))
    block.store_words(words_ref, tiles.pack(codes))


def _decode(words_ref: jax.Ref, x_ref: jax.Ref, *, tiles: Tiles) -> None:
    block = Block(tiles)
    packed = block.load_words(words_ref)
    for k in range(tiles.count):
        code = tiles.unpack(k, packed)
        block.store(x_ref, k, lax.convert_element_type(code, x_ref.dtype))

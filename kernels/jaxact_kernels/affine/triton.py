"""The affine format by Pallas through Triton: NVIDIA GPUs from Ampere on.

A program reads a block of groups once and keeps it in registers, as tiles (see
`tiles`). Extremes are taken over tiles, elementwise, and then along one tile. Almost
all blocks hold ordinary numbers, for which the definition has shortcuts; the others
branch to the definition itself.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import checks, noise, words
from jaxact_kernels.affine import group
from jaxact_kernels.affine.group import small_float
from jaxact_kernels.affine.reference import Stored
from jaxact_kernels.affine.triton_codes import (
    dithered_tiles,
    first_counter,
    fixed_point,
    noise_for,
    ordinary_fixed_point,
    round_tile,
    round_tiles,
    to_float32,
)
from jaxact_kernels.affine.triton_elements import Elements, operand_refs
from jaxact_kernels.affine.triton_extremes import (
    are_ordinary,
    content_of,
    finite_extremes,
    summarize,
)
from jaxact_kernels.block import Block, over_tiles
from jaxact_kernels.config import Config, heuristic
from jaxact_kernels.launch import launch_decode, launch_encode
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.normalization import Normalization, normalized_dtype
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.tiles import Tiles, separate

MOST_IN_PROGRAM = 4096
# Triton compares every load and store with all operations that it is connected to, so
# that time to compile grows with the cube of this number; and a load is as wide as a
# thread's share of a tile. From 16 to 8, joining shared words costs 4 to 6 % more
# instructions at 2 and 3 bits.
MOST_TILES = 16


def encode(
    x: jax.Array,
    seed: jax.Array,
    first: jax.Array | None = None,
    *,
    bits: int,
    group_size: int,
    stochastic: bool,
    is_dithered: bool = False,
    normalization: Normalization | None = None,
    coefficients: Sequence[jax.Array] = (),
    numbering: Numbering | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Stored:
    """See `jaxact_kernels.affine.encode`.

    A shard has a `numbering` for its groups, and its first group's number.

    Args:
        normalization: its result is encoded.
        coefficients: for the normalization.
    """
    layout = layout_of(x.shape, group_size)
    dtype = normalized_dtype(x.dtype) if normalization else x.dtype
    config = config or heuristic(layout.group, dtype.itemsize)
    tiles = tiles_for(layout, bits, config)
    kernel = functools.partial(
        _encode,
        tiles=tiles,
        dtype=dtype,
        shape=x.shape,
        normalization=normalization,
        stochastic=stochastic,
        is_dithered=is_dithered,
        numbering=numbering,
        interpret=interpret,
    )
    arrays = launch_encode(
        kernel,
        x,
        (seed, first),
        coefficients,
        tiles=tiles,
        num_words=words.num_words(layout.group, bits),
        config=config,
        name="affine_encode",
        interpret=interpret,
    )
    return Stored(*arrays)


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int,
    draw: noise.Draw | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`; with a draw, dithered."""
    layout = layout_of(shape, group_size)
    config = config or heuristic(layout.group, np.dtype(dtype).itemsize)
    tiles = tiles_for(layout, bits, config)
    scalars = [s for s in (draw.seed, draw.first) if s is not None] if draw else []
    kernel = functools.partial(
        _decode,
        tiles=tiles,
        dtype=dtype,
        numbering=draw and draw.numbering,
    )
    return launch_decode(
        kernel,
        *stored,
        scalars,
        shape=shape,
        dtype=np.dtype(dtype),
        tiles=tiles,
        config=config,
        name="affine_decode",
        interpret=interpret,
    )


def tiles_for(layout: Layout, bits: int, config: Config) -> Tiles:
    """How groups are cut."""
    return Tiles(layout, bits, config.groups, min(separate(bits), MOST_TILES))


def declines(layout: Layout, dtype: DTypeLike) -> str | None:
    """Why these kernels cannot serve an array; None where they can."""
    reason = checks.declines_float(dtype)
    if reason is not None:
        return reason
    if layout.group > MOST_IN_PROGRAM:
        return (
            f"a program holds a whole group, at most {MOST_IN_PROGRAM} elements, in "
            f"registers; this one has {layout.group}"
        )
    return None


def _encode(
    x_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: Tiles,
    dtype: np.dtype,
    shape: tuple[int, ...],
    normalization: Normalization | None,
    stochastic: bool,
    is_dithered: bool,
    numbering: Numbering | None,
    interpret: bool,
) -> None:
    block = Block(tiles)
    *operands, words_ref, metadata_ref = refs
    (seed_ref, *first_ref), coefficients = operand_refs(operands, normalization)
    draw = None
    if stochastic:
        first = first_ref[0][0] if first_ref else None
        draw = noise.Draw(seed_ref[0], numbering, first)
    load = Elements(block, x_ref, shape, normalization, coefficients).load
    xs = [load(k) for k in range(tiles.count)]
    lo, hi, is_finite = finite_extremes(block, xs, can_pair=not interpret)
    is_ordinary = are_ordinary((lo, hi), is_finite, dtype)

    def own_bits(metadata: jax.Array, content: jax.Array) -> jax.Array:
        return noise.own_bits(metadata, None if is_dithered else content)

    def ordinary() -> tuple[jax.Array, list[jax.Array]]:
        metadata = group.metadata(lo, hi, tiles.bits, dtype)
        line = group.encoding_line(lo, metadata)
        fixed = ordinary_fixed_point(block, line, is_contracted=interpret)
        # Not before the branch: that takes a tenth more instructions.
        own = own_bits(metadata, content_of(xs))
        return metadata, tiles.pack(round_tiles(block, xs, fixed, draw, own))

    def special() -> tuple[jax.Array, list[jax.Array]]:
        # In a loop that loads each tile once more: a branch that hardly ever runs
        # should hold no registers and take no time to compile.
        wide = lambda k: to_float32(load(k))
        lo, hi, content = summarize(block, wide, group.largest(dtype))
        metadata = group.metadata(lo, hi, tiles.bits, dtype)
        fixed = fixed_point(block, group.encoding_line(lo, metadata))
        counter = first_counter(block, draw, own_bits(metadata, content))

        def add(k: jax.Array, packed: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            code = round_tile(block, k, fixed(wide(k)), noise_for(block, counter, k))
            return tiles.pack_one(k, code, packed)

        zero = lax.full(block.shape, 0, np.uint32)
        zeros = tuple(zero for _ in tiles.first_words())
        return metadata, tiles.join(over_tiles(tiles.count, add, zeros))

    metadata, packed = lax.cond(is_ordinary, ordinary, special)
    block.store_words(words_ref, packed)
    block.store_groups(metadata_ref, metadata)


def _decode(
    words_ref: jax.Ref,
    metadata_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: Tiles,
    dtype: DTypeLike,
    numbering: Numbering | None,
) -> None:
    *scalar_refs, out_ref = refs
    scalars = [ref[0] for ref in scalar_refs]
    block = Block(tiles)
    metadata = block.load_groups(metadata_ref)
    line = group.decoding_line(metadata)
    zero, step, unit = (block.spread(end) for end in line)
    packed = block.load_words(words_ref)
    codes = (tiles.unpack(k, packed) for k in range(tiles.count))
    if scalars:
        seed, *first = scalars
        draw = noise.Draw(seed, numbering, *first)
        multiples = dithered_tiles(block, list(codes), draw, metadata)
    else:
        multiples = map(small_float, codes)
    for k, multiple in enumerate(multiples):
        x = lax.mul(lax.add(zero, lax.mul(step, multiple)), unit)
        x = group.saturated(x, dtype) if scalars else x
        block.store(out_ref, k, lax.convert_element_type(x, dtype))

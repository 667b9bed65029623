"""The rotated format by Pallas through Triton: NVIDIA GPUs from Ampere on.

A program reads a block of groups and keeps it in registers. Elements are integers that
float16 holds, so that tensor cores take part in the rotation, exactly (see `rotation`).
Special numbers are made ordinary in a branch that hardly ever runs, and groups that are
not rotated have one too, which reads the block once more. A block without a group to
rotate skips the rotation: in a decoder, and in an encoder where groups have a choice.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxact_kernels import checks, noise
from jaxact_kernels.affine import group as affine_group
from jaxact_kernels.affine.triton_codes import (
    first_counter,
    fixed_point,
    noise_for,
    round_tile,
    to_float32,
)
from jaxact_kernels.affine.triton_elements import Elements, operand_refs
from jaxact_kernels.affine.triton_extremes import (
    are_ordinary,
    finite_extremes,
    summarize,
)
from jaxact_kernels.block import Block, over_tiles
from jaxact_kernels.config import Config
from jaxact_kernels.launch import launch_decode, launch_encode
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.normalization import Normalization, normalized_dtype
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.rotated import adaptive, group
from jaxact_kernels.rotated.centered import (
    Frame,
    frame,
)
from jaxact_kernels.rotated.reference import Stored
from jaxact_kernels.rotated.triton_codes import (
    centered,
    count,
    plain_values,
    rotated_codes,
    rotated_values,
    square,
    sum_over_group,
    unless_padding,
)
from jaxact_kernels.rotated.triton_tiles import GroupTiles, rotated_tiles
from jaxact_kernels.tiles import Tiles

MOST_IN_PROGRAM = 256
# A warp has the 16 rows of one product of matrices: 128 elements of 256 in a thread.
CONFIG = Config(groups=32, num_warps=2)

Tile = jax.Array


def encode(
    x: jax.Array,
    seed: jax.Array,
    first: jax.Array | None = None,
    *,
    bits: float,
    group_size: int,
    is_adaptive: bool,
    normalization: Normalization | None = None,
    coefficients: Sequence[jax.Array] = (),
    numbering: Numbering | None = None,
    config: Config = CONFIG,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Words and metadata; see `jaxact_kernels.rotated.encode`.

    A shard has a `numbering` for its groups, and its first group's number.

    Args:
        normalization: its result is encoded.
        coefficients: for the normalization.
    """
    layout = layout_of(x.shape, group_size)
    bits = group.group_bits(layout.group, bits)
    tiles = rotated_tiles(layout, bits, config.groups)
    kernel = functools.partial(
        _encode,
        tiles=tiles,
        bits=bits,
        dtype=normalized_dtype(x.dtype) if normalization else x.dtype,
        shape=x.shape,
        normalization=normalization,
        is_adaptive=is_adaptive,
        numbering=numbering,
        interpret=interpret,
    )
    return launch_encode(
        kernel,
        x,
        (seed, first),
        coefficients,
        tiles=tiles.elements,
        num_words=group.num_words(layout.group, bits),
        config=config,
        name="rotated_encode",
        interpret=interpret,
    )


def decode(
    stored: Stored,
    first: jax.Array | None = None,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: float,
    group_size: int,
    is_adaptive: bool,
    numbering: Numbering | None = None,
    config: Config = CONFIG,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.rotated.decode`."""
    layout = layout_of(shape, group_size)
    bits = group.group_bits(layout.group, bits)
    tiles = rotated_tiles(layout, bits, config.groups)
    kernel = functools.partial(
        _decode,
        tiles=tiles,
        bits=bits,
        dtype=np.dtype(dtype),
        is_adaptive=is_adaptive,
        numbering=numbering,
        interpret=interpret,
    )
    return launch_decode(
        kernel,
        stored.words,
        stored.metadata,
        (stored.seed, first),
        shape=shape,
        dtype=np.dtype(dtype),
        tiles=tiles.elements,
        config=config,
        name="rotated_decode",
        interpret=interpret,
    )


def declines(layout: Layout, dtype: DTypeLike) -> str | None:
    """Why these kernels cannot serve an array; None where they can."""
    reason = checks.declines_float(dtype)
    if reason is not None:
        return reason
    size = layout.group
    if size > MOST_IN_PROGRAM or size & (size - 1):
        return (
            "a program rotates groups of 32, 64, 128 or 256 elements in registers; "
            f"this one has {size}"
        )
    return None


def _encode(
    x_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: GroupTiles,
    bits: float,
    dtype: np.dtype,
    shape: tuple[int, ...],
    normalization: Normalization | None,
    is_adaptive: bool,
    numbering: Numbering | None,
    interpret: bool,
) -> None:
    block = Block(tiles.elements)
    *operands, words_ref, metadata_ref = refs
    (seed_ref, *first_ref), coefficients = operand_refs(operands, normalization)
    draw = noise.Draw(seed_ref[0], numbering, first_ref[0][0] if first_ref else None)
    elements = Elements(block, x_ref, shape, normalization, coefficients)
    lo, hi, xs = _ordinary(block, elements, dtype, interpret)
    size, plain_bits = tiles.elements.layout.group, tiles.plain.bits
    grid = frame((lo, hi), size)
    plain = affine_group.metadata(
        lo, hi, plain_bits, dtype, adaptive.SPARE if is_adaptive else 0
    )
    codes_of = fixed_point(block, affine_group.encoding_line(lo, plain))
    distances, mean = centered(block, grid, xs)
    squares = sum_over_group([square(d, group.dropped_bits(size)) for d in distances])
    is_rotated = grid.is_ordinary
    again = lambda k: _clipped(block, grid, to_float32(elements.load(k, again=True)))
    fixed = lambda k: codes_of(again(k))
    if is_adaptive:
        spreads = _spreads(block, fixed)
        options = grid, squares, spreads, count(block), plain, size, plain_bits
        plain, is_rotated = adaptive.choose(*options)

    def rotated() -> tuple[jax.Array, ...]:
        options = draw, bits, is_adaptive, interpret
        codes, metadata = rotated_codes(block, distances, squares, mean, grid, *options)
        return metadata, *tiles.codes.pack(codes)

    def none() -> tuple[jax.Array, ...]:
        columns = (columns for columns, _ in tiles.codes.slots())
        words = (lax.full((block.shape[0], n), 0, np.uint32) for n in columns)
        return lax.full_like(plain, 0), *words

    # Without a choice only constants are not rotated: hardly a block would skip it.
    each = lax.cond(_any_holds(is_rotated), rotated, none) if is_adaptive else rotated()
    metadata, *packed = each

    def mixed() -> tuple[jax.Array, ...]:
        counter = first_counter(block, draw if is_adaptive else None, plain)
        words = _plain_words(block, tiles.plain, counter, fixed)
        pairs = zip(packed, words, strict=True)
        return tuple(lax.select(_over(is_rotated, a), a, b) for a, b in pairs)

    packed = lax.cond(_all_hold(block, is_rotated), lambda: tuple(packed), mixed)
    Block(tiles.codes).store_words(words_ref, packed)
    flag = adaptive.ROTATED if is_adaptive else np.uint32(0)
    metadata = lax.select(is_rotated, lax.bitwise_or(metadata, flag), plain)
    block.store_groups(metadata_ref, metadata)


def _decode(
    words_ref: jax.Ref,
    metadata_ref: jax.Ref,
    seed_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: GroupTiles,
    bits: float,
    dtype: np.dtype,
    is_adaptive: bool,
    numbering: Numbering | None,
    interpret: bool,
) -> None:
    block = Block(tiles.elements)
    *first_ref, out_ref = refs
    draw = noise.Draw(seed_ref[0], numbering, first_ref[0][0] if first_ref else None)
    metadata = block.load_groups(metadata_ref)
    coded, plain = Block(tiles.codes), Block(tiles.plain)
    packed = coded.load_words(words_ref)
    codes = [tiles.codes.unpack(i, packed) for i in range(tiles.codes.count)]
    is_rotated = lax.bitwise_not(affine_group.is_constant(metadata))
    if is_adaptive:
        is_rotated = lax.bitwise_and(is_rotated, adaptive.is_rotated(metadata))

    def rotated() -> None:
        options = metadata, draw, bits, is_adaptive, interpret
        for k, x in enumerate(rotated_values(block, codes, *options)):
            x = lax.convert_element_type(affine_group.saturated(x, dtype), dtype)
            block.store(out_ref, k, x, only=is_rotated)

    def others() -> None:
        value = plain_values(block, metadata, draw, is_adaptive)
        is_plain = lax.bitwise_not(is_rotated)
        codes = packed if tiles.plain is tiles.codes else plain.load_words(words_ref)

        def store(k: jax.Array, _: None) -> None:
            # A constant's tiles have the same codes, which some do not store.
            i = lax.rem(k, np.int32(tiles.plain.count))
            code = tiles.plain.unpack_one(i, codes)
            x = affine_group.saturated(value(k, code), dtype)
            block.store(out_ref, k, lax.convert_element_type(x, dtype), only=is_plain)

        over_tiles(tiles.elements.count, store, None)

    lax.cond(_any_holds(is_rotated), rotated, lambda: None)
    lax.cond(_all_hold(block, is_rotated), lambda: None, others)


def _ordinary(
    block: Block, elements: Elements, dtype: np.dtype, interpret: bool
) -> tuple[jax.Array, jax.Array, tuple[Tile, ...]]:
    """Extremes, as in the affine format, and elements as float32, clipped to them."""
    count = block.tiles.count
    xs = [elements.load(k) for k in range(count)]
    lo, hi, is_finite = finite_extremes(block, xs, can_pair=not interpret)

    def special() -> tuple[jax.Array, ...]:
        load = lambda k: to_float32(elements.load(k))
        lo, hi, _ = summarize(block, load, affine_group.largest(dtype))
        grid = frame((lo, hi), block.tiles.layout.group)
        return lo, hi, *(_clipped(block, grid, to_float32(x)) for x in xs)

    is_ordinary = are_ordinary((lo, hi), is_finite, dtype)
    lo, hi, *xs = lax.cond(is_ordinary, lambda: (lo, hi, *map(to_float32, xs)), special)
    return lo, hi, tuple(xs)


def _plain_words(
    block: Block,
    tiles: Tiles,
    counter: Tile | None,
    fixed: Callable[[jax.Array], Tile],
) -> list[jax.Array]:
    """Words in the affine format, as `Tiles.pack` returns them.

    In a loop: a branch that seldom runs should take no time to compile.
    """

    def add(k: jax.Array, parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        code = round_tile(block, k, fixed(k), noise_for(block, counter, k))
        return tiles.pack_one(k, code, parts)

    zeros = tuple(lax.full(block.shape, 0, np.uint32) for _ in tiles.first_words())
    return tiles.join(over_tiles(tiles.count, add, zeros))


def _spreads(block: Block, fixed: Callable[[jax.Array], Tile]) -> jax.Array:
    """Sums over groups of what stochastic rounding errs, `uint32`.

    From elements that are read once more, as few other values are alive then; and in a
    loop, as the time that Triton compiles for grows with the square of a program.

    Args:
        fixed: from a tile's number to its codes in the affine format.
    """

    def add(k: jax.Array, total: Tile) -> Tile:
        return lax.add(total, unless_padding(block, k, adaptive.spread(fixed(k))))

    zeros = lax.full(block.shape, 0, np.uint32)
    spreads = over_tiles(block.tiles.count, add, zeros)
    return sum_over_group([spreads]).astype(np.uint32)


def _clipped(block: Block, grid: Frame, x: Tile) -> Tile:
    """Elements within their group's finite extremes; for NaN one of these."""
    return lax.max(lax.min(x, block.spread(grid.hi)), block.spread(grid.lo))


def _over(flag: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(flag, like.shape, (0,))


def _any_holds(flags: jax.Array) -> jax.Array:
    """Whether a flag holds for a group, perhaps for one beyond the array."""
    return lax.eq(jnp.max(lax.convert_element_type(flags, np.int32)), np.int32(1))


def _all_hold(block: Block, flags: jax.Array) -> jax.Array:
    """Whether a flag holds for all groups; those beyond the array do not count."""
    flags = lax.convert_element_type(flags, np.int32)
    total = block.tiles.layout.total_groups
    if total % block.tiles.groups:
        beyond = lax.ge(block.number, np.int32(total))
        flags = lax.max(flags, lax.convert_element_type(beyond, np.int32))
    return lax.eq(jnp.min(flags), np.int32(1))

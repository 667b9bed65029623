"""The affine format by Pallas through Mosaic GPU: NVIDIA GPUs from Hopper on.

A warpgroup reads a block of groups once and keeps it in registers, as tiles (see
`tiles`); neighbouring threads in one warp hold a group. Almost all blocks are finite;
only the others branch to find their finite extremes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxact_kernels import checks, mosaic_compat, noise, words
from jaxact_kernels.affine import group
from jaxact_kernels.affine.group import FRACTION, MAGIC, MAGIC_BITS
from jaxact_kernels.affine.mosaic_block import (
    THREADS,
    Block,
    most_threads_per_group,
    threads_per_group,
)
from jaxact_kernels.affine.reference import NEAREST, Stored
from jaxact_kernels.config import Config, heuristic
from jaxact_kernels.device import Device
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.tiles import Tiles, integer_sum, separate

MOST_PER_THREAD = 64  # elements that a thread can keep in registers

Tile = jax.Array  # elements, one tile from every group in a block


def encode(
    x: jax.Array,
    seed: jax.Array,
    first: jax.Array | None = None,
    *,
    bits: int,
    group_size: int,
    stochastic: bool,
    is_dithered: bool = False,
    numbering: Numbering | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Stored:
    """See `jaxact_kernels.affine.encode`.

    A shard has a `numbering` for its groups, and its first group's number.
    """
    layout = layout_of(x.shape, group_size)
    tiles = tiles_for(layout, bits, x.dtype, config)
    scalars = [lax.reshape(s, (1,)) for s in (seed, first) if s is not None]
    num_words = words.num_words(layout.group, bits)
    kernel = functools.partial(
        _encode,
        tiles=tiles,
        dtype=x.dtype,
        stochastic=stochastic,
        is_dithered=is_dithered,
        numbering=numbering,
    )
    packed, metadata = _call(
        kernel,
        tiles,
        [
            jax.ShapeDtypeStruct((layout.total_groups, num_words), np.uint32),
            jax.ShapeDtypeStruct((layout.total_groups,), np.uint32),
        ],
        name="affine_encode",
        interpret=interpret,
    )(lax.reshape(x, (layout.total_groups, layout.group)), *scalars)
    lead = (*layout.lead, layout.num_groups)
    return Stored(lax.reshape(packed, (*lead, num_words)), lax.reshape(metadata, lead))


def decode(
    stored: Stored,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`."""
    layout = layout_of(shape, group_size)
    tiles = tiles_for(layout, bits, dtype, config)
    num_words = words.num_words(layout.group, bits)
    elements = layout.total_groups, layout.group
    x = _call(
        functools.partial(_decode, tiles=tiles, dtype=np.dtype(dtype)),
        tiles,
        jax.ShapeDtypeStruct(elements, dtype),
        name="affine_decode",
        interpret=interpret,
    )(
        lax.reshape(stored.words, (layout.total_groups, num_words)),
        lax.reshape(stored.metadata, (layout.total_groups,)),
    )
    return lax.reshape(x, shape)


def declines(
    layout: Layout, dtype: DTypeLike, bits: int, device: Device | None = None
) -> str | None:
    """Why these kernels cannot serve an array on a device; None where they can."""
    capability = None if device is None else device.capability
    if device is not None and capability is not None and capability < (9, 0):
        major, minor = capability
        return f"Mosaic GPU needs capability 9.0; {device.kind} has {major}.{minor}"
    reason = checks.declines_float(dtype)
    if reason is not None:
        return reason
    if layout.padding:
        return (
            f"a row of {layout.length} elements needs padding, which the Mosaic GPU "
            "kernels do not mask"
        )
    threads = most_threads_per_group(Tiles(layout, bits, 1, separate(bits)))
    if layout.group > MOST_PER_THREAD * threads:
        return (
            f"codes of {bits} bits in groups of {layout.group} leave each thread "
            f"{layout.group // threads} elements, more than {MOST_PER_THREAD}"
        )
    if layout.total_groups < THREADS // threads:
        return (
            f"the array has {layout.total_groups} groups, fewer than a block's "
            f"{THREADS // threads}"
        )
    return None


def _call(
    kernel: Callable[..., None],
    tiles: Tiles,
    out_type: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    interpret: bool,
) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = mosaic_compat.interpreter()
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(tiles.num_blocks,),
        grid_names=("block",),
        kernel_name=name,
        # A barrier at each store would order it with reads from the same memory.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, **mosaic_compat.THREAD_SEMANTICS
        ),
        **options,
    )


def tiles_for(
    layout: Layout, bits: int, dtype: DTypeLike, config: Config | None
) -> Tiles:
    """How groups are cut; a block has enough to give every thread work.

    Raises:
        ValueError: these kernels decline such an array.
    """
    reason = declines(layout, dtype, bits)
    if reason is not None:
        raise ValueError(reason)
    config = config or heuristic(layout.group, np.dtype(dtype).itemsize)
    groups = min(config.groups, 1 << layout.total_groups.bit_length() - 1)
    threads = threads_per_group(Tiles(layout, bits, groups, separate(bits)))
    return Tiles(layout, bits, max(groups, THREADS // threads), separate(bits))


def _encode(
    x_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: Tiles,
    dtype: np.dtype,
    stochastic: bool,
    is_dithered: bool,
    numbering: Numbering | None,
) -> None:
    block = Block(tiles, dtype)
    seed_ref, *first_ref, words_ref, metadata_ref = refs
    draw = None
    if stochastic:
        first = first_ref[0][0] if first_ref else None
        draw = noise.Draw(seed_ref[0], numbering, first)
    xs = [block.load(x_ref, k * tiles.width) for k in range(tiles.count)]
    lo, hi = _extremes(xs, group.largest(dtype))
    metadata = group.metadata(lo, hi, tiles.bits, dtype)
    block.store_groups(metadata_ref, metadata)
    code = _code(block, group.encoding_line(lo, metadata))
    codes: list = [None] * tiles.count
    own = noise.own_bits(metadata, None if is_dithered else _content(xs))
    for k, (low, high) in enumerate(_noise_pairs(block, draw, own)):
        partner = k + tiles.count // 2
        codes[k], codes[partner] = code(xs[k], low), code(xs[partner], high)
    for first, packed in zip(tiles.first_words(), tiles.pack(codes), strict=True):
        block.store(words_ref, first, packed)


def _decode(
    words_ref: jax.Ref,
    metadata_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    tiles: Tiles,
    dtype: np.dtype,
) -> None:
    block = Block(tiles, dtype)
    line = group.decoding_line(block.load_groups(metadata_ref))
    zero, step, unit = (block.spread(end) for end in line)
    packed = {first: block.load(words_ref, first) for first in tiles.first_words()}
    for k in range(tiles.count):
        code = lax.bitwise_or(tiles.unpack(k, packed), MAGIC_BITS)
        code = lax.sub(group.float_of(code), MAGIC)
        x = lax.mul(lax.add(zero, lax.mul(step, code)), unit)
        x = lax.convert_element_type(x, dtype)
        block.store(out_ref, k * tiles.width, x)


def _content(xs: list[Tile]) -> jax.Array:
    """Each group's content."""
    patterns = [group.pattern(lax.convert_element_type(x, np.float32)) for x in xs]
    total = integer_sum(noise.content_of_tiles(patterns))
    return lax.bitcast_convert_type(total, np.uint32)


def _extremes(xs: list[Tile], big: np.float32) -> tuple[jax.Array, jax.Array]:
    """Each group's least and greatest finite element; NaN where there is a NaN.

    Unlike Triton's, `min` and `max` here keep a NaN.
    """
    lo, hi = _over_group(xs, xs)
    is_finite = lax.lt(lax.max(lax.abs(lo), lax.abs(hi)), np.float32(np.inf))
    not_finite = lax.convert_element_type(lax.bitwise_not(is_finite), np.int32)

    def special() -> tuple[jax.Array, jax.Array]:
        wide = [lax.convert_element_type(x, np.float32) for x in xs]
        infinite = [lax.eq(lax.abs(x), np.float32(np.inf)) for x in wide]
        los = [group.put(big, i, x) for i, x in zip(infinite, wide, strict=True)]
        his = [group.put(-big, i, x) for i, x in zip(infinite, wide, strict=True)]
        lo, hi = _over_group(los, his)
        return lax.min(lo, hi), lax.max(lo, hi)

    all_finite = lax.eq(jnp.max(not_finite), np.int32(0))
    return lax.cond(all_finite, lambda: (lo, hi), special)


def _over_group(los: list[Tile], his: list[Tile]) -> tuple[jax.Array, jax.Array]:
    lo, hi = functools.reduce(lax.min, los), functools.reduce(lax.max, his)
    lo, hi = (lax.convert_element_type(end, np.float32) for end in (lo, hi))
    return jnp.min(lo, axis=1), jnp.max(hi, axis=1)


def _code(
    block: Block, line: group.Line
) -> Callable[[Tile, jax.Array | np.uint32], Tile]:
    """The function that rounds elements to codes with 16 bits of noise.

    As `reference._fixed_point` and `round_fixed_point`, but clipped in integers: below
    by a float's bits, which are negative as integers where the float is, and above
    after the noise, as min(t, top) + noise and min(t + noise, top + 65535) have the
    same high half. A NaN, from an infinity times slope 0, becomes one of the two ends,
    and both are `base` then.
    """
    bits = block.tiles.bits
    half_zero, slope, base = line
    offset = MAGIC_BITS if bits < 8 else np.uint32(0)
    top = np.uint32((2**bits - 1) * 65536)
    is_flat = lax.eq(slope, np.float32(0))
    end = lax.add(lax.select(is_flat, base, lax.full_like(base, top)), FRACTION)
    end = block.spread(lax.add(end, offset))
    start = block.spread(lax.add(base, offset))
    half_zero, slope = block.spread(half_zero), block.spread(slope)

    def code(x: Tile, noise16: jax.Array | np.uint32) -> Tile:
        x = lax.convert_element_type(x, np.float32)
        t = lax.mul(lax.sub(lax.mul(x, np.float32(0.5)), half_zero), slope)
        # Not a float maximum: that would keep a NaN, and let a compiler contract
        # the product with the sum below, which then rounds once and not twice.
        t = lax.max(lax.bitcast_convert_type(t, np.int32), np.int32(0))
        t = lax.bitcast_convert_type(t, np.float32)
        if bits < 8:
            fixed = group.pattern(lax.add(t, group.float_of(start)))
        else:  # no room for 24 bits in a float's low 23
            t = lax.round(
                lax.min(t, np.float32(top)), lax.RoundingMethod.TO_NEAREST_EVEN
            )
            t = lax.convert_element_type(t, np.int32)
            fixed = lax.add(lax.bitcast_convert_type(t, np.uint32), start)
        fixed = lax.min(lax.add(fixed, noise16), end)
        fixed = lax.shift_right_logical(fixed, np.uint32(16))
        return lax.bitwise_and(fixed, np.uint32(2**bits - 1))

    return code


def _noise_pairs(
    block: Block, draw: noise.Draw | None, own: jax.Array
) -> list[tuple[jax.Array, jax.Array]] | list[tuple[np.uint32, np.uint32]]:
    """Each hash's halves: noise for tile k, and for the tile half a group later."""
    tiles = block.tiles
    half = tiles.count // 2
    if draw is None:
        return [(NEAREST, NEAREST)] * half
    key = noise.shard_key(draw, block.number(), own)
    first = lax.add(block.spread(key), lax.mul(block.column(), noise.GOLDEN))
    golden, width = int(noise.GOLDEN), tiles.width
    steps = [np.uint32(k * width * golden % 2**32) for k in range(half)]
    return [noise.halves(noise.hash32(lax.add(first, step))) for step in steps]

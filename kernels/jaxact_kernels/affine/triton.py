"""The affine format by Pallas through Triton: NVIDIA GPUs from Ampere on.

A program reads a block of groups once and keeps it in registers, as tiles (see
`tiles`). Extremes are taken over tiles, elementwise, and then along one tile. Almost
all blocks hold ordinary numbers, for which the definition has shortcuts; the others
branch to the definition itself.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from jaxact_kernels import noise, words
from jaxact_kernels.affine import group
from jaxact_kernels.affine.group import MAGIC, MAGIC_BITS
from jaxact_kernels.affine.reference import NEAREST, Stored
from jaxact_kernels.block import Block, TileNumber, elements_shape, output
from jaxact_kernels.config import Config, heuristic
from jaxact_kernels.layout import Layout, layout_of
from jaxact_kernels.numbering import Numbering
from jaxact_kernels.tiles import Tiles

MOST_PER_GROUP = 4096

Tile = jax.Array  # elements, one tile from every group in a block
Ends = tuple[jax.Array, jax.Array]


def encode(
    x: jax.Array,
    seed: jax.Array,
    first: jax.Array | None = None,
    *,
    bits: int,
    group_size: int,
    stochastic: bool,
    numbering: Numbering | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Stored:
    """See `jaxact_kernels.affine.encode`.

    A shard has a `numbering` for its groups, and its first group's number.
    """
    layout = layout_of(x.shape, group_size)
    config = config or heuristic(layout.group, x.dtype.itemsize)
    tiles = Tiles(layout, bits, config.groups)
    scalars = [lax.reshape(s, (1,)) for s in (seed, first) if s is not None]
    num_words = words.num_words(layout.group, bits)
    kernel = functools.partial(
        _encode,
        tiles=tiles,
        dtype=x.dtype,
        stochastic=stochastic,
        numbering=numbering,
        interpret=interpret,
    )
    packed, metadata = pl.pallas_call(
        kernel,
        grid=(tiles.num_blocks,),
        out_shape=[
            output((layout.total_groups, num_words), np.uint32),
            output((layout.total_groups,), np.uint32),
        ],
        name="affine_encode",
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(lax.reshape(x, elements_shape(layout)), *scalars)
    lead = (*layout.lead, layout.num_groups)
    return Stored(lax.reshape(packed, (*lead, num_words)), lax.reshape(metadata, lead))


def decode(
    stored: Stored,
    *operands: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int,
    then: Callable[..., jax.Array] | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxact_kernels.affine.decode`."""
    layout = layout_of(shape, group_size)
    config = config or heuristic(layout.group, np.dtype(dtype).itemsize)
    tiles = Tiles(layout, bits, config.groups)
    num_words = words.num_words(layout.group, bits)
    out = jax.ShapeDtypeStruct(shape, dtype)
    if then is not None:
        out = jax.eval_shape(then, out, *operands)
    x = pl.pallas_call(
        functools.partial(_decode, tiles=tiles, dtype=dtype, then=then),
        grid=(tiles.num_blocks,),
        out_shape=output(elements_shape(layout), out.dtype),
        name="affine_decode",
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
    )(
        lax.reshape(stored.words, (layout.total_groups, num_words)),
        lax.reshape(stored.metadata, (layout.total_groups,)),
        *(lax.reshape(operand, elements_shape(layout)) for operand in operands),
    )
    return lax.reshape(x, shape)


def declines(layout: Layout, dtype: DTypeLike) -> str | None:
    """Why these kernels cannot serve an array; None where they can."""
    if np.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        return f"the kernels read float32, bfloat16 and float16, not {dtype}"
    if layout.group > MOST_PER_GROUP:
        return (
            f"a program holds a whole group, at most {MOST_PER_GROUP} elements, in "
            f"registers; this one has {layout.group}"
        )
    return None


def _encode(
    x_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: Tiles,
    dtype: np.dtype,
    stochastic: bool,
    numbering: Numbering | None,
    interpret: bool,
) -> None:
    block = Block(tiles)
    seed_ref, *first_ref, words_ref, metadata_ref = refs
    draw = None
    if stochastic:
        first = first_ref[0][0] if first_ref else None
        draw = noise.Draw(seed_ref[0], numbering, first)
    xs = [block.load(x_ref, k) for k in range(tiles.count)]
    lo, hi, is_finite = _finite_extremes(block, xs, can_pair=not interpret)
    is_ordinary = _all(is_finite, lax.lt(_sizes(lo, hi), _ordinary_below(dtype)))

    def store(metadata: jax.Array, packed: Sequence[jax.Array]) -> None:
        block.store_words(words_ref, packed)
        block.store_groups(metadata_ref, metadata)

    def ordinary() -> None:
        metadata = group.metadata(lo, hi, tiles.bits, dtype)
        line = group.encoding_line(lo, metadata)
        fixed = _ordinary_fixed_point(block, line, is_contracted=interpret)
        store(metadata, tiles.pack(_codes(block, xs, fixed, draw, metadata)))

    def special() -> None:
        # In a loop that loads each tile once more: a branch that hardly ever runs
        # should hold no registers and take no time to compile.
        load = lambda k: _to_float32(block.load(x_ref, k))
        lo, hi = _extremes(block, load, group.largest(dtype))
        metadata = group.metadata(lo, hi, tiles.bits, dtype)
        fixed = _fixed_point(block, group.encoding_line(lo, metadata))
        counter = _first_counter(block, draw, metadata)

        def add(k: jax.Array, packed: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            code = _code(block, k, fixed(load(k)), _noise(block, counter, k))
            return tiles.pack_one(k, code, tuple(packed))

        zero = lax.full(block.shape, 0, np.uint32)
        zeros = tuple(zero for _ in tiles.first_words())
        store(metadata, lax.fori_loop(0, tiles.count, add, zeros))

    lax.cond(is_ordinary, ordinary, special)


def _decode(
    words_ref: jax.Ref,
    metadata_ref: jax.Ref,
    *refs: jax.Ref,
    tiles: Tiles,
    dtype: DTypeLike,
    then: Callable[..., jax.Array] | None,
) -> None:
    *operand_refs, out_ref = refs
    block = Block(tiles)
    line = group.decoding_line(block.load_groups(metadata_ref))
    zero, step, unit = (block.spread(end) for end in line)
    packed = block.load_words(words_ref)
    for k in range(tiles.count):
        code = lax.bitwise_or(tiles.unpack(k, packed), MAGIC_BITS)
        code = lax.sub(group.float_of(code), MAGIC)
        x = lax.mul(lax.add(zero, lax.mul(step, code)), unit)
        x = lax.convert_element_type(x, dtype)
        if then is not None:
            x = then(x, *(block.load(ref, k) for ref in operand_refs))
        block.store(out_ref, k, x)


def _ordinary_below(dtype: DTypeLike) -> np.float32:
    """The bound below which elements are ordinary.

    No scale is then made smaller lest it overflow the dtype, no zero point is held
    back, and a group's sum is finite.
    """
    return np.float32(min(float(group.largest(dtype)) / 4, 2.0**110))


def _sizes(lo: jax.Array, hi: jax.Array) -> jax.Array:
    return lax.max(lax.abs(lo), lax.abs(hi))


def _all(*flags: jax.Array) -> jax.Array:
    """Whether all flags hold for all groups."""
    flag = lax.convert_element_type(functools.reduce(lax.bitwise_and, flags), np.int32)
    return lax.eq(jnp.min(flag), np.int32(1))


def _finite_extremes(
    block: Block, xs: list[Tile], *, can_pair: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Extremes, right where all elements are finite; and whether all are.

    The sum reveals NaN and infinities, which `min` and `max` may drop.
    """
    floats = [_to_float32(x) for x in xs]
    if xs[0].dtype.itemsize == 2 and block.is_real(0) is None and can_pair:
        lo = functools.reduce(functools.partial(_paired, "min"), xs)
        hi = functools.reduce(functools.partial(_paired, "max"), xs)
        lo, hi = (jnp.min(_to_float32(lo), axis=1), jnp.max(_to_float32(hi), axis=1))
    else:
        los, his = _padded(block, floats, np.float32(np.inf))
        lo, hi = _over_group(lax.min, jnp.min, los), _over_group(lax.max, jnp.max, his)
    total = _over_group(lax.add, jnp.sum, floats)
    return lo, hi, lax.lt(lax.abs(total), np.float32(np.inf))


def _paired(op: str, a: Tile, b: Tile) -> Tile:
    """`min` or `max` for 16-bit floats, two by one instruction.

    Triton widens them to float32, one by one, on the kernel's busiest pipe.
    """
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[a.dtype.name]
    out = jax.ShapeDtypeStruct(a.shape, a.dtype)
    [joined] = plt.elementwise_inline_asm(
        f"{op}.{kind} $0, $1, $2;",
        args=[a, b],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[out],
    )
    return joined


def _to_float32(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, np.float32)


def _extremes(block: Block, load: Callable[[jax.Array], Tile], big: np.float32) -> Ends:
    """Each group's least and greatest finite element; NaN where there is a NaN."""

    def join(k: jax.Array, ends: tuple[Tile, Tile, Tile]) -> tuple[Tile, Tile, Tile]:
        lo, hi, nan = ends
        x = load(k)
        is_ignored = lax.eq(lax.abs(x), np.float32(np.inf))
        is_real = block.is_real(k)
        if is_real is not None:
            is_ignored = lax.bitwise_or(is_ignored, lax.bitwise_not(is_real))
        is_nan = lax.convert_element_type(lax.ne(x, x), np.int32)
        return (
            lax.min(lo, group.put(big, is_ignored, x)),
            lax.max(hi, group.put(-big, is_ignored, x)),
            lax.bitwise_or(nan, is_nan),
        )

    ends = (lax.full(block.shape, end, np.float32) for end in (np.inf, -np.inf))
    start = (*ends, lax.full(block.shape, 0, np.int32))
    lo, hi, nan = lax.fori_loop(0, block.tiles.count, join, start)
    lo, hi = jnp.min(lo, axis=1), jnp.max(hi, axis=1)
    is_nan = lax.gt(jnp.max(nan, axis=1), np.int32(0))
    return group.put(np.float32(np.nan), is_nan, lax.min(lo, hi)), lax.max(lo, hi)


def _padded(
    block: Block, xs: list[Tile], big: np.float32
) -> tuple[list[Tile], list[Tile]]:
    """Elements for a minimum and for a maximum: `big` and `-big` for padding."""
    reals = [real for k in range(len(xs)) if (real := block.is_real(k)) is not None]
    if not reals:
        return xs, xs
    padding = [lax.bitwise_not(real) for real in reals]
    los = [group.put(big, pad, x) for x, pad in zip(xs, padding, strict=True)]
    his = [group.put(-big, pad, x) for x, pad in zip(xs, padding, strict=True)]
    return los, his


def _over_group(
    join: Callable[[Tile, Tile], Tile],
    reduce: Callable[..., jax.Array],
    tiles: list[Tile],
) -> jax.Array:
    return reduce(functools.reduce(join, tiles), axis=1)


def _fixed_point(block: Block, line: group.Line) -> Callable[[Tile], Tile]:
    """Real-valued codes in units of 2**-16, clipped, as integers; see `reference`."""
    half_zero, slope, base = (block.spread(end) for end in line)
    top = np.float32((2**block.tiles.bits - 1) * 65536)

    def fixed(x: Tile) -> Tile:
        t = lax.mul(lax.sub(lax.mul(x, np.float32(0.5)), half_zero), slope)
        t = group.put(np.float32(0), lax.bitwise_not(lax.gt(t, np.float32(0))), t)
        return lax.add(_rounded(lax.min(t, top), block.tiles.bits), base)

    return fixed


def _ordinary_fixed_point(
    block: Block, line: group.Line, *, is_contracted: bool
) -> Callable[[Tile], Tile]:
    """The same for ordinary numbers: nothing overflows and nothing needs clipping.

    x <= hi gives t <= top: half the range is at most s * steps / 2, an exact float32;
    that times the slope, 2**17 / s within 2**-24, rounds to top.
    """
    half_zero, slope, base = line
    zero = block.spread(lax.mul(half_zero, np.float32(2)))
    slope = block.spread(lax.mul(slope, np.float32(0.5)))
    base = block.spread(base)

    def fixed(x: Tile) -> Tile:
        t = lax.mul(lax.sub(x, zero), slope)
        if is_contracted:
            # Triton rounds every product. XLA:CPU, which runs interpreted kernels, may
            # contract this one with the sum that follows; not through a maximum.
            t = lax.max(t, np.float32(0))
        return lax.add(_rounded(t, block.tiles.bits), base)

    return fixed


def _rounded(t: jax.Array, bits: int) -> jax.Array:
    """The nearest integer, ties to even, as `uint32`, for 0 <= t < 2**(bits + 16)."""
    if bits < 8:
        return lax.sub(group.pattern(lax.add(t, MAGIC)), MAGIC_BITS)
    is_upper = lax.ge(t, MAGIC)
    lower = lax.select(is_upper, lax.sub(t, MAGIC), t)
    upper = lax.shift_left(lax.convert_element_type(is_upper, np.uint32), np.uint32(23))
    return lax.add(lax.sub(group.pattern(lax.add(lower, MAGIC)), MAGIC_BITS), upper)


def _codes(
    block: Block,
    xs: list[Tile],
    fixed: Callable[[Tile], Tile],
    draw: noise.Draw | None,
    metadata: jax.Array,
) -> list[Tile]:
    """Round fixed-point codes to integers, tile by tile, with noise from `noise`."""
    half = block.tiles.count // 2
    counter = _first_counter(block, draw, metadata)
    codes: list = [None] * block.tiles.count
    for k in range(half):
        low = high = NEAREST
        if counter is not None:
            bits = noise.hash32(lax.add(counter, _step(block, k)))
            low = lax.bitwise_and(bits, np.uint32(0xFFFF))
            high = lax.shift_right_logical(bits, np.uint32(16))
        for tile, noise16 in ((k, low), (k + half, high)):
            t = fixed(_to_float32(xs[tile]))
            codes[tile] = _code(block, tile, t, noise16)
    return codes


def _code(
    block: Block, k: TileNumber, fixed: Tile, noise16: jax.Array | np.uint32
) -> Tile:
    code = lax.shift_right_logical(lax.add(fixed, noise16), np.uint32(16))
    is_real = block.is_real(k)
    if block.tiles.layout.padding and is_real is not None:
        code = lax.select(is_real, code, lax.full_like(code, 0))
    return code


def _first_counter(
    block: Block, draw: noise.Draw | None, metadata: jax.Array
) -> Tile | None:
    """Counters whose hashes are noise for the first tile; None for no noise."""
    if draw is None:
        return None
    number = lax.convert_element_type(block.number, np.uint32)
    key = noise.shard_key(draw, number, metadata)
    column = lax.broadcasted_iota(np.uint32, block.shape, 1)
    return lax.add(block.spread(key), lax.mul(column, noise.GOLDEN))


def _step(block: Block, k: int) -> np.uint32:
    """How far tile `k` is from the first in counters; its hashes serve two tiles."""
    return np.uint32(k * block.tiles.width * int(noise.GOLDEN) % 2**32)


def _noise(block: Block, counter: Tile | None, k: jax.Array) -> jax.Array | np.uint32:
    """Noise for tile `k`, which may be traced."""
    if counter is None:
        return NEAREST
    half = np.int32(block.tiles.count // 2)
    is_upper, k = lax.div(k, half), lax.rem(k, half)
    step = lax.mul(lax.convert_element_type(k, np.uint32), _step(block, 1))
    bits = noise.hash32(lax.add(counter, step))
    shift = lax.convert_element_type(is_upper, np.uint32) * np.uint32(16)
    bits = lax.shift_right_logical(bits, lax.full_like(bits, shift))
    return lax.bitwise_and(bits, np.uint32(0xFFFF))

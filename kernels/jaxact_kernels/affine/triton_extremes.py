"""Summaries of groups in Triton kernels, and whether their elements are ordinary."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from jaxact_kernels import noise
from jaxact_kernels.affine import group
from jaxact_kernels.affine.triton_codes import Tile, to_float32
from jaxact_kernels.block import Block, over_tiles
from jaxact_kernels.tiles import integer_sum

Ends = tuple[jax.Array, jax.Array]


def ordinary_below(dtype: np.dtype) -> np.float32:
    """The bound below which elements are ordinary.

    No scale is then made smaller lest it overflow the dtype, no zero point is held
    back, and a group's sum is finite.
    """
    return np.float32(min(float(group.largest(dtype)) / 4, 2.0**110))


def are_ordinary(ends: Ends, is_finite: jax.Array, dtype: np.dtype) -> jax.Array:
    """Whether all elements in all groups are ordinary, `bool[]`."""
    lo, hi = ends
    size = lax.max(lax.abs(lo), lax.abs(hi))
    return all_hold(is_finite, lax.lt(size, ordinary_below(dtype)))


def all_hold(*flags: jax.Array) -> jax.Array:
    """Whether all flags hold for all groups."""
    flag = lax.convert_element_type(functools.reduce(lax.bitwise_and, flags), np.int32)
    return lax.eq(jnp.min(flag), np.int32(1))


def finite_extremes(
    block: Block, xs: list[Tile], *, can_pair: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Extremes, right where all elements are finite; and whether all are.

    The sum reveals NaN and infinities, which `min` and `max` may drop.
    """
    floats = [to_float32(x) for x in xs]
    if xs[0].dtype.itemsize == 2 and block.is_real(0) is None and can_pair:
        lo = functools.reduce(functools.partial(_paired, "min"), xs)
        hi = functools.reduce(functools.partial(_paired, "max"), xs)
        lo, hi = (jnp.min(to_float32(lo), axis=1), jnp.max(to_float32(hi), axis=1))
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


def content_of(xs: list[Tile]) -> jax.Array:
    """Each group's content; padding, which is 0, adds nothing."""
    patterns = [group.pattern(to_float32(x)) for x in xs]
    total = integer_sum(noise.content_of_tiles(patterns))
    return lax.bitcast_convert_type(total, np.uint32)


def summarize(
    block: Block, load: Callable[[jax.Array], Tile], big: np.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Least and greatest finite element, content; see `reference.Summary`."""
    half = np.int32(block.tiles.count // 2)

    def join(k: jax.Array, found: tuple[Tile, ...]) -> tuple[Tile, ...]:
        lo, hi, nan, content = found
        x = load(k)
        is_ignored = lax.eq(lax.abs(x), np.float32(np.inf))
        is_real = block.is_real(k)
        if is_real is not None:
            is_ignored = lax.bitwise_or(is_ignored, lax.bitwise_not(is_real))
        is_nan = lax.convert_element_type(lax.ne(x, x), np.int32)
        is_upper = lax.convert_element_type(lax.div(k, half), np.uint32)
        shift = lax.full(block.shape, is_upper * np.uint32(16), np.uint32)
        return (
            lax.min(lo, group.put(big, is_ignored, x)),
            lax.max(hi, group.put(-big, is_ignored, x)),
            lax.bitwise_or(nan, is_nan),
            lax.add(content, noise.content(group.pattern(x), shift)),
        )

    ends = (lax.full(block.shape, end, np.float32) for end in (np.inf, -np.inf))
    zeros = (lax.full(block.shape, 0, dtype) for dtype in (np.int32, np.uint32))
    start = (*ends, *zeros)
    lo, hi, nan, content = over_tiles(block.tiles.count, join, start)
    lo, hi = jnp.min(lo, axis=1), jnp.max(hi, axis=1)
    is_nan = lax.gt(jnp.max(nan, axis=1), np.int32(0))
    lo, hi = group.put(np.float32(np.nan), is_nan, lax.min(lo, hi)), lax.max(lo, hi)
    return lo, hi, lax.bitcast_convert_type(integer_sum(content), np.uint32)


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

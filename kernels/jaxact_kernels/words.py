"""The only definition of bit order: codes packed into planar 32-bit words.

A code with `bits` bits is cut, low bits first, into fields whose widths are the powers
of two in `bits`, widest first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1. In a
group with g elements a field f bits wide takes W = g * f / 32 words, and word w holds
elements w, W + w, 2W + w, ... at bit offsets 0, f, 2f, ... The words for a group's
fields follow one another. No bit is wasted at any width, and packing shifts and ORs
contiguous slices: no element moves sideways in a vector register.
"""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

WORD_BITS = 32
MAX_BITS = 8
LOWEST_BITS = np.uint32(0x01010101)  # mask for the four 8-bit codes in a word


def widths(bits: int) -> tuple[int, ...]:
    """Widths of a code's fields, from its lowest bits up: 7 -> (4, 2, 1)."""
    return tuple(1 << k for k in reversed(range(4)) if bits >> k & 1)


def whole_words(codes: int) -> int:
    """So many codes, and padding with which those of any width fill whole words."""
    return WORD_BITS * -(-codes // WORD_BITS)


def num_words(group: int, bits: int) -> int:
    """Words taken by one group, which has `group` codes."""
    return group * bits // WORD_BITS


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack `uint32[..., g]` codes below `2**bits` into `uint32[..., g * bits / 32]`."""
    slot = 1 << (bits - 1).bit_length()
    *lead, group = codes.shape
    slots = lax.reshape(codes, (*lead, WORD_BITS // slot, num_words(group, slot)))
    shift = lax.broadcast_in_dim(_offsets(slot), slots.shape, (len(lead),))
    shifted = lax.shift_left(slots, shift)
    slots = lax.reduce(shifted, np.uint32(0), lax.add, (len(lead),))
    if slot == bits:
        return slots
    # Widths that are no power of two are cut from words packed at the next one: the
    # codes, which cost far more than the cutting, are computed once.
    parts = []
    for offset, width in fields(bits):
        mask = np.uint32(sum(((1 << width) - 1) << i for i in _offsets(slot).tolist()))
        field = lax.bitwise_and(_shift_right(slots, offset), mask)
        parts.append(_fold(field, slot, width))
    return lax.concatenate(parts, len(lead))


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Undo `pack`: `uint32[..., g * bits / 32]` words into `uint32[..., g]` codes."""
    *lead, size = words.shape
    return lax.reshape(unpack_slots(words, bits), (*lead, size * WORD_BITS // bits))


def unpack_slots(words: jax.Array, bits: int) -> jax.Array:
    """The same with a group's g codes over several axes, in row-major order.

    They are the axes that shifts and words have: XLA:CPU takes 2.5 times as long for
    operations after they are joined (4 Mi float32, jax 0.12).
    """
    *lead, size = words.shape
    repeats, axis = _word_axes(bits), len(lead)
    codes, start = None, 0
    for i, (offset, width) in enumerate(fields(bits)):
        outer, count = repeats[: i + 1], size * width // bits  # the field's words
        inner = (*repeats[i + 1 :], size * widths(bits)[-1] // bits)
        shape, split = (*lead, *outer, *inner), axis + len(outer)
        field = lax.slice_in_dim(words, start, start + count, axis=axis)
        field = lax.broadcast_in_dim(
            lax.reshape(field, (*lead, *inner)),
            shape,
            (*range(axis), *range(split, len(shape))),
        )
        code = shift_left(_slot(field, width, range(axis, split)), offset)
        codes = code if codes is None else lax.bitwise_or(codes, code)
        start += count
    assert codes is not None
    return codes


def cut_planes(packed: jax.Array) -> list[jax.Array]:
    """Cut words with 8-bit codes into one word array for each bit, lowest first.

    Args:
        packed: `pack(codes, 8)`, `uint32[..., g / 4]`.

    Returns:
        8 arrays `uint32[..., g / 32]`: `pack(codes >> i & 1, 1)` for each bit i.
    """
    fields = (lax.bitwise_and(_shift_right(packed, i), LOWEST_BITS) for i in range(8))
    return [_fold(field, 8, 1) for field in fields]


def join_planes(planes: Sequence[jax.Array]) -> jax.Array:
    """Undo `cut_planes`: `pack(codes, 8)`, `uint32[..., g / 4]`."""
    *lead, size = planes[0].shape
    shift = np.arange(8, dtype=np.uint32).reshape(*(1 for _ in lead), 8, 1)
    joined = None
    for i, plane in enumerate(planes):
        plane = lax.expand_dims(plane, (len(lead),))
        field = lax.bitwise_and(lax.shift_right_logical(plane, shift), LOWEST_BITS)
        field = shift_left(field, i)
        joined = field if joined is None else lax.bitwise_or(joined, field)
    assert joined is not None
    return lax.reshape(joined, (*lead, 8 * size))


def fields(bits: int) -> list[tuple[int, int]]:
    """List (offset in the code, width) for each field."""
    sizes = widths(bits)
    return list(zip(itertools.accumulate((0, *sizes[:-1])), sizes, strict=True))


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """Move bits up; by none without an operation."""
    return lax.shift_left(x, np.uint32(by)) if by else x


def _fold(slots: jax.Array, slot: int, width: int) -> jax.Array:
    """Join each group's upper half to its lower until slots are `width` bits apart."""
    while slot > width:
        slot //= 2
        axis, half = slots.ndim - 1, slots.shape[-1] // 2
        lower, upper = lax.split(slots, (half, half), axis)
        slots = lax.bitwise_or(lower, shift_left(upper, slot))
    return slots


def _shift_right(x: jax.Array, by: int) -> jax.Array:
    return lax.shift_right_logical(x, np.uint32(by)) if by else x


def _slot(words: jax.Array, width: int, axes: Sequence[int]) -> jax.Array:
    """The code in each slot, for words that repeat along axes, once for every slot.

    Slots wider than a bit move to the word's top first, by shifts that descend. Shifts
    that ascend from 0 XLA computes, as multiples of an iota, in one array for the whole
    program, and XLA:GPU joins kernels that read it, such as an MLP's decoding with the
    softmax of the attention before it: a step of four DiT-B blocks took 1077 MiB on an
    H100, and takes 908 this way. An iota alone is computed where it is read.
    """
    offsets = _offsets(width).reshape([words.shape[axis] for axis in axes])
    if width == 1:
        shift = lax.broadcast_in_dim(offsets, words.shape, axes)
        return lax.bitwise_and(lax.shift_right_logical(words, shift), np.uint32(1))
    shift = lax.broadcast_in_dim(np.flip(offsets), words.shape, axes)
    return _shift_right(lax.shift_left(words, shift), WORD_BITS - width)


def _offsets(width: int) -> np.ndarray:
    """Bit offsets in a word at which slots `width` bits wide start."""
    return np.arange(0, WORD_BITS, width, dtype=np.uint32)


def _word_axes(bits: int) -> tuple[int, ...]:
    """Axes over which words repeat, one more for each field: 7 -> (8, 2, 2).

    A word in a field f bits wide serves 32 / f elements. Cutting a group into these
    axes, and one for contiguous elements, lets every field's words broadcast to its
    elements.
    """
    uses = [WORD_BITS // width for width in widths(bits)]
    return tuple(b // a for a, b in itertools.pairwise((1, *uses)))

"""Bit order: planar, no bit wasted, the same as the NumPy twin."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import words
from support import oracle

pytestmark = pytest.mark.unoptimized  # integers alone

every_width = pytest.mark.parametrize("bits", range(1, 9))


def random_codes(bits, shape):
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape, np.uint32)
    return jnp.asarray(codes)


@functools.cache
def compiled(bits):
    pack = jax.jit(functools.partial(words.pack, bits=bits))
    return pack, jax.jit(functools.partial(words.unpack, bits=bits))


@every_width
@pytest.mark.parametrize("group", [32, 96, 256])
def test_equals_the_oracle_and_comes_back(bits, group):
    pack, unpack = compiled(bits)
    codes = random_codes(bits, (2, 3, group))
    packed = pack(codes)
    assert packed.shape == (2, 3, words.num_words(group, bits))
    wanted = [oracle.pack(row, bits) for row in np.asarray(codes).reshape(-1, group)]
    np.testing.assert_array_equal(np.asarray(packed).reshape(6, -1), wanted)
    np.testing.assert_array_equal(unpack(packed), codes)


@every_width
def test_no_bit_is_wasted(bits):
    pack, unpack = compiled(bits)
    full = pack(jnp.full((1, 1, 64), 2**bits - 1, jnp.uint32))
    np.testing.assert_array_equal(full, np.uint32(2**32 - 1))
    anything = random_codes(8, (4, 2 * bits)).view(jnp.uint32) * np.uint32(0x9E3779B9)
    np.testing.assert_array_equal(pack(unpack(anything)), anything)


def test_one_bit_of_a_group_of_32_is_its_index():
    packed = words.pack(jnp.eye(32, dtype=jnp.uint32), 1)
    np.testing.assert_array_equal(packed[:, 0], 2 ** np.arange(32, dtype=np.uint32))


def test_planar_order_of_four_bits():
    codes = jnp.arange(64, dtype=jnp.uint32) // np.uint32(8)  # 8 words: slice k holds k
    np.testing.assert_array_equal(words.pack(codes, 4), np.uint32(0x76543210))


def test_fields_are_the_powers_of_two_widest_first():
    assert [words.widths(bits) for bits in range(1, 9)] == [
        (1,), (2,), (2, 1), (4,), (4, 1), (4, 2), (4, 2, 1), (8,),
    ]  # fmt: skip


@every_width
def test_no_shift_is_a_multiple_of_an_iota(bits):
    """XLA computes it as an array, and XLA:GPU joins decodings that read it."""
    unpack = jax.jit(functools.partial(words.unpack_slots, bits=bits))
    shape = jax.ShapeDtypeStruct((4, words.num_words(256, bits)), np.uint32)
    program = unpack.lower(shape).as_text()
    arrays = [json.loads(found) for found in re.findall(r"dense<(\[.*?\])>", program)]
    assert arrays or bits == 1  # that one's may be an iota
    for array in map(np.array, arrays):
        step = array.flat[1] - array.flat[0]
        assert step == 1 or not np.array_equal(array, step * np.arange(array.size))

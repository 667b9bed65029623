"""The Triton kernels of the rotated format, interpreted, against the reference.

Equal means equal bits: all sums are of integers that float32 adds exactly, in any
order, so no difference is allowed for.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels.config import Config
from jaxact_kernels.layout import layout_of
from jaxact_kernels.numbering import box
from jaxact_kernels.rotated import reference, triton
from jaxact_kernels.rotated.reference import Stored
from support.subjects import jit_interpreted as jit
from support.variants import thorough

pytestmark = thorough

SEED = np.uint32(7)
SMALL = Config(4, 1)
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def groups(size, rows=12):
    """Rows for every branch: rotated, dithered, on codes, constant, and odd numbers."""
    x = np.random.default_rng(size).standard_normal((rows, size)).astype(np.float32)
    x[0], x[1], x[2] = np.maximum(x[0], 0), np.sign(x[1]), 1 / 3
    x[3], x[4], x[5] = x[3] * 1e-12, np.eye(1, size, 9) * 30, np.linspace(0, 1, size)
    x[6], x[7, 3], x[8, 5], x[9, 6] = x[6] * 1e20, np.nan, np.inf, -np.inf
    return x


def assert_equal(x, *, bits, group_size=256, is_adaptive=True, config=SMALL):
    """Words, metadata and decoded values of the kernels, to the last bit."""
    options = {"bits": bits, "group_size": group_size, "is_adaptive": is_adaptive}
    interpreted = {"config": config, "interpret": True}
    encode = functools.partial(triton.encode, **options, **interpreted)
    wanted = jit(functools.partial(reference.encode, **options))(x, SEED)
    for got, want in zip(jit(encode)(x, SEED), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    options |= {"shape": x.shape, "dtype": x.dtype}
    stored = Stored(*wanted, SEED)
    back = jit(functools.partial(reference.decode, **options))(stored)
    got = jit(functools.partial(triton.decode, **options, **interpreted))(stored)
    view = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.asarray(got).view(view), np.asarray(back).view(view)
    )
    return wanted


@pytest.mark.parametrize(
    "bits, size, is_adaptive",
    [
        *((2, 256, True), (1, 128, True), (3, 64, False), (0.5, 128, False)),
        *(slow(0.5, size, False) for size in (32, 64, 256)),
        *(slow(bits, 256, False) for bits in (2, 5)),
        *(slow(bits, 256, True) for bits in (1, 3, 4, 6, 8)),
        *(slow(bits, 32, True) for bits in (1, 2, 7)),
    ],
)
def test_every_kind_of_group_equals_the_reference(bits, size, is_adaptive):
    _, metadata = assert_equal(
        jnp.asarray(groups(size)), bits=bits, is_adaptive=is_adaptive
    )
    if is_adaptive and bits == 2:  # rotated groups and others occur
        assert set((np.asarray(metadata).ravel()[3:] & 1).tolist()) == {0, 1}


def test_blocks_without_a_rotated_group_equal_the_reference():
    x = np.sign(np.random.default_rng(0).standard_normal((8, 256), np.float32))
    _, metadata = assert_equal(jnp.asarray(x), bits=2)
    assert not np.any(np.asarray(metadata) & 1)  # the flag of all groups


def test_what_is_decided_about_each_element_stands_once_in_a_program():
    """Triton compiles in a time that grows with the square of a program."""
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    encode = functools.partial(triton.encode, bits=4, group_size=256, is_adaptive=True)
    program = str(jax.make_jaxpr(encode)(x, SEED))
    tiles = 16
    assert tiles < program.count("<-") < 2 * tiles  # reads; each has computations


@pytest.mark.parametrize(
    "dtype, shape", [("bfloat16", (9, 500)), slow("float16", (3, 250))]
)
def test_padded_rows_equal_the_reference(dtype, shape):
    assert layout_of(shape, 256).group == 256 and layout_of(shape, 256).padding
    x = np.resize(groups(256).ravel(), shape)
    assert_equal(jnp.asarray(x).astype(dtype), bits=2)


def test_a_shard_rotates_as_its_place_does():
    # A box of 2 x 1 groups in an array of 6 x 3.
    x = jnp.asarray(np.random.default_rng(3).standard_normal((6, 192), np.float32))
    options = {"bits": 2, "group_size": 64, "is_adaptive": False}
    whole = jit(functools.partial(reference.encode, **options))(x, SEED)
    back = functools.partial(reference.decode, shape=x.shape, dtype=x.dtype, **options)
    back = jit(back)(Stored(*whole, SEED))
    shard = {"numbering": box((2, 1), (6, 3)), "config": SMALL, "interpret": True}
    part, first = x[2:4, 64:128], jnp.uint32(3 * 2 + 1)
    encode = functools.partial(triton.encode, **options, **shard)
    got = jit(encode)(part, SEED, first)
    for one, all_ in zip(got, whole, strict=True):
        np.testing.assert_array_equal(one, all_[2:4, 1:2])
    options |= {"shape": part.shape, "dtype": part.dtype}
    decode = functools.partial(triton.decode, **options, **shard)
    np.testing.assert_array_equal(
        jit(decode)(Stored(*got, SEED), first), back[2:4, 64:128]
    )


def test_groups_that_no_kernel_rotates_are_declined():
    for shape, group_size, number in (((8, 300), 256, 160), ((8, 512), 512, 512)):
        layout = layout_of(shape, group_size)
        reason = triton.declines(layout, np.dtype("float32"))
        assert f"this one has {number}" in reason
    assert triton.declines(layout_of((8, 1024), 256), np.dtype("bfloat16")) is None
    assert "float64" in triton.declines(layout_of((8, 1024), 256), np.dtype("float64"))

"""Kernels where JAX's integers have 64 bits (`jax_enable_x64`): the same words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact_kernels import affine, index, mask, noise, rotated
from jaxact_kernels.affine import mosaic_gpu, triton
from jaxact_kernels.config import Config
from jaxact_kernels.dispatch import run
from jaxact_kernels.index import triton as index_triton
from jaxact_kernels.mask import triton as mask_triton
from jaxact_kernels.normalization import Normalization
from jaxact_kernels.rotated import triton as rotated_triton
from support.gpu_target import needs_target
from support.subjects import Affine, jit_interpreted as jit, sample
from support.variants import thorough

SEED = np.uint32(7)
RUN = {"config": Config(4, 1), "interpret": True}
OPTIONS = {"bits": 2, "group_size": 64}
PADDED = (5, 100)


def odd_groups():
    """Some of whose numbers kernels treat by themselves, in loops."""
    return sample(Affine(2), PADDED).at[1, 7].set(np.inf).at[2, 9].set(np.nan)


def both(kernel, definition, *args):
    """Results with x64 and without, by the kernel and by its definition."""
    with jax.enable_x64(True):
        got = jit(kernel)(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, definition(*args))), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    return got


def test_affine_and_dithered_codes():
    x = odd_groups()
    encode = functools.partial(triton.encode, stochastic=True, **OPTIONS, **RUN)
    stored = both(encode, functools.partial(affine.encode, **OPTIONS), x, SEED)
    array = {"shape": x.shape, "dtype": x.dtype} | OPTIONS
    decode = functools.partial(triton.decode, **array, **RUN)
    both(decode, functools.partial(affine.decode, **array), stored)
    both(
        lambda stored, seed: decode(stored, draw=noise.Draw(seed)),
        lambda stored, seed: affine.decode(stored, seed=jnp.uint32(seed), **array),
        stored,
        SEED,
    )


@thorough
@pytest.mark.parametrize("is_adaptive", [False, True], ids=["rotated", "adaptive"])
def test_rotated_codes(is_adaptive):
    x, options = odd_groups(), OPTIONS | {"is_adaptive": is_adaptive}
    encode = functools.partial(rotated_triton.encode, **options, **RUN)
    define = functools.partial(rotated.encode, **options)
    words, metadata = both(encode, lambda *args: define(*args)[:2], x, SEED)
    stored = rotated.Stored(words, metadata, SEED)
    array = {"shape": x.shape, "dtype": x.dtype} | options
    decode = functools.partial(rotated_triton.decode, **array, **RUN)
    both(decode, functools.partial(rotated.decode, **array), stored)


def test_masks_and_indices():
    x = sample(Affine(2), PADDED)
    above = np.float32(0.5)
    encode = functools.partial(mask_triton.encode, **RUN)
    define = lambda x, above: mask.encode(x, above=above)
    both(encode, define, x, above)
    numbers = jnp.asarray(np.arange(500).reshape(PADDED) % 8, jnp.int32)
    encode = functools.partial(index_triton.encode, bits=3, **RUN)
    words = both(encode, functools.partial(index.encode, bits=3), numbers)
    array = {"shape": PADDED, "dtype": numbers.dtype, "bits": 3}
    decode = functools.partial(index_triton.decode, **array, **RUN)
    both(decode, functools.partial(index.decode, **array), words)


@needs_target
@pytest.mark.parametrize("module", [triton, mosaic_gpu], ids=["triton", "mosaic"])
def test_an_h100_has_them_too(module):
    x = jax.ShapeDtypeStruct((512, 1024), "bfloat16")
    seed = jax.ShapeDtypeStruct((), np.uint32)
    options = {"bits": 2, "group_size": 256, "stochastic": True}
    with jax.enable_x64(True):
        encode = functools.partial(module.encode, **options)
        memory = jaxact.memory(encode, x, seed, target="h100")
    assert memory.output_bytes >= affine.stored_bytes(x.shape, bits=2)


@needs_target
def test_an_h100_normalizes_too():
    x = jax.ShapeDtypeStruct((512, 1024), "bfloat16")
    seed = jax.ShapeDtypeStruct((), np.uint32)
    channel = jax.ShapeDtypeStruct((1024,), "float32")
    norm = Normalization((-1,), is_centered=True)
    operation = affine.Encode(x.shape, np.dtype(x.dtype), 2, normalization=norm)
    with jax.enable_x64(True):
        encode = functools.partial(run, operation)
        memory = jaxact.memory(encode, x, seed, channel, channel, target="h100")
    assert memory.output_bytes >= affine.stored_bytes(x.shape, bits=2)

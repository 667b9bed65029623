"""Encoding normalized values: by the kernel, interpreted, and by the definition.

Factors are powers of two, so that products are exact: XLA:CPU may contract them with
the sums that follow, and equal still means equal bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import affine, choose, rotated
from jaxact_kernels.affine import reference, triton
from jaxact_kernels.config import Config
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization
from jaxact_kernels.rotated import reference as rotated_reference, triton as rotation
from support.subjects import jit_interpreted as jit
from support.variants import thorough

SEED = np.uint32(7)
BY_CHANNEL = Normalization((-1,), is_centered=True)
# A row is one group, has several, or is less than one; channels that no group holds a
# whole number of; groups with padding.
SHAPES = [(8, 256), (2, 768), (3, 8, 64), (3, 8, 96), (5, 300)]


def subject(shape, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    mean = np.round(4 * rng.standard_normal(shape[-1])) / 4
    factor = 2.0 ** rng.integers(-2, 3, shape[-1])
    return x, mean.astype(np.float32), factor.astype(np.float32)


def by_kernel(x, *coefficients, normalization=BY_CHANNEL, bits=2):
    encode = functools.partial(
        triton.encode,
        **{"bits": bits, "group_size": 256, "stochastic": True},
        normalization=normalization,
        config=Config(4, 1),
        interpret=True,
    )
    return jit(lambda x, *c: encode(x, SEED, coefficients=c))(x, *coefficients)


def wanted(values, bits=2):
    """Encoded by the definition from the normalized values, in NumPy's float32."""
    options = {"bits": bits, "group_size": 256, "stochastic": True}
    encode = functools.partial(reference.encode, **options)
    return jit(encode)(jnp.asarray(values, jnp.float32), SEED)


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, tuple(got), tuple(wanted))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_normalizes_by_channel(shape):
    x, mean, factor = subject(shape)
    values = (np.asarray(x, np.float32) - mean) * factor
    assert_equal(by_kernel(x, mean, factor), wanted(values))


def test_the_kernel_normalizes_odd_values_and_values_without_a_mean():
    x, _, factor = subject((6, 64), np.float32)
    x = x.at[0, 3].set(np.nan).at[1, 5].set(np.inf).at[2].set(0)
    norm = Normalization((-1,), is_centered=False)
    values = np.asarray(x) * factor
    got = by_kernel(x, factor, normalization=norm, bits=4)
    assert_equal(got, wanted(values, bits=4))


ALONG = [
    ((2, 4, 8, 64), (-4, -1)),  # an instance norm; a group has whole rows of channels
    ((2, 3, 5, 40), (-4, -1)),  # padded rows of channels
    ((2, 3, 512), (-3, -1)),
    ((3, 4, 4, 512), (-2, -1)),
    ((2, 8, 4, 96), (-4, -2)),  # two axes, neither the last
    ((2, 3, 12, 64), (-4, -3, -2)),  # a norm by head: rows within a group
    ((3, 5, 2, 256), (-4, -3, -2)),  # and rows that are one
    ((2, 3, 2, 512), (-3,)),
    ((2, 4, 3, 8, 4), (-5, -2)),  # a group norm's channels, split
    ((4, 300), (-2,)),
    ((2, 8, 64), ()),
]


@pytest.mark.parametrize("shape, axes", ALONG, ids=str)
def test_the_kernel_normalizes_along_any_axes(shape, axes):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    sizes = [shape[axis] for axis in axes]
    mean = np.asarray(np.round(4 * rng.standard_normal(sizes)) / 4, np.float32)
    factor = np.asarray(2.0 ** rng.integers(-2, 3, sizes), np.float32)
    kept = [n if axis - len(shape) in axes else 1 for axis, n in enumerate(shape)]
    values = (np.asarray(x, np.float32) - mean.reshape(kept)) * factor.reshape(kept)
    got = by_kernel(
        x, mean, factor, normalization=Normalization(axes, is_centered=True)
    )
    assert_equal(got, wanted(values))


@thorough
@pytest.mark.parametrize("is_adaptive", [False, True], ids=["rotated", "adaptive"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_kernel_that_rotates_normalizes_by_channel(shape, is_adaptive):
    x, mean, factor = subject(shape)
    # A constant group, one with values at both ends, one with NaN and infinity.
    x = x.at[0].set(jnp.asarray(mean, x.dtype)).at[1].set(jnp.sign(x[1]))
    x = x.at[-1, ..., 3].set(np.nan).at[-1, ..., 5].set(np.inf)
    options = {"bits": 2, "group_size": 256, "is_adaptive": is_adaptive}
    how = {"normalization": BY_CHANNEL, "interpret": True, "config": Config(4, 1)}
    encode = functools.partial(rotation.encode, **options, **how)
    got = jit(lambda x, *c: encode(x, SEED, coefficients=c))(x, mean, factor)
    values = (np.asarray(x, np.float32) - mean) * factor
    define = functools.partial(rotated_reference.encode, **options)
    assert_equal(got, jit(define)(jnp.asarray(values), SEED))


def operation(shape, axes=(-1,), dtype="bfloat16", **options):
    norm = Normalization(axes, is_centered=True)
    options = {"bits": 2} | options
    return affine.Encode(shape, np.dtype(dtype), **options, normalization=norm)


@pytest.mark.parametrize("axes", [(-1,), (-3,), (-3, -2)], ids=str)
def test_the_definition_normalizes_along_any_axes(axes):
    x, _, _ = subject((3, 8, 64))
    sizes = [x.shape[axis] for axis in axes]
    mean, factor = np.full(sizes, 0.25, np.float32), np.full(sizes, 2, np.float32)
    factor.flat[::2] = 0.5
    kept = [n if axis - 3 in axes else 1 for axis, n in enumerate(x.shape)]
    values = (np.asarray(x, np.float32) - 0.25) * factor.reshape(kept)
    got = run(operation(x.shape, axes), x, jnp.uint32(SEED), mean, factor)
    assert_equal(got, wanted(values))


def test_mapped_arrays_have_their_own_coefficients():
    x, mean, factor = subject((4, 3, 8, 64))
    means, factors = mean + np.arange(4)[:, None], factor * [[1], [2], [4], [0.5]]
    coefficients = means.astype(np.float32), factors.astype(np.float32)
    encode = functools.partial(run, operation((3, 8, 64)))
    seed = jnp.uint32(SEED)
    got = jax.vmap(encode, in_axes=(0, None, 0, 0))(x, seed, *coefficients)
    alone = [encode(x[i], seed, *(c[i] for c in coefficients)) for i in range(4)]
    assert_equal(got, jax.tree.map(lambda *parts: jnp.stack(parts), *alone))


def test_float64_runs_the_definition():
    choice = choose(operation((8, 256), dtype="float64"), "h100")
    assert choice.implementation == "reference"
    assert "float32, bfloat16 and float16" in dict(choice.declined)["triton"]


def test_a_gpu_runs_the_kernel():
    by_channel = operation((8, 4, 256))
    assert choose(by_channel, "h100").implementation == "triton"
    by_row = operation(by_channel.shape, (-3, -2))
    assert choose(by_row, "h100").implementation == "triton"
    rotating = rotated.Encode(
        *(by_channel.shape, by_channel.dtype, 2),
        normalization=by_channel.normalization,
    )
    assert choose(rotating, "h100").implementation == "triton"
    with pytest.raises(NotImplementedError, match="the kernel does no normalization"):
        choose(by_channel, "h100", "mosaic_gpu")

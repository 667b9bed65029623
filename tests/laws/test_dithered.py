"""Subtractive dither: noise of mean zero and variance scale^2 / 12, whatever the value.

Contract: x' = z + s (code - d + 1/2), with code = floor(t + noise), t = (x - z) / s in
units of 2**-16 and d the noise cut to 15 - bits bits. Over all noise the mean is exact;
the variance is s**2 / 12 up to a factor 1 +- 3 * 4**(bits - 15). Bounds fail with
probability at most 1e-9 for ideal noise; the seeds are fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

import jaxact
from jaxact_kernels.affine import group, reference
from support import oracle
from support.subjects import Dithered
from support.variants import thorough

pytestmark = thorough

FAILURE = 1e-9
DRAWS = 512
SHAPE = (4, 256)
WIDTHS = (1, 2, 3, 4, 8)
every_width = pytest.mark.parametrize("bits", WIDTHS)


@every_width
@pytest.mark.parametrize("fraction", [0, 1, 255, 21845, 32768, 65535])
def test_the_mean_over_all_noise_is_exact(bits, fraction):
    noise16 = jnp.arange(65536, dtype=jnp.uint32)
    fixed = (2**bits - 2) * 65536 + fraction
    code = reference.round_fixed_point(jnp.full(65536, fixed, jnp.uint32), noise16)
    value = np.asarray(group.dithered(code, noise16, bits), np.float64)
    assert value.sum() == fixed  # every term is a multiple of 2**-15: no rounding
    error = value - fixed / 65536
    assert abs(error).max() <= 0.5 * (1 + 2.0 ** (bits - 15))
    assert abs(12 * (error**2).mean() - 1) <= 3 * 4.0 ** (bits - 15) + 2.0**-30


@functools.cache
def errors(bits):
    """Decoded less encoded values in scales, `[DRAWS, *SHAPE]`."""
    rng = np.random.default_rng(bits)
    x = rng.standard_normal(SHAPE).astype(np.float32)
    x[1] *= 1e-3
    x[2] = np.sign(x[2])  # two values
    x[3] = np.maximum(x[3], 0)  # zeros, at the minimum
    subject = Dithered(bits)

    @jax.jit
    def run(x, seeds):
        decode = lambda seed: subject.decode(subject.encode(x, seed), SHAPE)
        return lax.map(decode, seeds), subject.encode(x, seeds[0])

    back, stored = run(jnp.asarray(x), jnp.arange(DRAWS, dtype=jnp.uint32))
    scale = (np.asarray(stored.metadata) << 16).astype(np.uint32).view(np.float32)
    return (np.asarray(back, np.float64) - x) / scale.astype(np.float64)


@every_width
def test_the_mean_of_draws_misses_by_noise_alone(bits):
    # The mean of 512 uniform errors is normal with variance 1 / (12 * 512); float32
    # adds at most 2**-15 of a scale at 8 bits.
    z = errors(bits).mean(0).ravel() * np.sqrt(12 * DRAWS)
    assert FAILURE < stats.chi2.sf((z**2).sum(), z.size) < 1 - FAILURE
    assert abs(z.sum()) / np.sqrt(z.size) < stats.norm.isf(FAILURE / 2)


@every_width
def test_the_error_is_uniform_whatever_the_value(bits):
    # 1000 draws of one kind of value at a time; ties of the 15 - bits bits of noise
    # move the statistic by at most 2**(bits - 15).
    found = errors(bits)
    for kind in range(SHAPE[0]):
        sample = found[:, kind].ravel()[:: 131072 // 1000]
        statistic = stats.kstest(sample, stats.uniform(-0.5, 1).cdf).statistic
        limit = np.sqrt(np.log(2 / FAILURE) / (2 * sample.size))  # Massart's bound
        assert statistic < limit + 2.0 ** (bits - 15)


@every_width
def test_variance_is_a_twelfth(bits):
    # (error / s)**2 has mean 1 / 12 and variance 1 / 80 - 1 / 144 = 1 / 180.
    squared = errors(bits) ** 2
    spread = np.sqrt(squared.size / 180)
    excess = (squared - 1 / 12).sum()
    allowed = stats.norm.isf(FAILURE / 2) * spread
    allowed += squared.size / 12 * 3 * 4.0 ** (bits - 15)
    assert abs(excess) < allowed


@pytest.mark.parametrize("bits", [2, 4])
def test_noise_of_a_weight_gradient(bits):
    """gw = x^T g is linear in x: E[error_ij^2] = sum_b g_bj^2 s_b^2 / 12.

    The mean of 2048 draws over 32 * 8 elements: within 5 %.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((32, 8)), jnp.float32)
    g = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    policy = jaxact.Policy(default=jaxact.Dithered(bits))
    layer = jaxact.compress(lambda w, x: x @ w, policy=policy, activations="x")

    @jax.jit
    def draws(keys):
        pull = lambda key: jax.vjp(lambda w: layer(w, x, rounding_key=key), w)[1](g)[0]
        return lax.map(pull, keys)

    found = np.asarray(draws(jax.random.split(jax.random.key(1), 2048)), np.float64)
    exact = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    stored = oracle.encode(np.asarray(x), 0, bits=bits, group_size=256)
    s = np.array([float(oracle._from_pattern(u)) for u in stored.scale.ravel()])
    wanted = (s**2 / 12) @ np.asarray(g, np.float64) ** 2
    measured = ((found - exact) ** 2).mean(0)
    assert abs(measured.sum() / (32 * wanted.sum()) - 1) < 0.05

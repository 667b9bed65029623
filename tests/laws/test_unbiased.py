"""Decoding returns the stored value on average, with the stated variance.

Contract: a code is one of the two integers around the exact one, the upper with
probability equal to the fraction f of (x - z) / s cut to 16 bits. Then E[x'] is x
within 2**-17 s and the variance is s**2 f (1 - f). Bounds fail with probability at most
1e-9 for ideal noise; the seeds are fixed, so a passing test stays passed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from jaxact_kernels.affine import reference
from support.subjects import Affine, Planes, jitted

pytestmark = pytest.mark.unoptimized

FAILURE = 1e-9
DRAWS = 512
SHAPE = (4, 256)
every_width = pytest.mark.parametrize(
    "subject", [*map(Affine, range(1, 9)), Planes(2.5)], ids=str
)


@pytest.mark.parametrize("fraction", [0, 1, 2, 255, 21845, 32768, 65534, 65535])
@pytest.mark.parametrize("code", [0, 1, 254])
def test_rounds_up_exactly_as_often_as_the_fraction(fraction, code):
    noise16 = jnp.arange(65536, dtype=jnp.uint32)
    fixed = jnp.full(65536, code * 65536 + fraction, jnp.uint32)
    rounded = np.asarray(reference.round_fixed_point(fixed, noise16))
    assert set(rounded) <= {code, code + 1}
    assert (rounded == code + 1).sum() == fraction


@functools.cache
def draws(subject):
    """Decoded draws in codes `[DRAWS, *SHAPE]`, exact codes, scale, and last code."""
    rng = np.random.default_rng(int(subject.bits))
    x = rng.standard_normal(SHAPE).astype(np.float32)
    x[1] *= 1e-3
    x[2] += 10
    x[3] = np.maximum(x[3], 0)

    @jax.jit
    def run(x, seeds):
        decode = lambda seed: subject.decode(subject.encode(x, seed), SHAPE)
        return lax.map(decode, seeds), subject.encode(x, seeds[0])

    back, stored = run(jnp.asarray(x), jnp.arange(DRAWS, dtype=jnp.uint32))
    z, s = (
        (np.asarray(u).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        for u in (stored.metadata >> 16, stored.metadata)
    )
    exact = (x - z) / s
    codes = (np.asarray(back, np.float64) - z) / s
    bits = getattr(stored, "bits", np.full(SHAPE[:1], subject.bits))
    last = 2.0 ** np.asarray(bits, np.float64)[:, None] - 1
    return codes, exact, np.broadcast_to(s, SHAPE), last


@every_width
def test_only_the_two_neighbours_occur(subject):
    codes, exact, scale, last = draws(subject)
    ulp = 2.0**-23 * 16 / scale  # of decoding to float32, |x| < 16
    assert (abs(codes - np.round(codes)) <= ulp).all()
    codes = np.round(codes)
    assert (codes >= np.floor(exact - 1e-4)).all()
    assert (codes <= np.ceil(exact + 1e-4)).all()
    assert codes.min() == 0 and (codes - last).max() == 0


@every_width
def test_the_mean_of_draws_misses_by_noise_alone(subject):
    # Ups of one element are Binomial(DRAWS, f); their squared z-scores sum to about
    # chi-square. Fractions within 0.05 of a code are left out, so that the normal
    # approximation holds (25 expected ups); 2**-17 of bias moves z by 0.0005.
    codes, exact, *_ = draws(subject)
    fraction = exact - np.floor(exact)
    far = (fraction > 0.05) & (fraction < 0.95)
    spread = np.sqrt(fraction * (1 - fraction) / DRAWS)
    z = ((codes.mean(0) - exact) / np.where(far, spread, 1))[far]
    assert FAILURE < stats.chi2.sf((z**2).sum(), far.sum()) < 1 - FAILURE
    assert abs(z.sum()) / np.sqrt(far.sum()) < stats.norm.isf(FAILURE / 2)


@every_width
def test_variance_is_f_times_one_minus_f(subject):
    # The mean over N = DRAWS * 1024 elements of (code - exact)**2 - f(1 - f). One term
    # has mean 0 and variance f(1-f)(1-2f)**2 <= 1/16.
    codes, exact, *_ = draws(subject)
    fraction = exact - np.floor(exact)
    error = (codes - exact) ** 2 - fraction * (1 - fraction)
    spread = np.sqrt(
        (fraction * (1 - fraction) * (1 - 2 * fraction) ** 2).sum() * DRAWS
    )
    assert abs(error.sum()) / spread < stats.norm.isf(FAILURE / 2)


@every_width
def test_what_sits_on_a_code_has_no_variance(subject):
    codes, exact, *_ = draws(subject)
    at_zero = codes[:, exact == 0]
    assert at_zero.size and (at_zero == 0).all()


def test_nearest_is_within_half_a_scale_and_needs_no_seed():
    subject = Affine(3, stochastic=False)
    x = jnp.linspace(0, 1, 256)
    encode, decode = jitted(subject, x.shape)
    first, second = (encode(x, np.uint32(seed)) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    error = abs(decode(first) - x)
    assert float(error.max()) <= (1 / 7) * (1 + 2**-7) * 0.5001

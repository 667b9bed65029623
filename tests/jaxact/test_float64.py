"""Quantized float64: the noise follows a group's width, whatever its magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Policy, Quantize

pytestmark = pytest.mark.unoptimized

BITS, ROWS, LENGTH, GROUPS = 4, 8, 500, 2
HALF = 256  # elements of a group but the last: 500 in two groups of 256
MOST = np.finfo(np.float64).max


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def normal(rows=ROWS):
    return np.random.default_rng(0).standard_normal((rows, LENGTH))


def round_trip(x, bits=BITS, seed=0):
    codec = Quantize(bits)
    stored = jax.jit(codec.encode)(jnp.asarray(x), jnp.uint32(seed))
    decode = jax.jit(lambda stored: codec.decode(stored, x.shape, x.dtype))
    return np.asarray(decode(stored)), stored


def steps(x, bits=BITS):
    """A step of each element's group, which a bfloat16 scale makes 1/128 wider."""
    parts = [x[:, :HALF], x[:, HALF:]]
    widths = [np.broadcast_to(np.ptp(p, -1, keepdims=True), p.shape) for p in parts]
    return np.concatenate(widths, -1) * (1 + 1 / 128) / (2**bits - 1)


SCALES = [1.0, 1e100, 1e-40, 1e-100, 1e-300, 1e300]


@pytest.mark.parametrize("offset", [0.0, 1e9])
@pytest.mark.parametrize("scale", SCALES)
def test_elements_come_back_within_a_step(scale, offset):
    x = (normal() + offset) * scale if offset * scale < 1e300 else normal() * scale
    back, _ = round_trip(x)
    # A float64 rounding of the offset, and the remainder's as float32.
    slack = 4 * np.spacing(np.abs(x)) + 2.0**-20 * steps(x)
    assert (np.abs(back - x) <= steps(x) + slack).all()


@pytest.mark.parametrize("scale", SCALES)
def test_the_mean_is_the_element(scale):
    x = normal(2) * scale
    codec = Quantize(BITS)
    draw = lambda seed: codec.decode(codec.encode(x, seed), x.shape, x.dtype)
    x, count = jnp.asarray(x), 1024
    mean = np.asarray(jax.vmap(draw)(jnp.arange(count, dtype=jnp.uint32)) / count).sum(
        0
    )
    # Bounded by a step, so Hoeffding: past 5.3 steps / sqrt(2 count) with probability
    # 2 exp(-2 * 5.3**2 / 2) < 2e-12 for each of 1000 elements.
    assert (np.abs(mean - x) <= 5.3 * steps(np.asarray(x)) / (2 * count) ** 0.5).all()


@pytest.mark.parametrize("value", [1 / 3, -1e200, 3e-200, MOST, -MOST, 0.0])
def test_constants_and_least_elements_are_exact(value):
    constant = np.full((2, LENGTH), value)
    np.testing.assert_array_equal(round_trip(constant)[0], constant)
    x = normal()
    for part in (slice(0, HALF), slice(HALF, None)):
        least = np.argmin(x[:, part], -1)[:, None]
        back = round_trip(x)[0]
        got = np.take_along_axis(back[:, part], least, -1)
        np.testing.assert_array_equal(got, np.take_along_axis(x[:, part], least, -1))


def test_infinities_and_nans_as_in_other_dtypes():
    x = normal() * 1e100
    x[0, 3], x[1, 5], x[2, 7], x[3, :] = np.inf, -np.inf, np.nan, np.inf
    back, _ = round_trip(x)
    finite = np.where(np.isfinite(x), x, np.nan)
    assert np.isclose(back[0, 3], np.nanmax(finite[0, :HALF]), rtol=0.02)
    assert back[1, 5] == np.nanmin(finite[1, :HALF])
    assert np.isnan(back[2, :HALF]).all() and np.isfinite(back[2, HALF:]).all()
    single = float(np.finfo(np.float32).max)
    assert (np.abs(back[3] - single) <= 0.01 * single).all()


def test_a_span_of_every_float64_does_not_overflow():
    x = np.linspace(-1, 1, ROWS * LENGTH).reshape(ROWS, LENGTH) * MOST
    x[:, :2] = MOST, -MOST
    back, _ = round_trip(x)
    assert np.isfinite(back).all()
    assert (np.abs(back / 4 - x / 4) <= 2 * (MOST / 2) / (2**BITS - 1)).all()


def test_tables_count_anchors_and_units():
    x = jnp.asarray(normal())
    row = jaxact.residuals(jnp.tanh, x, policy=Policy(BITS)).rows[0]
    words = ROWS * 512 * BITS // 8
    assert row.stored_bytes == words + ROWS * GROUPS * (4 + 16)


@pytest.mark.parametrize(
    "f, scale, offset",
    [
        (lambda w, x: (w * x / 1e100).sum(), 1e100, 0.0),
        (lambda w, x: (w * x * 1e40).sum(), 1e-40, 0.0),
        (lambda w, x: (w * x * 1e100).sum(), 1e-100, 0.0),
        (lambda w, x: (w * ((x - 1) * 1e9)).sum(), 1e-9, 1.0),
    ],
)
def test_gradients(f, scale, offset):
    x = jnp.asarray(offset + scale * normal())
    w = jnp.ones(())
    small = jaxact.compress(f, policy=Policy(8), activations="x")
    v = jnp.asarray(normal())
    gradient = lambda f: jax.grad(lambda w: f(w * v, x))(w)
    exact = gradient(f)
    # 4000 errors of at most a step, 7 / 255 of a deviation, that multiply v: 6 standard
    # deviations of their sum are 6 * sqrt(4000) * 0.5 * 7 / 255 = 5.2, of about 4000.
    assert exact > 3000
    assert 0 < abs(gradient(small) - exact) < 5.3


@pytest.mark.parametrize(
    "codec", [jaxact.PerSample(8), jaxact.DualPrecision(8)], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 1e100])
@pytest.mark.filterwarnings("ignore:jaxact. nothing was compressed")
def test_a_codec_in_float32_leaves_float64_exact(codec, scale):
    """Its arithmetic would overflow, or lose digits, under the label 'unbiased'."""
    x = jnp.asarray(normal().reshape(ROWS, 20, 25) * scale)
    w = jnp.ones((1, 1, 25))
    policy = Policy(default=codec)
    f = lambda w, x: jnp.sin(x / scale * w)
    small = jaxact.compress(f, policy=policy, activations="x")
    gradient = lambda f: jax.grad(lambda w: f(w, x).sum())(w)
    # Products in another order: some of 2**-53 in sums of 160 terms that cancel.
    np.testing.assert_allclose(gradient(small), gradient(f), rtol=1e-12)
    table = jaxact.residuals(small, w, x)
    reasons = [row.why for row in table.rows]
    assert any("Quantize stores float64" in why for why in reasons)

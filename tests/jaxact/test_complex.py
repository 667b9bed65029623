"""Complex residuals are packed, part by part, where backward multiplies by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact import Adaptive, Bias, Dithered, Exact, Offload, Policy, Quantize, Rotated
from jaxact._codec.parts import Parts, for_complex
from support.programs import gradient_error, relative_error

pytestmark = pytest.mark.unoptimized

T, D = 64, 32
X = jax.random.normal(jax.random.key(0), (4, T, D))
W = jax.random.normal(jax.random.key(1), (D, D)) / 6
KERNEL = (
    jax.random.normal(jax.random.key(2), (1, T, D))
    * jnp.exp(-jnp.linspace(0, 7, T))[None, :, None]
)
rfft, irfft = jnp.fft.rfft, jnp.fft.irfft
# A code errs by half a step at most, a step is the range over 255, and the range of a
# group of 256 normal numbers is 6 to 8 deviations: 1.6 % of a factor; twice that where
# both factors of a product are rounded.
CLOSE = 0.032


@pytest.fixture(autouse=True)
def real_and_complex_operands():
    with jax.numpy_dtype_promotion("standard"):
        yield


def turned(x):
    return lax.complex(x, jnp.roll(x, 1, 1))


def long_convolution(w, x):
    """Hyena (Poli et al. 2023): transforms of twice the length."""
    spectrum = rfft(x @ w, n=2 * T, axis=1) * rfft(KERNEL, n=2 * T, axis=1)
    return irfft(spectrum, n=2 * T, axis=1)[:, :T] @ w


def modes(w, x):
    """A Fourier neural operator (Li et al. 2021): few modes, weights for each."""
    kept = rfft(x, axis=1)[:, :16] @ (w + 1j * w.T)
    return jax.nn.gelu(irfft(kept, n=T, axis=1) + x @ w)


def recurrence(w, x):
    """A linear recurrent unit (Orvieto et al. 2023)."""
    rate = jnp.exp(-0.2 + 1j * jnp.linspace(0, 3, D))[None]
    step = lambda h, u: (rate * h + u,) * 2
    inputs = jnp.swapaxes(x @ (w + 1j * w.T), 0, 1)
    states = lax.scan(step, jnp.zeros_like(inputs[0]), inputs)[1]
    return jax.nn.gelu((states @ (w - 1j * w.T)).real) @ w


LINEAR = [long_convolution, modes, recurrence]


@pytest.mark.parametrize("f", LINEAR, ids=lambda f: f.__name__)
def test_products_read_packed_parts(f):
    table = jaxact.residuals(jaxact.compress(f, activations="x"), W, X)
    own = [r for r in table.rows if r.dtype == np.complex64 and r.exact_bytes > 2**13]
    large = [r for r in own if r.why != "made of parameters or constants alone"]
    assert large and all(r.action == Parts(Quantize(4)) for r in large)
    # 4 bits of 32, a scale and a zero point in 32 bits for 32 numbers or more, and rows
    # of 65 codes in 9 words.
    assert all(r.stored_bytes < r.exact_bytes / 6 for r in large)
    assert gradient_error(f, W, X, policy=Policy(bits=8), argnums=(0, 1)) < CLOSE


def phase_correlation(w, x):
    a = rfft(x @ w).conj() * rfft(x)
    return irfft(a / (jnp.abs(a) + 1e-3), n=D)


POLES = {
    "a phase": lambda w, x: (turned(x @ w) / (jnp.abs(turned(x @ w)) + 1e-6)).real,
    "phase correlation": phase_correlation,
    "log magnitude": lambda w, x: jnp.log(jnp.abs(rfft(x @ w)) + 1e-3),
    "log power": lambda w, x: jnp.log(jnp.abs(rfft(x @ w)) ** 2 + 1e-4),
    "quotient": lambda w, x: (turned(x @ w) / (turned(x) + 2.5)).imag,
    "logarithm": lambda w, x: jnp.log(turned(x @ w) + 0.1).imag,
}


@pytest.mark.parametrize("f", POLES.values(), ids=POLES)
def test_near_a_pole_numbers_stay_exact(f):
    """Rounded, the phases had 0.8 and the correlation 100 gradients of noise."""
    assert gradient_error(f, W, X, policy=Policy(bits=8), argnums=(0, 1)) < CLOSE


def test_numbers_that_a_checkpoint_bends_stay_exact():
    def f(w, x):
        wave = jax.checkpoint(lambda z: jnp.exp(1j * z * z) @ w)
        return wave(turned(x @ w) * 0.3).real

    table = jaxact.residuals(jaxact.compress(f, activations="x"), W, X)
    (row,) = (r for r in table.rows if r.dtype == np.complex64)
    assert row.action == Exact() and row.why == "complex64 stays exact"


@pytest.mark.parametrize("codec", [Quantize(2), Dithered(2), Rotated(2), Adaptive(2)])
def test_the_mean_over_draws_is_the_number(codec):
    codec, z = Parts(codec), turned(X)[0]
    decoded = lambda seed: codec.decode(codec.encode(z, seed), z.shape, z.dtype)
    count = 256
    mean = jnp.mean(jax.vmap(decoded)(jnp.arange(count, dtype=jnp.uint32)), 0)
    one = relative_error(parts(decoded(jnp.uint32(7))), parts(z))
    # Independent errors fall by 16; 1.2 for the error of one draw. A rotation's bias
    # is below 5e-4 of the variance: 2 % of the deviation.
    limit = 1.2 / count**0.5 + (0.03 if codec.bias is Bias.OVER_ROTATIONS else 0)
    assert relative_error(parts(mean), parts(z)) < limit * one


def parts(z):
    return jnp.stack([z.real, z.imag])


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 300)])
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.complex128])
def test_any_shape_and_width_comes_back(shape, dtype):
    with jax.enable_x64(dtype == jnp.complex128):
        codec = Parts(Quantize(8))
        rng = np.random.default_rng(0)
        z = jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype)
        found = codec.decode(codec.encode(z, jnp.uint32(0)), shape, dtype)
        assert found.dtype == dtype and found.shape == shape
        assert jnp.all(jnp.abs(found - z) < 0.08)  # the root of two, 8 / 255 each


def test_rules_and_codecs_around_others_are_for_both_parts():
    rule = jaxact.Rule(Offload(Quantize(2)), dtype=jnp.complex64)
    policy = Policy(rules=(rule,))
    table = jaxact.residuals(long_convolution, W, X, policy=policy)
    actions = {r.action for r in table.rows if r.dtype == np.complex64}
    assert for_complex(rule.action) in actions


def test_an_allocation_counts_both_parts():
    loss = lambda w, x: (jaxact.compress(recurrence, activations="x")(w, x) ** 2).sum()
    measured = jaxact.sensitivity(loss, W, X)
    rows = {r.key: r for r in measured.rows}
    states = [r for key, r in rows.items() if "scan" in key]
    assert states and all(r.size == 2 * X.size and r.itemsize == 4 for r in states)
    policy = jaxact.allocate(measured, bits=3).policy()
    with jaxact.using(policy):
        table = jaxact.residuals(loss, W, X)
    actions = {r.action for r in table.rows if r.key in {s.key for s in states}}
    assert actions and all(isinstance(action, Parts) for action in actions)

"""Samples: values that random numbers are multiplied into."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

T, D = 512, 64
MATRIX = jax.random.normal(jax.random.key(2), (D, D)) * 3 / 8
X = jax.random.normal(jax.random.key(5), (T, D))


def with_noise(body):
    """A sample's value: of a mean and a deviation in one row, from `noise` times it."""

    def f(w, x, *keys):
        mean, deviation = jnp.split(x @ w, 2, axis=-1)
        noise = jax.random.normal(*keys or [jax.random.key(3)], mean.shape)
        return body(mean, jnp.exp(deviation) * noise)

    return f


# exp(deviation) spans e^20: multiplied with a rounded slope, which it vanishes with, it
# had noise of 0.3 to 17 gradients.
SAMPLES = {
    "squashed": with_noise(lambda mean, noise: jnp.tanh(mean + noise)),
    "its density": with_noise(
        lambda mean, noise: jnp.log(1 - jnp.tanh(mean + noise) ** 2 + 1e-6)
    ),
    "both": with_noise(
        lambda mean, noise: jnp.log(1 - (a := jnp.tanh(mean + noise)) ** 2 + 1e-6) + a
    ),
    "far from a pole": with_noise(
        lambda mean, noise: jnp.log(1.1 - jnp.tanh(mean + noise) ** 2)
    ),
}


@pytest.mark.parametrize("is_data", [False, True], ids=["own key", "key as data"])
@pytest.mark.parametrize("f", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_times_its_deviation_is_one_derivative(f, is_data):
    args = (MATRIX, X, *([jax.random.key(3)] if is_data else []))
    assert gradient_error(f, *args, policy=Policy(bits=8), argnums=(0, 1)) < 0.032
    small = jaxact.compress(f, policy=Policy(bits=8), activations=range(1, len(args)))
    # The input and two derivatives; neither what they are made from, nor random bits.
    table = jaxact.residuals(small, *args)
    assert table.stored_bytes < 1.1 * (X.size + 2 * X.size // 2)


@pytest.mark.thorough
def test_a_factor_from_exact_values_is_rounded_in_its_product():
    """h stays exact for a pole only if the backward pass reads it: 290 kB, now 28."""

    def f(w, x, key):
        h = jnp.tanh(x @ w)
        return jnp.sqrt(jnp.abs(h * jax.random.normal(key, h.shape)) + 1e-6)

    args = MATRIX, X, jax.random.key(3)
    small = jaxact.compress(f, policy=Policy(bits=8), activations=(1, 2))
    assert jaxact.residuals(small, *args).stored_bytes < 2.2 * X.size
    assert gradient_error(f, *args, policy=Policy(bits=8), argnums=(0, 1)) < 0.032


def test_a_sample_whose_noise_is_an_argument():
    """Slopes of the density come from the sample alone (soft actor-critic).

    1 - tanh(u)^2, packed beside its exact reciprocal, erred by 0.8 gradients at 8 bits.
    """

    def f(w, x, noise):
        mean, deviation = jnp.split(x @ w, 2, axis=-1)
        action = jnp.tanh(mean + jnp.exp(deviation) * noise)
        return action - jnp.log(1 - action**2 + 1e-6)

    noise = jax.random.normal(jax.random.key(7), (T, D // 2))
    assert gradient_error(f, MATRIX, X, noise, policy=Policy(bits=8)) < 0.05
    small = jaxact.compress(f, policy=Policy(bits=8), activations=(1, 2))
    rows = jaxact.residuals(small, MATRIX, X, noise).rows
    assert "tanh.derivative" not in [r.key for r in rows]


@pytest.mark.parametrize(
    "key", [(), (jax.random.key(3),), (jax.random.PRNGKey(3),)], ids=["", "new", "raw"]
)
def test_a_soft_actor_critics_loss(key):
    """Its slopes are made from the mean's and the deviation's sources together.

    1 - tanh(u)^2 is near a pole for its logarithm, and u for the density's: rounded
    beside one that is exact, they erred by 300 gradients at 8 bits; by 180 with the
    numbers drawn from a key that is given.
    """

    def f(p, x, *given):
        (key,) = given or (jax.random.key(3),)
        hidden = jax.nn.relu(x @ p["hidden"])
        mean = hidden @ p["mean"]
        log_std = -5 + 3.5 * (jnp.tanh(hidden @ p["deviation"]) + 1)
        sample = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        action = jnp.tanh(sample)
        density = -0.5 * ((sample - mean) / jnp.exp(log_std)) ** 2 - log_std
        density = (density - jnp.log(1 - action**2 + 1e-6)).sum(-1)
        return (0.2 * density - action.sum(-1)).mean()

    shapes = {"hidden": (D, 128), "mean": (128, 32), "deviation": (128, 32)}
    params = {
        name: jax.random.normal(jax.random.key(n), shape) * 2 / shape[0] ** 0.5
        for n, (name, shape) in enumerate(shapes.items())
    }
    # Exact slopes leave the noise of inputs, half of a 255th of a range of 8.
    error = gradient_error(f, params, X, *key, policy=Policy(8), argnums=(0, 1))
    assert error < 4 / 255


@pytest.mark.thorough
def test_a_sample_from_parts_of_a_larger_output():
    """The parts are exact, where all of the output would be more than twice as large.

    With the sample exact in their place, the deviation's slope held tanh's own, which
    ended beside the logarithm's pole.
    """

    def f(w, x):
        hidden = x @ w
        mean, log_std = hidden[:, :16], jnp.clip(hidden[:, 16:32], -20, 2)
        noise = jax.random.normal(jax.random.key(3), mean.shape)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        return jnp.log(1 - action**2 + 1e-6).sum(-1) - action.sum(-1)

    w = MATRIX[:, :48] / 2
    assert gradient_error(f, w, X[:128], policy=Policy(8)) < 0.02

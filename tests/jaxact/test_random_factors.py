"""Functions with a pole, times random numbers that the program draws.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxact import Policy
from support.programs import gradient_error

pytestmark = [
    pytest.mark.unoptimized,
    # Where the scores, an input, stay exact nothing else is left to compress.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

KEYS = jax.random.split(jax.random.key(0), 6)
SHAPE = (32, 64)
SCORES = 4 * jax.random.normal(KEYS[0], SHAPE)
DRAWN = jax.random.uniform(KEYS[1], SHAPE)
DRAWS = {
    "inside": lambda key, x: x * jax.random.uniform(KEYS[1], SHAPE),
    "by a key": lambda key, x: x * jax.random.uniform(key, SHAPE),
    "normal": lambda key, x: x * jax.random.normal(key, SHAPE),
    "given": lambda key, x: x * DRAWN,
}


@pytest.mark.parametrize("times", DRAWS.values(), ids=DRAWS)
def test_a_logarithm_times_random_numbers(times):
    """Slopes of one over a probability, in groups with small ones: 2 to 4e4."""

    def f(scores, key):
        return times(key, jnp.log(jax.nn.softmax(scores) + 1e-9))

    assert gradient_error(f, SCORES, KEYS[1], policy=Policy(bits=8)) < 0.02


def gamma(x):
    return jax.random.gamma(KEYS[1], jax.nn.softplus(x) + 1)


WITH_GAMMA = {
    "student t": lambda x: jax.random.t(KEYS[1], jax.nn.softplus(x) + 2),
    "heavy tails": lambda x: jax.random.t(KEYS[1], jax.nn.softplus(x) + 0.5),
    "inverse": lambda x: 1 / gamma(x),
    "logarithm": lambda x: jnp.log(gamma(x)),
    "ratio": lambda x: (jax.nn.softplus(x) + 1) / gamma(x),
}


@pytest.mark.parametrize("f", WITH_GAMMA.values(), ids=WITH_GAMMA)
def test_a_pole_in_a_gamma_sample(f):
    """Rounded, samples near 0 made errors of 0.13 to 13 gradients, slopes of 0.4."""
    assert gradient_error(f, SCORES / 4, policy=Policy(bits=8)) < 0.02


@pytest.mark.thorough
def test_the_slopes_of_small_gamma_samples():
    """Shares of a Dirichlet, from shapes near 0: rounded slopes made 7 gradients."""

    def shares(x):
        return jax.random.dirichlet(KEYS[1], jax.nn.softplus(x))

    assert gradient_error(shares, SCORES[:8] / 4, policy=Policy(bits=8)) < 0.02

"""Sums over windows that something is divided by, or whose root is taken.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it, also where a
ReLU leaves windows of zeros beside others.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxact
from jaxact import Exact, Policy
from support.programs import gradient_error
from support.variants import mostly_thorough

pytestmark = [
    pytest.mark.unoptimized,
    # Only the input is left to round in some.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

X = jax.random.normal(jax.random.key(0), (8, 8, 8, 16))
W = jax.random.normal(jax.random.key(1), (16, 32)) / 4
# Some channels are zero on some images, as in trained networks.
BIAS = jnp.linspace(-1.5, 0.5, 32)[None, None, None]
# Of groups whose values do not lie in one window, see test_fidelity.py.
MOST = 0.02


def mean(x, size=2, stride=2, padding="VALID"):
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, 0.0, lax.add, window, strides, padding) / size**2


def around(x):
    return mean(x, 3, 1, "SAME")


def weighted(x):
    """Channels by themselves, as SSIM's windows by a normal distribution are summed."""
    kernel = jnp.ones((3, 3, 1, x.shape[-1])) / 9
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def local_contrast(x, around=around):
    x = x - around(x)
    return x / jnp.sqrt(around(x * x) + 1e-4)


def response_norm(x, bias):
    squares = lax.reduce_window(x * x, 0.0, lax.add, (1, 1, 1, 5), (1, 1, 1, 1), "SAME")
    return x / (bias + squares) ** 0.75


def similarity(x, size=7):
    """SSIM (Wang et al. 2004) of an image and its sine."""
    y = jnp.sin(x)
    a, b = (mean(v, size, 1) for v in (x, y))
    aa, bb, ab = (mean(v, size, 1) for v in (x * x, y * y, x * y))
    covariance = (2 * a * b + 1e-4) * (2 * (ab - a * b) + 9e-4)
    return covariance / ((a * a + b * b + 1e-4) * (aa + bb - a * a - b * b + 9e-4))


# One draw's errors were 0.1 to 50 gradients, also in the mean of many.
LAYERS = {
    "generalized mean": lambda x: mean(jnp.maximum(x, 1e-6) ** 3) ** (1 / 3),
    "local contrast": local_contrast,
    "local contrast by weights": functools.partial(local_contrast, around=weighted),
    "normalized average": lambda x: x / (around(jax.nn.sigmoid(4 * x - 6)) + 1e-3),
    "logarithm of exponentials": lambda x: jnp.log(mean(jnp.exp(4 * x))),
    "soft pooling": lambda x: mean((e := jnp.exp(3 * x)) * x) / mean(e),
    "length": lambda x: jnp.sqrt(mean(x * x) + 1e-6),
    "cubes": lambda x: jnp.cbrt(mean(x**3) + 1e-6),
    "response norm": lambda x: response_norm(x, 1e-3),
    "similarity": similarity,
}


@pytest.mark.parametrize("name", mostly_thorough(LAYERS, ["local contrast", "cubes"]))
def test_windows_near_a_pole(name):
    f = lambda x, w: jnp.sin(LAYERS[name](jax.nn.relu(x @ w + BIAS)))
    assert gradient_error(f, X, W, policy=Policy(8), argnums=(0, 1)) < MOST


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("pool", ["windows", "whole"])
def test_a_learned_power(pool, is_named):
    """Generalized-mean pooling (Radenovic et al. 2018): 0.3 to 0.9 gradients before."""
    total = mean if pool == "windows" else lambda x: x.mean((1, 2))

    def f(p, x):
        h = jnp.maximum(jax.nn.relu(x @ p["w"] + BIAS), 1e-6)
        return jnp.sin(total(h ** p["power"]) ** (1 / p["power"])).sum()

    options = {"activations": "x"} if is_named else {}
    small = jaxact.compress(f, policy=Policy(8), **options)
    p = {"w": W, "power": jnp.array(3.0)}
    got, want = jax.grad(small)(p, X), jax.grad(f)(p, X)
    for name in p:
        error = jnp.linalg.norm(got[name] - want[name])
        assert error < MOST * jnp.linalg.norm(want[name]), name


def test_a_sum_that_a_bound_keeps_off_keeps_its_format():
    """AlexNet's response norm adds 2."""

    def f(w, x):
        return response_norm(x @ w, 2.0)

    small = jaxact.compress(f, activations="x")
    found = jaxact.residuals(small, W, X, argnums=None).rows
    exact = [row.shape for row in found if isinstance(row.action, Exact)]
    assert not exact

"""Special functions whose slopes have poles, of a network's outputs."""

import jax
import jax.numpy as jnp
import pytest
from jax.scipy import special

from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

X = jax.random.normal(jax.random.key(0), (64, 32))
W = jax.random.normal(jax.random.key(1), (32, 32)) / 2


@jax.custom_vjp
def guarded_log(x):
    return jnp.log(x + 1e-6)


guarded_log.defvjp(lambda x: (guarded_log(x), x), lambda x, g: (g / (x + 1e-6),))

FUNCTIONS = {
    # Its slope grows as 1 / z^3 where softplus's vanishes: the error was 15 gradients.
    "trigamma": lambda z: special.polygamma(1, jax.nn.softplus(z) + 1e-3),
    # With a number that keeps z^2 off the pole in its own rule: 29 gradients.
    "a rule's logarithm": lambda z: guarded_log(z * z),
}
# The quantile of a normal, whose slope grows as 1 / p (0.2 gradients). Up to JAX 0.10
# it has polynomials in loops.
if jax.__version_info__ >= (0, 12):
    FUNCTIONS["probit"] = lambda z: special.ndtri(jax.nn.sigmoid(z))


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_special_function_of_any_argument_has_its_gradient(f):
    error = gradient_error(
        lambda w, x: f(x @ w), W, X, policy=Policy(bits=8), argnums=(0, 1)
    )
    assert error < 0.05


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cosine",
    [lambda a, b: (a * b).sum(-1), lambda a, b: jnp.einsum("bi,bi->b", a, b)],
    ids=["sum", "einsum"],
)
def test_angles_of_rotations(cosine):
    """One slope of arccos, where a rotation is near its target, had all others' noise.

    With the cosines exact, a number for each quaternion, the slopes are.
    """
    unit = lambda q: q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    true = jax.random.normal(jax.random.key(3), (64, 4))

    def f(w, x):
        cosines = cosine(unit(x @ w), unit(x @ true))
        return jnp.arccos(jnp.clip(jnp.abs(cosines), 0, 1 - 1e-6))

    w = true + 0.02 * jax.random.normal(jax.random.key(1), (64, 4))
    x = jax.random.normal(jax.random.key(2), (256, 64))
    assert gradient_error(f, w, x, policy=Policy(bits=8)) < 0.02


@pytest.mark.thorough
def test_angles_between_vectors_that_hardly_differ():
    """The slope of arccos has a pole there, and normalizing takes it away again."""
    unit = lambda v: v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    noise = jax.random.normal(jax.random.key(1), (64, 64))

    def f(w, x):
        view = x @ w
        other = jax.lax.stop_gradient(view) + 0.003 * noise
        cosines = jnp.einsum("bi,bi->b", unit(view), unit(other))
        return jnp.arccos(jnp.clip(cosines, -1 + 1e-7, 1 - 1e-7))

    w = jax.random.normal(jax.random.key(2), (64, 64)) / 8
    x = jax.random.normal(jax.random.key(3), (64, 64))
    assert gradient_error(f, w, x, policy=Policy(bits=8)) < 0.02

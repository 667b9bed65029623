"""A compressed function that takes the gradient itself says that nothing is stored."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxact

pytestmark = pytest.mark.unoptimized

W = {
    "up": jax.random.normal(jax.random.key(0), (16, 64)) / 4,
    "down": jax.random.normal(jax.random.key(1), (64, 16)) / 8,
}
X = jax.random.normal(jax.random.key(2), (32, 16))
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STATE = W, OPTIMIZER.init(W)


def loss(w, x):
    return ((jax.nn.gelu(x @ w["up"]) @ w["down"]) ** 2).mean()


def step(state, x):
    w, moments = state
    value, gradient = jax.value_and_grad(loss)(w, x)
    updates, moments = OPTIMIZER.update(gradient, moments, w)
    return (optax.apply_updates(w, updates), moments), value


def energy_and_forces(positions, w):
    energy = lambda x: jnp.tanh(jnp.sin(x) @ w["up"] @ w["down"]).sum()
    value, gradient = jax.value_and_grad(energy)(positions)
    return value, -gradient


def adapted(w, x):
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))


STEPS = {
    "a gradient": (jax.grad(loss), (W, X)),
    "a step": (step, (STATE, X)),
    "a jitted step": (jax.jit(step), (STATE, X)),
}


@pytest.mark.parametrize("around", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(("f", "args"), STEPS.values(), ids=STEPS)
def test_warns_where_nothing_differentiates_it(around, f, args):
    with pytest.warns(jaxact.CompressionWarning, match="takes a gradient itself"):
        around(jaxact.compress(f))(*args)


@pytest.mark.parametrize(("f", "args"), STEPS.values(), ids=STEPS)
def test_a_table_of_a_step_needs_no_arguments_to_differentiate(f, args):
    with pytest.warns(jaxact.CompressionWarning, match=r"argnums=\(\)"):
        jaxact.residuals(f, *args)
    assert jaxact.residuals(f, *args, argnums=()).rows


def test_is_silent_where_a_loss_differentiates_it():
    small = jaxact.compress(adapted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda w: loss(small(w, X), X))(W)
        jax.jit(jax.grad(jax.jit(lambda w: loss(small(w, X), X))))(W)


def test_is_silent_about_forces():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(jaxact.compress(energy_and_forces))(X, W)
        jaxact.residuals(energy_and_forces, X, W)

"""What a scan's body makes of its constants alone is the same in each step.

Uncompressed, JAX takes such residuals out of the loop and keeps them once; so does a
compressed call, exactly. A body that stacks them takes as many copies as steps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact

STEPS, BATCH, WIDTH = 32, 8, 64
EXACT = jaxact.Policy(default=jaxact.Exact())
BODIES = {
    "joined": lambda w, v, h: (h @ jnp.concatenate([w, w.T], 1))[:, :WIDTH],
    "elementwise": lambda w, v, h: h @ jnp.tanh(w),
    "product": lambda w, v, h: h @ jnp.tanh(w @ w),
    "normalized": lambda w, v, h: h @ (w / jnp.linalg.norm(w, axis=0, keepdims=True)),
    "keys of an encoder": lambda w, v, h: jax.nn.softmax(h @ (v @ w).T) @ v,
    "softmax of an activation": lambda w, v, h: h * jax.nn.softmax(v),
}


QUICK = "joined", "product"


def bodies():
    for name, body in BODIES.items():
        marks = () if name in QUICK else pytest.mark.slow
        yield pytest.param(body, id=name, marks=marks)


@pytest.fixture(params=bodies())
def loss(request):
    def loss(w, x, v):
        v = jnp.tanh(v @ w)  # an activation

        def step(h, x):
            return jnp.tanh(x + request.param(w, v, h)), None

        return jnp.square(jax.lax.scan(step, jnp.zeros_like(x[0]), x)[0]).sum()

    return loss


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (WIDTH, WIDTH), (STEPS, BATCH, WIDTH), (BATCH, WIDTH)
    return [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]


def compressed(loss, names, policy=None):
    return jaxact.compress(loss, activations=names, policy=policy)


NAMES = pytest.mark.parametrize("names", [None, ("x", "v")], ids=["unnamed", "named"])


@NAMES
def test_they_are_kept_once(loss, names):
    args = arguments()
    table = jaxact.residuals(compressed(loss, names), *args, argnums=0)
    stacked = [row.shape for row in table.rows if row.shape[0] == STEPS]
    # Only what has the batch's rows differs between steps.
    assert stacked and all(shape[:2] == (STEPS, BATCH) for shape in stacked)
    plain = jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis()
    small = jaxact.memory(jax.grad(compressed(loss, names)), *args)
    # The carry and the local derivative of tanh in 4 bits: less than half of the two.
    assert small.temp_bytes < plain.temp_size_in_bytes


@pytest.mark.slow
@NAMES
def test_the_gradient_is_that_of_the_plain_loop(loss, names):
    args = arguments()
    wanted = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    exact = compressed(loss, names, EXACT)
    found = jax.jit(jax.grad(exact, (0, 1, 2)))(*args)
    for a, b in zip(found, wanted, strict=True):
        # Sums of at most STEPS * BATCH terms in float32, in another order.
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=STEPS * BATCH * 2**-23 * scale)


def test_the_joined_kernels_of_an_lstm():
    cell = nn.RNN(nn.OptimizedLSTMCell(WIDTH))
    x = jnp.ones((BATCH, STEPS, WIDTH))
    variables = cell.init(jax.random.key(0), x)
    loss = lambda variables, x: jnp.square(cell.apply(variables, x)).sum()
    plain = jaxact.residuals(loss, variables, x, argnums=0)
    small = jaxact.residuals(jaxact.compress(loss), variables, x, argnums=0)
    assert small.exact_bytes <= plain.exact_bytes


def test_a_product_with_the_layers_own_weights_is_stored():
    """Layers read the same array: what each makes of it is an activation."""

    def loss(ws, v):
        def layer(h, w):
            return jnp.tanh(h + jnp.tanh(v @ w)), None

        return jnp.square(jax.lax.scan(layer, jnp.zeros_like(v), ws)[0]).sum()

    ws, v = jnp.ones((4, WIDTH, WIDTH)) / 64, jnp.ones((BATCH, WIDTH))
    for names in (None, "v"):
        table = jaxact.residuals(compressed(loss, names), ws, v, argnums=0)
        rows = [row for row in table.rows if row.shape == (4, BATCH, WIDTH)]
        assert rows and all(row.stored_bytes < row.exact_bytes / 2 for row in rows)


def test_a_carry_that_is_a_number():
    """A Python number in a scan's carry has no shape."""
    x = jnp.ones((4, WIDTH))
    f = lambda x: jax.lax.scan(lambda n, row: (n, jnp.tanh(row)), 0, x)[1]
    gradient = jax.grad(lambda x: jaxact.compress(f, policy=EXACT)(x).sum())(x)
    small = jax.grad(lambda x: jaxact.compress(f)(x).sum())(x)
    np.testing.assert_array_equal(gradient, small)  # rows alike are constants, exact

"""Max-pools keep where each maximum is, at most one byte for a window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact import Policy
from support.programs import assert_same_bits, gradient_error

pytestmark = [
    pytest.mark.unoptimized,
    # A pool alone leaves nothing to compress, and says so.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

# shape, window, strides, padding
POOLS = {
    "2 x 2": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "3 x 3 every 2": ((2, 9, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "every place": ((2, 7, 7, 2), (1, 3, 3, 1), (1, 1, 1, 1), "VALID"),
    "gaps": ((2, 9, 9, 2), (1, 2, 2, 1), (1, 3, 3, 1), "VALID"),
    "explicit": (
        (2, 7, 7, 2),
        (1, 3, 2, 1),
        (1, 2, 3, 1),
        ((0, 0), (1, 2), (0, 1), (0, 0)),
    ),
    "1-D": ((2, 11, 3), (1, 4, 1), (1, 3, 1), "SAME"),
    "3-D": ((1, 5, 6, 5, 2), (1, 2, 3, 2, 1), (1, 2, 1, 2, 1), "VALID"),
    "global": ((2, 5, 5, 2), (1, 5, 5, 1), (1, 1, 1, 1), "VALID"),
    "channels": ((2, 4, 4, 8), (1, 1, 1, 4), (1, 1, 1, 4), "VALID"),
}
each_pool = pytest.mark.parametrize("name", POOLS)

VALUES = {
    "normal": lambda x: x,
    "ties": jnp.round,
    "constant": lambda x: x * 0.0,
    "-inf": lambda x: jnp.where(x < 0.5, -jnp.inf, x),
    "all -inf": lambda x: jnp.full_like(x, -jnp.inf),
    "inf": lambda x: jnp.where(x > 1.5, jnp.inf, x),
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
}


def max_pool(x, window, strides, padding):
    start = np.asarray(-jnp.inf, x.dtype)
    return lax.reduce_window(x, start, lax.max, window, strides, padding)


def pool_of(name):
    _, *how = POOLS[name]
    return functools.partial(max_pool, window=how[0], strides=how[1], padding=how[2])


def data(name, values=lambda x: x):
    """(input, cotangent of whole numbers, whose sums are exact)."""
    x = values(jax.random.normal(jax.random.key(0), POOLS[name][0]))
    out = jax.eval_shape(pool_of(name), x)
    weights = jax.random.randint(jax.random.key(1), out.shape, -3, 4)
    return x, weights.astype(out.dtype)


def compress(f):
    return jaxact.compress(f, policy=Policy(bits=2), activations=0)


def gradient(f):
    return jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])


@functools.cache
def gradients(name):
    """(compressed, of JAX), compiled once for each dtype."""
    return gradient(compress(pool_of(name))), gradient(pool_of(name))


@each_pool
def test_gradients_are_those_of_jax(name):
    small, plain = gradients(name)
    x, ct = data(name)
    assert_same_bits(small(x, ct), plain(x, ct))


FEW = ["2 x 2", "3 x 3 every 2"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", FEW)
def test_gradients_of_special_values(name, values):
    """The first maximum of a window is the one, also of equal and infinite ones."""
    small, plain = gradients(name)
    x, ct = data(name, values)
    assert_same_bits(small(x, ct), plain(x, ct))


def min_pool(x, window, strides, padding):
    start = np.asarray(jnp.inf, x.dtype)
    return lax.reduce_window(x, start, lax.min, window, strides, padding)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_gradients_of_minima(values):
    """Their input was stored: rounded, an erosion's minima were elsewhere."""
    name = "3 x 3 every 2"
    _, *how = POOLS[name]
    f = lambda x: min_pool(x, *how)
    x, ct = data(name, lambda x: -values(x))
    assert_same_bits(gradient(compress(f))(x, ct), gradient(f)(x, ct))
    assert {r.bias for r in jaxact.residuals(compress(f), x).rows} == {"exact"}


@pytest.mark.parametrize("count", [4, 20])
def test_a_maximum_along_axes_is_told_by_one_bit_for_each_element(count):
    """Pools by reshaping (DreamerV3), maxout, an EdgeConv's neighbours.

    The number of equal ones was stored exactly: four bytes for each maximum.
    """
    f = lambda x: x.max(1)
    x = jnp.round(jax.random.normal(jax.random.key(0), (32, count, 64)))
    ct = jax.random.normal(jax.random.key(1), (32, 64))
    assert_same_bits(gradient(compress(f))(x, ct), gradient(f)(x, ct))
    rows = jaxact.residuals(compress(f), x).rows
    assert [(r.shape, str(r.dtype)) for r in rows] == [(x.shape, "bool")]


@jax.custom_vjp
def checked(x):
    return x


checked.defvjp(lambda x: (x, ()), lambda _, ct: (ct,))


def test_a_pooled_array_that_a_check_reads_is_packed():
    """DreamerV3 checks types by a custom rule whose result nothing reads."""

    def f(x):
        pooled = x.reshape(8, 16, 2, 64).max(2)
        checked(pooled)
        return pooled * lax.rsqrt((pooled**2).mean(-1, keepdims=True) + 1e-6)

    x = jax.random.normal(jax.random.key(0), (8, 32, 64))
    rows = jaxact.residuals(compress(f), x).rows
    (stored,) = [r for r in rows if r.shape == (8, 16, 64)]
    assert stored.stored_bytes < stored.exact_bytes / 8


def test_pooled_features_that_a_recurrence_reads_are_packed():
    """Of an encoder before a recurrence they and their norm's product were exact."""

    def f(w, x):
        pooled = x.reshape(16, 8, 2, 32).max(2)
        z = pooled * lax.rsqrt((pooled**2).mean(-1, keepdims=True) + 1e-6)

        def cell(h, z):
            h = jnp.tanh(jnp.concatenate([h, z], -1) @ w)
            return h, h

        return lax.scan(cell, jnp.zeros((8, 32)), z * jax.nn.sigmoid(z))[1]

    w, x = jnp.ones((64, 32)) / 64, jax.random.normal(jax.random.key(0), (16, 16, 32))
    small = jaxact.compress(f, policy=Policy(bits=2), activations="x")
    floats = [r for r in jaxact.residuals(small, w, x).rows if r.shape == (16, 8, 32)]
    assert len(floats) > 3
    assert all(r.stored_bytes < r.exact_bytes / 4 for r in floats)


def test_a_mean_that_is_joined_to_each_element_is_packed():
    """FermiNet's electrons, a set's points: half the stored bytes were exact means."""

    def f(weights, x):
        for w in weights:
            pooled = jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)
            x = x + jnp.tanh(jnp.concatenate([x, pooled], -1) @ w)
        return x

    weights = jax.random.normal(jax.random.key(0), (2, 64, 32)) / 8
    x = jax.random.normal(jax.random.key(1), (64, 4, 32))
    small = jaxact.compress(f, policy=Policy(bits=2), activations="x")
    means = [r for r in jaxact.residuals(small, weights, x).rows if r.shape == (64, 32)]
    assert len(means) == 2
    assert all(r.stored_bytes < r.exact_bytes / 8 for r in means)


@pytest.mark.parametrize("name", FEW)
def test_nan_stays_in_its_windows(name):
    small, plain = gradients(name)
    x, ct = data(name)
    got, want = small(x.at[0, 0, 0].set(jnp.nan), ct), plain(x, ct)
    assert jnp.isfinite(got).all()
    assert_same_bits(got[1], want[1])


@each_pool
def test_the_bits_of_an_index_are_stored_for_a_window(name):
    x, ct = (jnp.repeat(v, 64, -1) for v in data(name))
    rows = jaxact.residuals(compress(pool_of(name)), x).rows
    assert {row.shape for row in rows} == {ct.shape}
    assert {row.bias for row in rows} == {"exact"}
    bits = (int(np.prod(POOLS[name][1])) - 1).bit_length()
    assert [(row.dtype.name, row.action.label) for row in rows] == [
        ("uint8", f"{bits} bits")
    ]
    padded = -(-np.prod(ct.shape[1:]) // 32) * 32  # rows of whole words
    assert rows[0].stored_bytes == ct.shape[0] * padded * bits // 8


def test_a_window_of_more_than_256_is_left_to_jax():
    f = lambda x: max_pool(x, (1, 17, 17, 1), (1, 1, 1, 1), "VALID")
    rows = jaxact.residuals(compress(f), jnp.ones((1, 20, 20, 1))).rows
    assert not [row for row in rows if row.dtype == jnp.uint8]


def test_the_input_of_a_larger_window_stays_exact():
    """Rounded, its maxima were elsewhere: gradients erred by 0.3, the mean as well."""

    def f(x):
        pooled = max_pool(jnp.tanh(x / 3), (1, 20, 20, 1), (1, 1, 1, 1), "VALID")
        return jnp.sin(pooled)

    x = jax.random.normal(jax.random.key(0), (4, 24, 24, 8))
    assert gradient_error(f, x, policy=Policy(bits=8)) < 0.02


def test_the_input_of_a_pool_is_not_stored():
    def f(w, x):
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return max_pool(y, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    w, x = jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8, 8, 4))
    small = jaxact.compress(f, policy=Policy(bits=2), activations="x")
    rows = jaxact.residuals(small, w, x).rows
    assert sorted((r.shape, str(r.dtype)) for r in rows) == [
        ((2, 4, 4, 8), "uint8"),
        ((2, 8, 8, 4), "float32"),
    ]


def test_average_pools_store_nothing():
    def f(x):
        sums = lax.reduce_window(
            x, np.float32(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return sums / 4.0

    x, _ = data("2 x 2")
    assert jaxact.residuals(compress(f), x).rows == ()


def test_a_dilated_window_is_left_to_jax():
    def f(x):
        window = (1, 2, 2, 1)
        return lax.reduce_window(
            x, -jnp.inf, lax.max, window, window, "VALID", window_dilation=(1, 2, 2, 1)
        )

    x, _ = data("2 x 2")
    assert_same_bits(jax.jit(compress(f))(x), jax.jit(f)(x))


@pytest.mark.parametrize("outside", [True, False])
def test_vmap_is_a_loop(outside):
    one = lambda x: pool_of("2 x 2")(x[None])[0]
    small = jax.vmap(compress(one)) if outside else compress(jax.vmap(one))
    x, ct = data("2 x 2")
    assert_same_bits(gradient(small)(x, ct), gradients("2 x 2")[1](x, ct))


def test_inside_a_scan_and_a_checkpoint():
    f, (x, ct) = pool_of("2 x 2"), data("2 x 2")

    def stacked(f):
        return lambda x: lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.stack([x, -x]))[1]

    cts = jnp.stack([ct, ct])
    want = gradient(stacked(f))(x, cts)
    assert_same_bits(gradient(compress(stacked(f)))(x, cts), want)
    inside = stacked(jax.checkpoint(compress(f)))
    assert_same_bits(gradient(inside)(x, cts), want)


@pytest.mark.parametrize("window", [(1, 4), (1, 9)])
def test_no_window_fits(window):
    def f(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2), "VALID")

    x = jnp.ones((64, 3))
    gradient = jax.grad(lambda x: compress(f)(x).sum())(x)
    assert_same_bits(gradient, jnp.zeros_like(x))


def test_a_residual_is_named_after_its_pool():
    def f(x):
        with jax.named_scope("block/pool"):
            return jnp.sin(pool_of("2 x 2")(x))

    x = jnp.repeat(data("2 x 2")[0], 64, -1)
    rows = jaxact.residuals(compress(f), x).rows
    keys = {row.key for row in rows if row.dtype == jnp.uint8}
    assert keys == {"block/pool/reduce_window_max.derivative"}

"""Around convolutions, residuals are packed as a GPU has them in memory.

cuDNN's convolutions along one or two axes have channels last, those along three first;
XLA moves an array that is read in another order.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import jaxact
from jaxact import Policy
from support.gpu_target import needs_target
from support.seen import assert_near, seen

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(0), 4)
LAST = jax.random.normal(KEYS[0], (2, 6, 4, 5, 8))  # channels last
FIRST = jax.random.normal(KEYS[1], (2, 8, 6, 10))  # channels first
W3 = 0.2 * jax.random.normal(KEYS[2], (3, 3, 3, 8, 8))
BIAS = jnp.arange(8.0).reshape(1, 1, 1, 1, 8)
W2 = 0.2 * jax.random.normal(KEYS[3], (8, 8, 3, 3))


def conv3(x, w):
    numbers = ("NDHWC", "DHWIO", "NDHWC")
    return lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=numbers)


def conv2(x, w):
    numbers = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def normalized(x, axes):
    mean, variance = (f(x, axes, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - mean) * lax.rsqrt(variance + 1e-3)


def grouped(x, *shape, axes):
    return normalized(x.reshape(shape), axes).reshape(x.shape)


def pooled(x):
    return nn.max_pool(x, (2, 2, 2), (2, 2, 2))


# Each ends with a function whose residuals are its input's.
AROUND_3 = {
    "a function": lambda x, w: jnp.tanh(conv3(x, w)),
    "an argument": lambda x, w: conv3(jnp.sin(x), w),
    "a bias": lambda x, w: jnp.tanh(conv3(x, w) + BIAS),
    "instance norm": lambda x, w: jnp.sin(normalized(conv3(x, w), (1, 2, 3))),
    "batch norm": lambda x, w: jnp.sin(normalized(conv3(x, w), (0, 1, 2, 3))),
    "layer norm": lambda x, w: jnp.sin(normalized(conv3(x, w), (4,))),
    "group norm": lambda x, w: jnp.sin(
        grouped(conv3(x, w), *LAST.shape[:4], 4, 2, axes=(1, 2, 3, 5))
    ),
    "a mask": lambda x, w: jax.nn.leaky_relu(conv3(x, w)) * jnp.sin(x),
    "relu": lambda x, w: conv3(jax.nn.relu(conv3(x, w)), w),
    "joined": lambda x, w: jnp.sin(jnp.concatenate([conv3(x, w), x], axis=-1)),
    "pooled": lambda x, w: jnp.sin(pooled(conv3(x, w))),
    "one more axis": lambda x, w: jnp.sin(conv3(x, w)[:, :, None])[:, :, 0],
    "twice": lambda x, w: jnp.sin(conv3(jnp.tanh(conv3(x, w)), w)),
}
AROUND_2 = {
    "a function": lambda x, w: jnp.tanh(conv2(x, w)),
    "batch norm": lambda x, w: jnp.sin(normalized(conv2(x, w), (0, 2, 3))),
    "instance norm": lambda x, w: jnp.sin(normalized(conv2(x, w), (2, 3))),
    "relu": lambda x, w: conv2(jax.nn.relu(conv2(x, w)), w),
    "a function of each": jax.vmap(
        lambda x, w: jnp.tanh(conv2(x[None], w)[0]), (0, None)
    ),
}


def is_channel_first(shape, channels=(8, 4, 16)):
    """Whether rows of three spatial axes end it."""
    return len(shape) > 4 and shape[1] in channels


@pytest.mark.parametrize("f", AROUND_3.values(), ids=AROUND_3)
def test_along_three_axes_channels_are_first(f):
    large = [a.shape for a in seen(f, LAST, W3) if len(a.shape) > 4]
    assert large
    assert all(map(is_channel_first, large))


@pytest.mark.parametrize("f", AROUND_2.values(), ids=AROUND_2)
def test_along_two_axes_channels_are_last(f):
    large = [a.shape for a in seen(f, FIRST, W2) if a.shape != W2.shape]
    assert large
    assert all(shape[-1] == 8 for shape in large)


OWN = {
    "as the program has it": (lambda x, w: jnp.tanh(conv3(x, w)), LAST, W3),
    "channels that a group norm splits": (
        lambda x, w: jnp.sin(grouped(conv2(x, w), 2, 4, 2, 6, 10, axes=(2, 3, 4))),
        FIRST,
        W2,
    ),
    "no convolution": (lambda x, w: jnp.sin(x) @ w[0, 0, 0], LAST, W3),
}


@pytest.mark.parametrize("f, x, w", OWN.values(), ids=OWN)
def test_others_stay_in_their_own_order(f, x, w):
    shapes = {a.shape for a in seen(f, x, w, is_free_of_axes=x.ndim != 5)}
    assert shapes & {x.shape, (2, 4, 2, 6, 10)}
    assert not shapes & {(2, 8, 6, 4, 5), (2, 6, 10, 8)}


def test_gradients_of_packed_values():
    f = AROUND_3["twice"]
    small = jaxact.compress(f, policy=Policy(8))
    gradient = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))
    # Each factor to 8 bits of a range of at most 8 deviations: 0.9 % of these.
    assert_near(gradient(small)(LAST, W3), gradient(f)(LAST, W3), 0.02)


@pytest.mark.slow
@needs_target
def test_instance_norms_along_three_axes_on_a_gpu():
    """1.14 times as long as uncompressed; 1.6 if they are moved to be packed, and
    normalized in memory.
    """

    def block(w, x):
        for one in w:
            x = x + jax.nn.leaky_relu(normalized(conv3(x, one), (1, 2, 3)))
        return x

    sized = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = sized((4, 3, 3, 3, 64, 64)), sized((2, 64, 64, 64, 64))
    small = jaxact.compress(block, policy=Policy(4), activations="x")
    total = lambda f: lambda w, x: jnp.sum(f(w, x).astype(jnp.float32) ** 2)
    steps = {name: jax.grad(total(f)) for name, f in [("plain", block), ("4", small)]}
    plain, packed = jaxact.compare(steps, *sizes, target="h100").rows
    assert packed.predicted_seconds < 1.25 * plain.predicted_seconds
    assert packed.memory.temp_bytes < 0.8 * plain.memory.temp_bytes

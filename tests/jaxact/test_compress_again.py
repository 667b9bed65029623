"""Compressing a compressed target, and arguments called `rounding_key`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxact
from jaxact import Exact, Policy, Quantize

X = jax.random.normal(jax.random.key(0), (32, 16))
COARSE = Policy(default=Quantize(bits=2))
EXACT = Policy(default=Exact())


def smooth(x):
    return jnp.tanh(x) * x


class Smooth(nnx.Module):
    def __call__(self, x):
        return smooth(x)

    def method(self, x):
        return smooth(x)


class Heir(jaxact.compress(Smooth, policy=EXACT)):
    pass


class LinenSmooth(nn.Module):
    @nn.compact
    def __call__(self, x):
        return smooth(x)


class Plain:
    @jaxact.compress(policy=EXACT)
    def __call__(self, x):
        return smooth(x)


def linen(cls):
    return lambda x, **options: cls().apply({}, x, **options)


def twice(target, inner, outer):
    return jaxact.compress(jaxact.compress(target, policy=inner), policy=outer)


TARGETS = {
    "function": lambda i, o: twice(smooth, i, o),
    "bound method": lambda i, o: twice(Smooth().method, i, o),
    "method of an instance": lambda i, o: jaxact.compress(
        jaxact.compress(Smooth(), policy=i).__call__, policy=o
    ),
    "NNX class": lambda i, o: twice(Smooth, i, o)(),
    "NNX instance": lambda i, o: twice(Smooth(), i, o),
    "instance of a compressed class": lambda i, o: jaxact.compress(
        jaxact.compress(Smooth, policy=i)(), policy=o
    ),
    "Linen class": lambda i, o: linen(twice(LinenSmooth, i, o)),
}


def gradient(f, seed):
    key = jax.random.key(seed)
    return np.asarray(jax.grad(lambda x: f(x, rounding_key=key).sum())(X))


@pytest.mark.parametrize("kind", TARGETS)
def test_the_key_reaches_the_one_compression(kind):
    f = TARGETS[kind](COARSE, COARSE)
    assert np.array_equal(gradient(f, 0), gradient(f, 0))
    assert not np.array_equal(gradient(f, 0), gradient(f, 1))


@pytest.mark.parametrize("kind", TARGETS)
def test_the_outer_policy_decides(kind):
    wanted = np.asarray(jax.grad(lambda x: smooth(x).sum())(X))
    exact, coarse = TARGETS[kind](COARSE, EXACT), TARGETS[kind](EXACT, COARSE)
    np.testing.assert_array_equal(gradient(exact, 0), wanted)
    assert not np.array_equal(gradient(coarse, 0), wanted)


@pytest.mark.parametrize(
    "target", [Heir, Heir(), Plain().__call__], ids=["heir", "its instance", "plain"]
)
def test_an_inherited_or_decorated_call_is_compressed_once(target):
    f = jaxact.compress(target, policy=COARSE)
    f = f() if isinstance(f, type) else f
    assert not np.array_equal(gradient(f, 0), gradient(f, 1))


def test_the_inner_options_hold_where_the_outer_ones_are_silent():
    def f(n, x):
        return x * int(n)

    inner = jaxact.compress(f, static_argnums="n")
    assert jaxact.compress(inner, policy=COARSE)(np.array(3), X).shape == X.shape


def test_a_wrapper_that_copies_attributes_is_no_compressed_function():
    inner = jaxact.compress(smooth, policy=EXACT)

    @functools.wraps(inner)
    def doubled(x):
        return 2 * inner(x)

    np.testing.assert_array_equal(jaxact.compress(doubled)(X), 2 * inner(X))


class LinenKeyed(nn.Module):
    def __call__(self, x, rounding_key=None):
        return x


class Keyed(nnx.Module):
    def __call__(self, x, rounding_key=None):
        return x

    def method(self, x, *, rounding_key):
        return x


@pytest.mark.parametrize(
    "target",
    [lambda x, rounding_key=None: x, LinenKeyed, Keyed, Keyed(), Keyed().method],
    ids=["function", "Linen", "NNX", "instance", "method"],
)
def test_a_parameter_called_rounding_key_is_refused(target):
    with pytest.raises(ValueError, match="another name"):
        jaxact.compress(target)

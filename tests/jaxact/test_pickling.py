"""Compressed Linen and NNX modules go through pickle and copy."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxact
from jaxact import Policy

pytestmark = pytest.mark.unoptimized

X = jax.random.normal(jax.random.key(1), (64, 64))


class Block(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


@jaxact.compress(policy=Policy(bits=2))
class Decorated(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Outer(nn.Module):
    block: nn.Module

    def __call__(self, x):
        return self.block(x)


Small = jaxact.compress(Block, policy=Policy(bits=2))


class Heir(Small):
    """Has a name of its own."""


MODULES = [Small(width=5), Decorated(width=5), Heir(width=5), Outer(Small(width=5))]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_a_pickled_module_computes_the_same(module, protocol):
    loaded = pickle.loads(pickle.dumps(module, protocol))
    assert type(loaded).__name__ == type(module).__name__
    variables = module.init(jax.random.key(0), X)

    def gradient(m):
        return jax.grad(lambda v: jnp.square(m.apply(v, X)).sum())(variables)

    jax.tree.map(np.testing.assert_array_equal, gradient(loaded), gradient(module))
    assert jaxact.residuals(loaded.apply, variables, X).rows


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_a_copy_has_the_same_class(module):
    for copied in (copy.copy(module), copy.deepcopy(module)):
        assert type(copied) is type(module) and copied == module


def test_modules_that_were_pickled_alike_have_one_class():
    first, second = (pickle.loads(pickle.dumps(Small(width=5))) for _ in range(2))
    assert type(first) is type(second) and first == second


class State(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("made_from", ["class", "instance"])
def test_a_pickled_nnx_module_computes_the_same(made_from, protocol):
    if made_from == "class":
        module = jaxact.compress(State, policy=Policy(bits=2))(nnx.Rngs(0))
    else:
        module = jaxact.compress(State(nnx.Rngs(0)), policy=Policy(bits=2))
    loaded = pickle.loads(pickle.dumps(module, protocol))
    assert type(loaded).__name__ == "State" and loaded is not module

    def gradient(m):
        return nnx.state(nnx.grad(lambda m: jnp.square(m(X)).sum())(m))

    jax.tree.map(np.testing.assert_array_equal, gradient(loaded), gradient(module))
    assert jaxact.residuals(lambda m: m(X), loaded).rows

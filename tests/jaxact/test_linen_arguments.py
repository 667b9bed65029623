"""Linen modules that a compressed function gets.

Contract: their variables, loss and state keep every bit, as those of a compressed
method's own module do, and the gradients are near; or the call is refused with what to
write instead.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxact
from support.linen_modules import MUTABLE, Block, in_mode, init, same
from support.programs import relative_error
from support.wrapping import WIDTH, data, exact, packed, plain

pytestmark = pytest.mark.unoptimized


def bound_call(wrap):
    class Net(nn.Module):
        def setup(self):
            self.a, self.b = Block(), Block()

        def __call__(self, x):
            return wrap(self.b.__call__)(wrap(self.a.__call__)(x), train=True)

    return Net()


def bound_method(wrap):
    class Net(nn.Module):
        def setup(self):
            self.a = Block()
            self.scale = self.param("scale", nn.initializers.ones, ())

        def layer(self, x):
            return self.a(x) * self.scale

        def __call__(self, x):
            return wrap(self.layer)(x)

    return Net()


def bound_in_compact(wrap):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(Block(name="a").__call__)(wrap(Block().__call__)(x))

    return Net()


WAYS = [bound_call, bound_method, bound_in_compact]
every_way = pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)


@every_way
def test_variables_loss_and_state_keep_every_bit(make):
    variables = init(make(plain))
    assert same(init(make(packed)), variables)
    run = lambda wrap: in_mode("jitted", make(wrap))(variables, data())
    wanted, gradient = run(plain)
    got, rounded = run(packed)
    assert same(got, wanted)
    assert 0 < relative_error(rounded, gradient) < 0.3
    _, whole = run(exact)
    assert relative_error(whole, gradient) < 1e-6


@pytest.mark.parametrize("make, paths", [
    (bound_call, {"Net/a", "Net/b"}),
    (bound_method, {"Net.layer/a"}),
    (bound_in_compact, {"Net/a", "Net/Block_0"}),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_residuals_are_below_the_path_of_their_module(make, paths):
    net = make(packed)
    variables = init(net)
    rngs = {"dropout": jax.random.key(3)}
    loss = lambda v, x: net.apply(v, x, rngs=rngs, mutable=MUTABLE)[0].sum()
    keys = [r.key for r in jaxact.residuals(loss, variables, data()).rows]
    assert keys and {"/".join(k.split("/")[:2]) for k in keys} == paths


def test_a_method_of_a_module_that_is_bound_outside():
    net, x = nn.Dense(WIDTH), data()
    variables = net.init(jax.random.key(0), x)
    call = lambda v: jaxact.compress(net.bind(v).__call__)(x)
    assert same(call(variables), net.apply(variables, x))
    gradient = jax.grad(lambda v: jnp.tanh(call(v)).sum())(variables)
    wanted = jax.grad(lambda v: jnp.tanh(net.apply(v, x)).sum())(variables)
    assert relative_error(gradient, wanted) < 0.2


def test_apply_of_an_unbound_module_counts_its_own_arguments():
    net, x = nn.Dense(WIDTH), data()
    variables = net.init(jax.random.key(0), x)
    small = jaxact.compress(net.apply, activations=1)
    assert same(small(variables, x), net.apply(variables, x))

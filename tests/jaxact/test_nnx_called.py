"""Reports on an NNX module itself, or its method, given as the function.

Contract: they say what they say for a function that gets the module as an argument,
also where the call changes its state; positions count the call's own arguments.
"""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx
from flax.errors import TraceContextError

import jaxact
from support.wrapping import WIDTH, data

pytestmark = pytest.mark.unoptimized


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, scale=2.0):
        return (jnp.tanh(self.drop(self.norm(self.inner(x)))) * scale).sum()

    def loss(self, x):
        return self(x), x


WRAPS = {"plain": lambda module: module, "compressed": jaxact.compress}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def call(module, *args):
    return module(*args)


@every_wrap
@pytest.mark.parametrize("report", [
    jaxact.residuals,
    jaxact.memory,
    jaxact.count_flops,
], ids=["residuals", "memory", "flops"])  # fmt: skip
def test_a_module_is_an_argument(report, wrap):
    assert report(wrap(Net()), data()) == report(call, wrap(Net()), data())


def test_a_module_that_a_policy_compresses():
    table = jaxact.residuals(Net(), data(), policy=jaxact.Policy(2))
    assert table == jaxact.residuals(
        jaxact.compress(Net(), policy=jaxact.Policy(2)), data()
    )
    assert table.stored_bytes < table.exact_bytes / 3


@every_wrap
def test_a_method(wrap):
    net = wrap(Net())
    got = jaxact.residuals(net.loss, data(), has_aux=True)
    assert got == jaxact.residuals(lambda m, x: m.loss(x)[0], net, data())


@every_wrap
def test_positions_are_those_of_the_call(wrap):
    net, scale = wrap(Net()), jnp.float32(2.0)
    for argnums in (0, 1, (0, -1)):
        several = argnums if isinstance(argnums, tuple) else (argnums,)
        others = tuple(n + 1 if n >= 0 else n for n in several)
        got = jaxact.residuals(net, data(), scale, argnums=argnums)
        wanted = jaxact.residuals(call, net, data(), scale, argnums=others)
        assert got == wanted
    with pytest.raises(ValueError, match="the call has 2 positional ones"):
        jaxact.residuals(net, data(), scale, argnums=2)


def test_versions_side_by_side():
    table = jaxact.compare({name: wrap(Net()) for name, wrap in WRAPS.items()}, data())
    assert len(table.rows) == 2


@pytest.mark.parametrize("make", [
    lambda net: lambda x: net(x),
    lambda net: functools.partial(call, net),
    lambda net: jaxact.compress(lambda x: net(x)),
], ids=["closure", "partial", "compressed"])  # fmt: skip
def test_a_module_in_a_closure_is_refused_with_what_to_write(make):
    with pytest.raises(TraceContextError) as error:
        jaxact.residuals(make(Net()), data())
    assert "lambda module, x: module(x)" in "".join(error.value.__notes__)
    assert sum(n.startswith("jaxact") for n in error.value.__notes__) == 1

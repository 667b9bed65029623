"""Linen modules that a compressed function gets.

Contract: their variables, loss and state keep every bit, as those of a compressed
method's own module do, and the gradients are near; or the call is refused with what to
write instead.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxact
from support.linen_modules import MUTABLE, Block, Holder, in_mode, init, same
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


class Pair(nn.Module):
    call: Any

    def setup(self):
        self.a, self.b = Block(), Block()

    def __call__(self, x):
        return self.call(self, x)


def in_a_list(wrap):
    run = wrap(lambda modules, x: modules[1](modules[0](x)))
    return Pair(lambda net, x: run([net.a, net.b], x))


def after_an_array(wrap):
    run = wrap(lambda x, a, b: b(a(x)))
    return Pair(lambda net, x: run(x, net.a, net.b))


def by_keyword(wrap):
    run = wrap(lambda x, *, modules: modules["b"](modules["a"](x)))
    return Pair(lambda net, x: run(x, modules={"a": net.a, "b": net.b}))


def beside_its_parent(wrap):
    run = wrap(lambda x, net, a: net.b(a(x)) + net.a(x))
    return Pair(lambda net, x: run(x, net, net.a))


def holding_another(wrap):
    class Net(nn.Module):
        def setup(self):
            self.a, self.b = Holder(Block()), Block()

        def __call__(self, x):
            return wrap(lambda x, a: a(x))(self.b(x), self.a)

    return Net()


def after_another(wrap):
    class Net(nn.Module):
        def setup(self):
            self.a, self.b = Holder(Block()), Block()

        def __call__(self, x):
            return wrap(lambda x, b, a: b(a(x)))(x, self.b, self.a)

    return Net()


def made_inside(wrap):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(lambda x, _: nn.Dense(WIDTH)(Block()(x)))(x, self)

    return Net()


WAYS = [
    *(bound_call, bound_method, bound_in_compact, in_a_list, after_an_array),
    *(by_keyword, beside_its_parent, holding_another, after_another, made_inside),
]
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
    (bound_method, {"Net/Net.layer", "Net/x"}),
    (bound_in_compact, {"Net/a", "Net/Block_0"}),
    (in_a_list, {"Pair/a", "Pair/b", "Pair/x"}),
    (after_an_array, {"Pair/a", "Pair/b", "Pair/x"}),
    (by_keyword, {"Pair/a", "Pair/b", "Pair/x"}),
    (made_inside, {"Net/Block_0", "Net/x"}),
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


def closure(net, x):
    return jaxact.compress(lambda x: net.a(x))(x)


def partial(net, x):
    return jaxact.compress(functools.partial(net.a, train=True))(x)


def beside_another(net, x):
    return jaxact.compress(lambda b, x: b(net.a(x)))(net.b, x)


class Holders(nn.Module):
    wrap: Any

    def setup(self):
        self.a, self.b = (Holder(nn.Dense(WIDTH)) for _ in "ab")

    def __call__(self, x):
        return self.wrap(lambda x, a, b: b(a(x)))(x, self.a, self.b)


def test_two_modules_that_hold_others_are_read_and_not_made():
    """Linen lifts one of them."""
    with pytest.raises(TypeError, match=r"in params.* compress\(lambda module, x:"):
        init(Holders(jaxact.compress))
    variables, x = init(Holders(lambda f: f)), data()
    small, plain = (Holders(wrap).apply for wrap in (jaxact.compress, lambda f: f))
    assert same(small(variables, x), plain(variables, x))
    gradient = lambda f: jax.grad(lambda v: jnp.tanh(f(v, x)).sum())(variables)
    assert relative_error(gradient(small), gradient(plain)) < 0.2


@pytest.mark.parametrize("call", [closure, partial])
def test_variables_of_a_module_in_a_closure_are_refused(call):
    with pytest.raises(TypeError, match=r"in params.* compress\(lambda module, x:"):
        init(Pair(call))


def test_a_module_that_is_made_in_a_closure_is_refused():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jaxact.compress(lambda x: nn.Dense(WIDTH)(x))(x)

    with pytest.raises(TypeError, match=r"in params.* compress\(lambda module, x:"):
        init(Net())


@pytest.mark.parametrize("call", [closure, partial, beside_another])
def test_state_of_a_module_in_a_closure_is_refused(call):
    variables = init(Pair(lambda net, x: net.b(net.a(x))))
    rngs = {"dropout": jax.random.key(0)}
    with pytest.raises(TypeError, match="in batch_stats"):
        Pair(call).apply(variables, data(), rngs=rngs, mutable=["batch_stats"])


def test_a_closure_that_only_reads_a_module():
    def call(net, x):
        return jaxact.compress(lambda x: net.a(x, train=False))(x)

    wanted = Pair(lambda net, x: net.a(x, train=False))
    variables = init(wanted)
    assert same(Pair(call).apply(variables, data()), wanted.apply(variables, data()))


def test_positions_count_all_arguments_where_a_module_is_not_the_first():
    def call(net, x, **options):
        f = lambda x, scale, net: jnp.sin(net.a(x)) * scale
        return jaxact.compress(f, **options)(x, jnp.float32(2.0), net)

    variables = init(Pair(call))
    rngs = {"dropout": jax.random.key(0)}

    def keys(**options):
        net = Pair(functools.partial(call, **options))
        loss = lambda v, x: net.apply(v, x, rngs=rngs, mutable=MUTABLE)[0].sum()
        return {r.key for r in jaxact.residuals(loss, variables, data()).rows}

    assert "Pair/x" in keys(activations=0) and "Pair/x" in keys(activations="x")
    assert "Pair/x" not in keys(activations="scale")
    with pytest.raises(ValueError, match="'y' is no argument .*'x', 'scale', 'net'"):
        keys(activations="y")


class Base(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(WIDTH)(x))


class LoRA(nn.Module):
    """A layer around another that it is given, in whose scope it puts its own."""

    base: nn.Module
    shared: bool = True

    def setup(self):
        if self.shared:
            nn.share_scope(self, self.base)

    def compute(self, x):
        return jnp.tanh(self.base(x) + x)

    def __call__(self, x):
        return self.compute(x)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("call", [
    lambda layer, x: layer(x),
    lambda layer, x: jaxact.compress(layer.compute)(x),
    lambda layer, x: jaxact.compress(LoRA.__call__)(layer, x),
], ids=["class", "method", "function"])  # fmt: skip
def test_a_layer_around_a_given_one_has_its_own_path(call, shared):
    class Net(nn.Module):
        layer: Any = jaxact.compress(LoRA)

        @nn.compact
        def __call__(self, x):
            for name in ("l0", "l1"):
                x = call(self.layer(Base(), shared, name=name), x)
            return x

    net = Net()
    variables = net.init(jax.random.key(0), data())
    loss = lambda v, x: net.apply(v, x).sum()
    keys = [r.key for r in jaxact.residuals(loss, variables, data()).rows]
    for name in ("l0", "l1"):
        assert f"Net/{name}/x" in keys
    assert all(k.startswith(("Net/l0", "Net/l1")) for k in keys)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"a": m}])
def test_a_call_may_return_a_module_without_variables_that_it_was_given(wrap):
    """It is a plain value there, but no less given than one with variables."""
    module = nn.Dense(3)
    take = lambda held: held["a"] if isinstance(held, dict) else held
    assert jaxact.compress(take)(wrap(module)) == module

"""A compressed NNX call leaves classes and attributes of its modules as they are.

Contract: inside the call a module is of its own class, equal layers have equal graphs,
and tools that replace `__call__` for a while work. Attributes that are no arrays change
after the compressed call as after the plain one.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxact
from support.wrapping import WIDTH, data, exact

pytestmark = pytest.mark.unoptimized


class Layers(nnx.Module):
    def __init__(self):
        make = lambda seed: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.layers = nnx.List([make(seed) for seed in range(2)])


class AskingForClasses(Layers):
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x)) if type(layer) is nnx.Linear else layer(x)
        return x


class ByClass(Layers):
    def __call__(self, x):
        for layer in self.layers:
            x = {nnx.Linear: nnx.tanh}[type(layer)](layer(x))
        return x


class WithOneGraph(Layers):
    def __call__(self, x):
        graph = nnx.graphdef(self.layers[0])
        assert all(nnx.graphdef(layer) == graph for layer in self.layers)
        states = [nnx.state(layer) for layer in self.layers]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        step = lambda x, state: (nnx.gelu(nnx.merge(graph, state)(x)), None)
        return jax.lax.scan(step, x, stacked)[0]


class AsStackedTrees(Layers):
    def __call__(self, x):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.layers)
        return jax.lax.scan(lambda x, m: (nnx.gelu(m(x)), None), x, stacked)[0]


class Guarded(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __setattr__(self, name, value):
        if name != "inner":
            raise AttributeError(f"{name} cannot change")
        super().__setattr__(name, value)

    def __call__(self, x):
        return self.inner(x)


class HoldingOne(nnx.Module):
    def __init__(self):
        self.guarded = Guarded()

    def __call__(self, x):
        return nnx.gelu(self.guarded(x))


@pytest.mark.parametrize(
    "cls", [AskingForClasses, ByClass, WithOneGraph, AsStackedTrees, HoldingOne]
)
def test_modules_keep_their_classes_inside_of_a_call(cls):
    assert (jaxact.compress(cls)()(data()) == cls()(data())).all()


class Inner(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(WIDTH) / 2)

    def __call__(self, x):
        return nnx.gelu(x @ self.kernel[...])


T = typing.TypeVar("T")


class Generic(Inner, typing.Generic[T]):
    pass


def nested():
    """A class that holds another. New ones: Flax's tools change classes for good."""

    class Own(Inner):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Nested(nnx.Module):
        def __init__(self):
            self.inner = Own()

        def __call__(self, x):
            return self.inner(x)

    return Nested


@pytest.mark.parametrize(
    "show",
    [
        lambda module: nnx.tabulate(module, data()),
        lambda module: nnx.capture(
            module, nnx.Intermediate, method_outputs=nnx.Intermediate
        )(data()),
    ],
    ids=["tabulate", "capture"],
)
def test_tools_that_replace_calls(show):
    """They left their own `__call__` behind: training failed from then on."""
    plain = nested()
    compressed = jaxact.compress(plain)
    compressed()(data())
    show(compressed())
    assert (compressed()(data()) == plain()(data())).all()


def test_what_tools_see_inside_after_a_call():
    see = lambda m: nnx.capture(m, nnx.Intermediate, method_outputs=nnx.Intermediate)
    plain = nested()
    compressed = jaxact.compress(plain)
    compressed()(data())
    captured, wanted = see(compressed())(data())[1], see(plain())(data())[1]
    assert captured.keys() == wanted.keys()


def test_a_call_that_is_replaced_later():
    plain = nested()
    compressed = jaxact.compress(plain)
    compressed()(data())
    type(plain().inner).__call__ = lambda self, x: 7 * x
    assert (compressed()(data()) == 7 * data()).all()


def test_no_class_is_left_changed():
    before = {cls: dict(vars(cls)) for cls in (nnx.Linear, Inner, Derived)}
    jaxact.compress(HoldingDerived)()(data())
    with pytest.raises(TypeError):
        jaxact.compress(HoldingDerived)()(data()[:, :1])
    assert before == {cls: dict(vars(cls)) for cls in before}


class Derived(Inner):
    """Its call is another class's."""


class HoldingDerived(nnx.Module):
    def __init__(self):
        self.first, self.second = Inner(), Derived()

    def __call__(self, x):
        return self.second(self.first(x))


class Counting(nnx.Module):
    def __init__(self):
        self.calls, self.inner = 0, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.once = nnx.Variable(jnp.ones(WIDTH))
        self.last = nnx.data(None)

    def __call__(self, x):
        self.calls += 1
        self.name = f"call {self.calls}"
        if hasattr(self, "once"):
            x = x + self.once[...][None]
            del self.once
        self.last = nnx.Variable(x.mean())
        return self.inner(x) * self.calls


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jitted"])
def test_attributes_that_are_no_arrays(jit):
    """A counter stayed 0, so each call was scaled as the first: silently."""
    run = jit(lambda module, x: module(x))
    modules = Counting(), exact(Counting)()
    for _ in range(3):
        wanted, got = (run(module, data()) for module in modules)
        assert jnp.allclose(got, wanted, rtol=1e-6)
    for module in modules:
        assert (module.calls, module.name) == (3, "call 3")
        assert not hasattr(module, "once")
        assert jnp.allclose(module.last[...], data().mean(), rtol=1e-5)


class Plain(nnx.Module, pytree=False):
    def __init__(self):
        self.layers = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        return nnx.gelu(self.layers[0](x))


@pytest.mark.parametrize(
    "make", [jaxact.compress(Plain), lambda: jaxact.compress(Plain())]
)
def test_modules_that_are_no_pytrees(make):
    loss = lambda module, x: module(x).sum()
    assert nnx.jit(nnx.grad(loss))(make(), data())


def test_a_step_that_is_not_jitted_counts_as_a_jitted_one():
    """Without `nnx.jit` its update was dropped, and with it the whole gradient."""

    def step(module, x):
        gradient = nnx.grad(lambda m: (m(x) ** 2).sum())(module)
        nnx.update(module, jax.tree.map(jnp.subtract, nnx.state(module), gradient))

    args = Plain(), data()
    assert jaxact.count_flops(step, *args) == jaxact.count_flops(nnx.jit(step), *args)
    assert jaxact.count_flops(step, *args) >= 2 * 2 * data().size * WIDTH
    assert jaxact.memory(step, *args) == jaxact.memory(nnx.jit(step), *args)


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_variables_that_are_references_are_refused(kind):
    """A call left tracers in place of the module's weights."""
    with nnx.var_defaults(**{kind: True}):
        module = jaxact.compress(nested())()
    with pytest.raises(TypeError, match=f"reference .{kind}=True"):
        module(data())


@pytest.mark.parametrize(
    "maker", [functools.partial(Inner), Generic[int]], ids=["partial", "alias"]
)
def test_makers_of_modules_are_refused(maker):
    """The modules that they made were not compressed, and nothing said so."""
    with pytest.raises(TypeError, match="it makes modules of the class"):
        jaxact.compress(maker)


class Maker(nnx.Module):
    @classmethod
    def made(cls):
        return Inner()

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("maker", "args"),
    [(Maker.made, ()), (lambda rngs: Inner(), (nnx.Rngs(0),)), (lambda: Inner(), ())],
    ids=["classmethod", "with_rngs", "lambda"],
)
def test_calls_that_make_modules_are_refused(maker, args):
    """Their modules were not compressed, and nothing said so."""
    with pytest.raises(TypeError, match=r"Compress the class, compress\(Inner\)"):
        jaxact.compress(maker)(*args)


def test_a_call_may_return_a_module_that_it_was_given():
    returned = jaxact.compress(lambda modules: modules["a"])({"a": Inner()})
    assert isinstance(returned, Inner)

"""The class that `compress` makes below an NNX module's.

Contract: the user's `__init_subclass__` runs for classes that the user writes, and not
for this one; in all else it is a subclass as any other.
"""

import copy
import pickle
import typing

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import bridge

import jaxact
from support.linen_modules import same
from support.wrapping import WIDTH, data, exact

REGISTRY: dict[str, type] = {}


class Registered(nnx.Module):
    """A base that knows its subclasses by name."""

    def __init_subclass__(cls, *, kind, **options):
        super().__init_subclass__(**options)
        assert kind not in REGISTRY, f"{kind} twice"
        REGISTRY[kind] = cls
        cls.kind = kind


class Block(Registered, kind="block"):
    def __init__(self):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class NoTree(Registered, kind="no tree", pytree=False):
    def __init__(self):
        self.layers = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        return jnp.tanh(self.layers[0](x))


Small = jaxact.compress(Block)


@pytest.mark.parametrize("cls", [Block, NoTree])
@pytest.mark.parametrize("make", [
    lambda cls: exact(cls)(), lambda cls: exact(cls())
], ids=["class", "instance"])  # fmt: skip
def test_a_class_with_a_hook_that_requires_a_keyword(cls, make):
    module, plain = make(cls), cls()
    assert isinstance(module, cls) and module.kind == cls.kind
    assert REGISTRY[cls.kind] is cls
    loss = lambda module, x: module(x).sum()
    wanted = nnx.grad(loss)(plain, data())
    assert same(module(data()), plain(data()))
    assert same(
        jax.tree.leaves(nnx.grad(loss)(module, data())), jax.tree.leaves(wanted)
    )


def test_the_graph_and_copies_are_those_of_a_module():
    module = Small()
    graph, state = nnx.split(module)
    assert same(state, nnx.state(Block()))
    for other in (
        nnx.merge(graph, state),
        nnx.clone(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
    ):
        assert isinstance(other, Block) and other.kind == "block"
        assert same(other(data()), module(data()))
    assert len(jax.tree.leaves(module)) == len(jax.tree.leaves(Block()))


def test_hooks_run_for_a_subclass_of_the_compressed_class():
    with pytest.raises(TypeError, match="kind"):

        class Forgotten(Small):
            pass

    class Below(Small, kind="below"):
        pass

    assert REGISTRY["below"] is Below and Below.kind == "below" != Small.kind
    assert same(Below()(data()), Block()(data()))


def test_a_subclass_of_the_compressed_class_is_compressed_as_well():
    """It has the base that skips hooks, and gets one more."""

    class Twice(Small, kind="twice"):
        def __call__(self, x):
            return super().__call__(x) * 2

    for module in (exact(Twice)(), exact(Twice())):
        assert isinstance(module, Twice) and module.kind == "twice"
        assert same(module(data()), 2 * Block()(data()))
    assert REGISTRY["twice"] is Twice


class Bridged(bridge.Module):
    """Flax's own hook takes no keywords."""

    @bridge.compact
    def __call__(self, x):
        shape = (WIDTH, WIDTH)
        kernel = self.param("kernel", nnx.initializers.lecun_normal(), shape)
        return jnp.tanh(x @ kernel)


def test_a_module_that_bridges_linen_and_nnx():
    plain, small = Bridged(), jaxact.compress(Bridged)()
    variables = plain.init(jax.random.key(0), data())
    assert same(small.init(jax.random.key(0), data()), variables)
    assert same(small.apply(variables, data()), plain.apply(variables, data()))
    rows = jaxact.residuals(lambda v: small.apply(v, data()).sum(), variables).rows
    assert [r.key for r in rows] == ["Bridged/x", "Bridged/tanh.derivative"]


class Late:
    """NNX calls the hooks behind its own class in its turn."""

    def __init_subclass__(cls, *, late, **options):
        super().__init_subclass__(**options)


class HookedLate(nnx.Module, Late, late=True):
    def __call__(self, x):
        return jnp.tanh(x)


def test_a_class_that_refuses_subclasses_is_refused_with_another_way():
    with pytest.raises(TypeError, match=r"HookedLate refuses it.*@jaxact\.compress"):
        jaxact.compress(HookedLate)


T = typing.TypeVar("T")


class Generic(Block, typing.Generic[T], kind="generic"):
    pass


def test_a_generic_class_stays_generic():
    small = jaxact.compress(Generic)
    assert typing.get_args(small[int]) == (int,)
    assert isinstance(small[int](), small)

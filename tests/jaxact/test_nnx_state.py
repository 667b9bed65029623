"""State of NNX objects wherever a call finds them: none of its updates is lost.

Contract: what a call changes in its arguments is changed after the compressed call as
after the plain one, to the last bit, whether the object is a module, a `Variable`, an
`Rngs` or another `nnx.Pytree`, and whether it is an argument or lies in a list, tuple,
dict or registered dataclass.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxact
from jaxact import Exact, Policy, Quantize
from support.nnx_modules import Block, same
from support.variants import mostly_thorough, thorough
from support.wrapping import WIDTH, data

pytestmark = pytest.mark.unoptimized

EXACT = Policy(default=Exact())
PACKED = Policy(default=Quantize(bits=2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Home:
    """A kind of container: `hold` puts a block and an array in it."""

    name: str
    hold: object
    take: object

    def __str__(self):
        return self.name


HOMES = (
    Home("list", lambda m, a: [m, a], lambda c: c),
    Home("tuple", lambda m, a: (None, (m, a)), lambda c: c[1]),
    Home("dict", lambda m, a: {"b": a, "a": m}, lambda c: (c["a"], c["b"])),
    Home("dataclass", Pair, lambda c: (c.first, c.second)),
    Home("nnx.List", lambda m, a: nnx.List([m, nnx.Variable(a)]), lambda c: c),
)
homes = pytest.mark.parametrize("home", mostly_thorough(HOMES, ("dict", "nnx.List")))


def in_home(home):
    def f(container, x):
        block, array = home.take(container)
        return block(x) * array[...][None]

    return f


def with_seeds(tree):
    """Keys as numbers, so that they can be compared."""

    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(number, tree)


def leaves(module):
    state = nnx.state(module)
    return [np.asarray(x) for x in jax.tree.leaves(with_seeds(nnx.to_pure_dict(state)))]


def equal(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x, y) for x, y in zip(a, b, strict=True)
    )


@homes
@pytest.mark.parametrize("by_keyword", [False, True])
def test_modules_in_containers_keep_their_updates(home, by_keyword):
    f = in_home(home)
    outcomes = []
    for function in (f, jaxact.compress(f, policy=PACKED)):
        block = Block(nnx.Rngs(0))
        container = home.hold(block, jnp.ones(WIDTH))
        outputs = [
            function(container=container, x=data(0))
            if by_keyword
            else function(container, data(0))
            for _ in range(2)
        ]
        assert not np.array_equal(*outputs)  # a dropout mask for each call
        outcomes.append(([np.asarray(y) for y in outputs], leaves(block)))
    (plain_out, plain_state), (out, state) = outcomes
    assert equal(out, plain_out)
    assert equal(state, plain_state)


@thorough
@homes
def test_gradients_of_modules_in_containers(home):
    f = in_home(home)
    gradients = []
    for function in (f, jaxact.compress(f, policy=EXACT)):
        block = Block(nnx.Rngs(0))

        def loss(block, scale, x, function=function):
            return (function(home.hold(block, scale), x) ** 2).sum()

        with jax.disable_jit():  # equal bits need equal programs
            gradient = nnx.grad(loss, argnums=(0, 2))(block, jnp.ones(WIDTH), data(0))
        gradients.append(jax.tree.leaves(gradient))
    assert same(*gradients)


def test_what_lies_beside_a_module_may_be_stored_compressed():
    def f(pair, w):
        return pair["m"](jnp.tanh(pair["x"] @ w))

    def noise(policy):
        pair = {"m": nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), "x": data(0)}
        c = jaxact.compress(f, policy=policy)
        return jax.grad(lambda w: c(pair, w).sum())(jnp.eye(WIDTH))

    assert not np.array_equal(noise(PACKED), noise(EXACT))


def noisy(rngs, x):
    return x * jax.random.normal(rngs.params(), x.shape)


def counted(counter, x):
    counter[...] += 1
    return 2 * x


class Counter(nnx.Pytree):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))


def counted_inside(counter, x):
    counter.count[...] += 1
    return 2 * x


OBJECTS = {
    "rngs": (noisy, lambda: nnx.Rngs(0), lambda r: r.params.count[...]),
    "stream": (
        lambda s, x: x * jax.random.normal(s(), x.shape),
        lambda: nnx.Rngs(0).params,
        lambda s: s.count[...],
    ),
    "variable": (counted, lambda: nnx.Variable(jnp.array(0)), lambda c: c[...]),
    "pytree": (counted_inside, Counter, lambda c: c.count[...]),
    "variables in a list": (
        lambda cs, x: counted(cs[1], x),
        lambda: [nnx.Variable(jnp.array(5)), nnx.Variable(jnp.array(0))],
        lambda cs: cs[1][...],
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("jit", [False, True])
def test_objects_without_a_module_keep_their_updates(kind, jit):
    f, make, count = OBJECTS[kind]
    compressed, plain = make(), make()
    wrap = nnx.jit if jit else (lambda f: f)
    g = wrap(jaxact.compress(f, policy=PACKED))
    x = jnp.ones(4)
    for _ in range(3):
        assert np.array_equal(g(compressed, x), wrap(f)(plain, x))
    assert count(compressed) == count(plain) == 3


@thorough
def test_a_module_in_a_container_and_as_an_argument_is_one():
    def f(modules, block, x):
        return block(modules["a"][0](x))

    outcomes = []
    for function in (f, jaxact.compress(f, policy=EXACT)):
        block = Block(nnx.Rngs(0))

        def loss(block, x, function=function):
            return function({"a": [block], "b": block}, block, x).sum()

        with jax.disable_jit():
            gradient = nnx.grad(loss)(block, data(0))
        outcomes.append((jax.tree.leaves(gradient), leaves(block)))
    assert same(outcomes[0][0], outcomes[1][0])
    assert equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.thorough
def test_measurements_keep_the_updates():
    block = Block(nnx.Rngs(0))
    layer = jaxact.compress(lambda blocks, x: blocks[0](x), policy=PACKED)

    def loss(blocks, x):
        return (layer(blocks, x) ** 2).sum()

    table = jaxact.residuals(loss, [block], data(0))
    assert table.rows
    before = leaves(block)
    measured = jaxact.sensitivity(loss, [block], data(0))
    assert measured.rows
    watched = jaxact.telemetry(loss)
    watched(watched.probe([block], data(0)), [block], data(0))
    assert not equal(leaves(block), before)
    reference = Block(nnx.Rngs(0))
    reference(data(0))
    assert equal(leaves(block), leaves(reference))


def test_the_noise_stream_moves_on_where_state_changes_too():
    block = Block(nnx.Rngs(0, jaxact=1))
    f = jaxact.compress(lambda blocks, x: blocks[0](x), policy=PACKED)
    start = int(block.noise.count[...])
    for _ in range(3):
        f([block], data(0))
    assert int(block.noise.count[...]) == start + 3


def test_named_activations_hold_beside_modules():
    def f(m, a, b):
        return m(jnp.tanh(a * b))

    m = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    wrong = jaxact.compress(f, activations="c")
    with pytest.raises(ValueError, match="no argument"):
        wrong(m, data(0), data(1))

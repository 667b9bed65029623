"""`compress` on Flax NNX classes, instances, methods and functions of modules.

Contract: outputs, statistics and RNG counts are those of the plain module, to the last
bit, op by op and jitted, in each of NNX's modes; so are gradients with
Policy(default=Exact()). With codecs they are unbiased over the keys of an RNG stream
'jaxact' in the module. Every law runs over `VARIANTS`. What "jitted" and "op by op"
mean, and why, is said in test_linen.py.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import stats

import jaxact
from jaxact import Exact, Policy

WIDTH, BATCH = 8, 32
BITS = 3
AS_WRITTEN = {"xla_backend_optimization_level": 0}
# The unbiasedness test fails with at most this probability for each variant.
FAILURE = 1e-6
KEYS = 64
PROJECTIONS = 8


class Block(nnx.Module):
    """Parameters, statistics, dropout; linear in each residual."""

    def __init__(self, rngs, width=WIDTH):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.noise = rngs["jaxact"].fork() if "jaxact" in rngs else None

    def __call__(self, x):
        h = self.dropout(nnx.relu(self.norm(self.up(x))))
        return x + self.down(h)


class Stack(nnx.Module):
    """Two blocks; `call` applies one."""

    def __init__(self, block, rngs, call=lambda layer, x: layer(x)):
        self.layers = nnx.List([block(rngs) for _ in range(2)])
        self.call = call

    def __call__(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Stacked(nnx.Module):
    """Three blocks with stacked state; `call` applies them."""

    def __init__(self, block, rngs, call):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return block(rngs)

        self.layers = create(rngs)
        self.call = call

    def __call__(self, x):
        return self.call(self.layers, x)


class Twice(nnx.Module):
    """One block, called twice."""

    def __init__(self, block, rngs):
        self.shared = block(rngs)

    def __call__(self, x):
        return self.shared(self.shared(x))


def scan(layers, x):
    body = nnx.scan(
        lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
    )
    return body(layers, x)


def vmap(layers, x):
    each = jnp.stack([x, 2 * x, 3 * x])
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, 0))(layers, each)


def remat(layer, x):
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


def methods(wrap, rngs):
    class Decorated(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = Block(rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        @wrap
        def encode(self, x, *, mode):
            return nnx.relu(self.first(x)) if mode == "relu" else x

        @wrap
        def decode(self, h, extra=None):
            return {"h": self.last(h), "none": extra}

        def __call__(self, x):
            return self.decode(self.encode(x, mode="relu"))

    return Decorated(rngs)


def keyword(wrap):
    """Calls a compressed function of an array and, by keyword, a module."""
    f = wrap(lambda x, *, layer: layer(x))
    return lambda layer, x: f(x, layer=layer)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compress: `make(wrap, rngs)` is a module compressed by `wrap`."""

    name: str
    make: Callable[[Any, nnx.Rngs], nnx.Module]

    def __str__(self):
        return self.name


VARIANTS = [
    Variant("class", lambda wrap, rngs: wrap(Block)(rngs)),
    Variant("instance", lambda wrap, rngs: wrap(Block(rngs))),
    Variant("stack", lambda wrap, rngs: Stack(wrap(Block), rngs)),
    Variant("nested", lambda wrap, rngs: wrap(Stack)(Block, rngs, wrap(apply))),
    Variant("shared", lambda wrap, rngs: Twice(wrap(Block), rngs)),
    Variant("methods", methods),
    Variant("function", lambda wrap, rngs: Stack(Block, rngs, wrap(apply))),
    Variant("keyword", lambda wrap, rngs: Stack(Block, rngs, keyword(wrap))),
    Variant(
        "bound-method",
        lambda wrap, rngs: Stack(Block, rngs, lambda m, x: wrap(m.__call__)(x)),
    ),
    Variant("inside-scan", lambda wrap, rngs: Stacked(wrap(Block), rngs, scan)),
    Variant("around-scan", lambda wrap, rngs: Stacked(Block, rngs, wrap(scan))),
    Variant("inside-vmap", lambda wrap, rngs: Stacked(wrap(Block), rngs, vmap)),
    Variant("around-vmap", lambda wrap, rngs: Stacked(Block, rngs, wrap(vmap))),
    Variant("inside-remat", lambda wrap, rngs: Stack(wrap(Block), rngs, remat)),
    Variant("around-remat", lambda wrap, rngs: Stack(Block, rngs, wrap(remat))),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
# Modes change how state is split and merged: those that differ in it.
SOME = ("class", "instance", "function", "keyword", "around-scan", "inside-remat")
# Where the stream is found differs in these.
SEEDED = ("class", "shared", "methods", "inside-scan", "around-scan", "around-vmap")
some_variants = pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.name in SOME], ids=str
)
MODES = {
    "graph": contextlib.nullcontext,
    "no-graph-updates": lambda: nnx.set_graph_updates(False),
    "tree": lambda: nnx.set_graph_mode(False),
}


def apply(layer, x):
    return layer(x)


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


def plain(target):
    return target


def exact(target):
    return jaxact.compress(target, policy=Policy(default=Exact()))


def packed(target):
    return jaxact.compress(target, policy=Policy(BITS))


def data(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))


def bits(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def same(a, b):
    """Whether two trees have one structure, one dtype each, and the same bits."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        i.dtype == j.dtype and np.array_equal(bits(i), bits(j))
        for i, j in zip(x, y, strict=True)
    )


def split(model):
    """The graph definition, parameters and other state, the latter as plain trees."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def stepper(model):
    """(params, rest, x) -> (loss, (outputs, rest)), gradients of params and x."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        def loss(params, x):
            inside = nnx.merge(graphdef, params, rest, copy=True)
            y = inside(x)
            new = nnx.split(inside, nnx.Param, ...)[2]
            floats = jax.tree.leaves(y)
            return sum(jnp.square(f).sum() for f in floats), (y, new)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    return step, params, rest


def two_steps(model, run=lambda f: jax.jit(f, compiler_options=AS_WRITTEN)):
    """What two steps from one set of parameters give; other state moves on."""
    step, params, rest = stepper(model)
    step = run(step)
    first = step(params, rest, data())
    return first, step(params, first[0][1][1], data(1))


@functools.cache
def reference(variant, mode):
    """What two steps of the plain module give, in the mode that is set."""
    return two_steps(variant.make(plain, nnx.Rngs(0)))


def check_every_bit(variant, mode):
    wanted = reference(variant, mode)
    assert same(two_steps(variant.make(exact, nnx.Rngs(0))), wanted)
    got = two_steps(variant.make(packed, nnx.Rngs(0)))
    assert same([values for values, _ in got], [values for values, _ in wanted])
    assert not same(got, wanted)


@every_variant
def test_loss_outputs_state_and_exact_gradients_keep_every_bit(variant):
    check_every_bit(variant, "graph")


@some_variants
@pytest.mark.parametrize("mode", ["no-graph-updates", "tree"])
def test_every_bit_is_kept_in_other_modes(variant, mode):
    with MODES[mode]():
        check_every_bit(variant, mode)


@pytest.mark.parametrize("variant", VARIANTS[:1], ids=str)  # slow
def test_op_by_op_every_bit_is_kept(variant):
    with jax.disable_jit():
        plainly, exactly, small = (
            two_steps(variant.make(wrap, nnx.Rngs(0)), lambda f: f)
            for wrap in (plain, exact, packed)
        )
    assert same(exactly, plainly)
    assert same([values for values, _ in small], [values for values, _ in plainly])


@every_variant
def test_an_eager_call_keeps_every_bit_and_updates_the_module(variant):
    wanted, got = (variant.make(wrap, nnx.Rngs(0)) for wrap in (plain, packed))
    for seed in range(2):
        assert same(got(data(seed)), wanted(data(seed)))
    assert same(split(got)[1:], split(wanted)[1:])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in SEEDED], ids=str)
def test_gradients_are_unbiased_over_keys(variant):
    # Student's t of the mean over keys, on random directions of the whole gradient.
    # Rounding noise is a sum of many bounded terms, so projections are near normal.
    flat = lambda g: np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)])
    model = variant.make(packed, nnx.Rngs(0, jaxact=1))
    step, params, rest = stepper(model)
    step = jax.jit(step, compiler_options=AS_WRITTEN)

    def gradient(seed):
        def replace(path, x):
            if "noise" not in jax.tree_util.keystr(path) or x.dtype == jnp.uint32:
                return x
            return jax.random.split(jax.random.key(seed), x.shape)

        keyed = jax.tree_util.tree_map_with_path(replace, rest)
        return flat(step(params, keyed, data())[1])

    first, again, other = (gradient(seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    wanted = flat(reference(variant, "graph")[0][1]).astype(np.float64)
    error = np.stack([gradient(seed) for seed in range(KEYS)]) - wanted
    directions = np.random.default_rng(0).standard_normal((PROJECTIONS, wanted.size))
    projected = error @ directions.T
    spread = projected.std(0, ddof=1) / np.sqrt(KEYS)
    # The mean is known to a few percent of the gradient, so the test can fail.
    scale = np.linalg.norm(wanted)
    assert (spread > 0).all() and (spread < 0.1 * scale).all()
    bound = stats.t.isf(FAILURE / PROJECTIONS / 2, KEYS - 1)
    assert (abs(projected.mean(0)) < bound * spread).all()


@pytest.mark.parametrize("options", [None, {}, {"policy": Policy(2)}], ids=str)
def test_a_decorated_class_is_the_class_in_all_but_storage(options):
    small = jaxact.compress(Block, **(options or {}))
    if options is not None:
        small = jaxact.compress(**options)(Block)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(small, attribute) == getattr(Block, attribute)
    model = small(nnx.Rngs(0))
    assert isinstance(model, Block)
    assert same(split(model)[1:], split(Block(nnx.Rngs(0)))[1:])


def test_an_instance_shares_its_state(mode):
    block = Block(nnx.Rngs(0))
    small, before = packed(block), block.norm.mean.get_value()
    assert small.up is block.up and type(small).__name__ == "Block"
    small(data())
    assert not np.array_equal(block.norm.mean.get_value(), before)
    assert int(block.dropout.rngs.count.get_value()) == 1
    block.down.kernel.set_value(jnp.zeros_like(block.down.kernel.get_value()))
    assert same(small(data()), data() + block.down.bias.get_value()[None])


def test_the_jaxact_stream_moves_on_with_each_call(mode):
    block = jaxact.compress(Block, policy=Policy(BITS))(nnx.Rngs(0, jaxact=1))
    for count in range(3):
        assert int(block.noise.count.get_value()) == count
        assert int(block.dropout.rngs.count.get_value()) == count
        block(data())


def test_a_rounding_key_decides_the_noise(mode):
    class Smooth(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

    small = packed(Smooth())
    function = functools.partial(packed(apply), Smooth())

    def gradient(call, seed):
        key = jax.random.key(seed)
        return jax.grad(lambda x: call(x, rounding_key=key).sum())(data())

    for call in (small, function):
        assert same(gradient(call, 0), gradient(call, 0))
        assert not same(gradient(call, 0), gradient(call, 1))


def test_a_module_that_does_not_change_may_belong_to_an_outer_trace(mode):
    block = Block(nnx.Rngs(0))
    block.eval()

    def gradient(f):
        return jax.grad(lambda x: jnp.square(f(x)).sum())(data())

    with jax.disable_jit():
        assert same(gradient(exact(block)), gradient(block))


def test_sown_values_come_out(mode):
    class Sower(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            h = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", h)
            return nnx.tanh(h)

    wanted, got = (
        nnx.capture(wrap(Sower)(nnx.Rngs(0)), nnx.Intermediate)(data())
        for wrap in (plain, packed)
    )
    assert same(wanted, got)


def test_state_of_one_loads_into_the_other(mode):
    trained = packed(Block)(nnx.Rngs(0))
    trained(data())
    state = nnx.to_pure_dict(nnx.state(trained))
    fresh = Block(nnx.Rngs(1))
    restored = nnx.state(fresh)
    nnx.replace_by_pure_dict(restored, state)
    nnx.update(fresh, restored)
    assert same(fresh(data(1)), trained(data(1)))
    assert same(split(fresh)[1:], split(trained)[1:])


def test_training_with_an_optimizer():
    def train(wrap):
        model = Stack(wrap(Block), nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def update(model, optimizer, x):
            loss = lambda model: jnp.square(model(x) - 1.0).mean()
            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses = [float(update(model, optimizer, data())) for _ in range(4)]
        return losses, split(model)[1:]

    losses, trained = train(plain)
    exact_losses, exactly_trained = train(exact)
    # Compiled with fusion, so to a few units in the last place of each sum.
    np.testing.assert_allclose(exact_losses, losses, rtol=1e-5)
    assert jax.tree.structure(exactly_trained) == jax.tree.structure(trained)
    packed_losses, _ = train(packed)
    np.testing.assert_allclose(packed_losses[0], losses[0], rtol=1e-5)
    assert packed_losses[-1] < packed_losses[0]


@pytest.mark.parametrize("request_, error, match", [
    (lambda: jaxact.compress(Block, activations="x"), ValueError, "plain functions"),
    (lambda: jaxact.compress(Block, policy=2), TypeError, r"Policy\(bits=2\)"),
    (
        lambda: jaxact.compress(type("Bare", (nnx.Module,), {"__call__": None})),
        TypeError,
        "has no __call__",
    ),
], ids=["activations", "policy", "no-call"])  # fmt: skip
def test_wrong_requests_say_what_to_write(request_, error, match):
    with pytest.raises(error, match=match):
        request_()

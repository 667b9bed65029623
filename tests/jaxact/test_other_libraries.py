"""Equinox and Haiku, through functions and methods: neither needs code of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, Policy

pytestmark = pytest.mark.unoptimized
WIDTH = 64
X = jax.random.normal(jax.random.key(1), (32, WIDTH))
KEY = jax.random.key(0)
EXACT = Policy(default=Exact())


def leaves(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def equal(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def relative_error(a, b):
    pairs = [(jnp.ravel(x), jnp.ravel(y)) for x, y in zip(a, b, strict=True)]
    a, b = (jnp.concatenate(part) for part in zip(*pairs, strict=True))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def equinox_blocks():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=first)
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=second)

        def __call__(self, x):
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))

    return eqx, Block


def compressed_method(block, policy):
    class Small(block):
        @jaxact.compress(policy=policy, activations="x")
        def __call__(self, x):
            return super().__call__(x)

    return Small(KEY), lambda m, x: m(x)


def compressed_function(block, policy):
    call = lambda m, x: m(x)
    return block(KEY), jaxact.compress(call, policy=policy, activations="x")


def compressed_instance(block, policy):
    return block(KEY), lambda m, x: jaxact.compress(m, policy=policy)(x)


WAYS = {f.__name__: f for f in (compressed_method, compressed_function)}
WAYS["compressed_instance"] = compressed_instance
LIFTS = {
    "eager": lambda eqx, f: f,
    "filter_jit": lambda eqx, f: eqx.filter_jit(f),
    "filter_checkpoint": lambda eqx, f: eqx.filter_checkpoint(f),
}


@pytest.mark.parametrize("lift", LIFTS)
@pytest.mark.parametrize("way", WAYS)
def test_equinox(way, lift):
    eqx, block = equinox_blocks()

    def values_and_gradients(model, call):
        run = LIFTS[lift](eqx, call)
        gradient = eqx.filter_value_and_grad(lambda m, x: (run(m, x) ** 2).mean())
        return run(model, X), gradient(model, X)

    plain, wanted = values_and_gradients(block(KEY), lambda m, x: m(x))
    value, exact = values_and_gradients(*WAYS[way](block, EXACT))
    equal([value, exact], [plain, wanted])
    value, (loss, small) = values_and_gradients(*WAYS[way](block, Policy(bits=4)))
    equal([value, loss], [plain, wanted[0]])
    # Steps of 1/15 of some 6 deviations, 0.12 in rms, in the inputs of both products.
    assert 1e-3 < relative_error(leaves(small), leaves(wanted[1])) < 0.2


def test_equinox_tables():
    eqx, block = equinox_blocks()
    model, _ = compressed_method(block, Policy(bits=4))
    table = jaxact.residuals(lambda m: (m(X) ** 2).mean(), model)
    stored = [row for row in table.rows if not row.is_outside]
    assert [row.shape for row in stored] == [X.shape, (32, 256), (32, 256)]
    assert all(row.key.startswith("Small") for row in stored)
    eqx.filter_jit(eqx.filter_grad(lambda m: (m(X) ** 2).mean()))(model)


def test_an_equinox_class_is_refused_with_the_line_to_write():
    _, block = equinox_blocks()
    with pytest.raises(TypeError, match="decorate its `__call__`, by @jaxact.*An inst"):
        jaxact.compress(block)


def loss_of_mlp(model, x):
    layer = jaxact.compress(lambda m, x: jax.vmap(m)(x), activations="x")
    return (layer(model, x) ** 2).mean()


def test_memory_takes_equinox_gradients():
    """They have no hash, which `jax.jit` reads."""
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.Linear(WIDTH, WIDTH, key=KEY)
    step = eqx.filter_grad(loss_of_mlp)
    found = jaxact.memory(step, layer, X)
    assert found == jaxact.memory(jax.jit(lambda m, x: step(m, x)), layer, X)


def test_reports_on_an_equinox_module_that_holds_functions():
    """As the guide to other libraries says."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, activation=jax.nn.gelu, key=KEY)
    arrays, static = eqx.partition(model, eqx.is_array)
    combined = lambda arrays: eqx.combine(arrays, static)
    step = jax.jit(lambda m, x: eqx.filter_grad(loss_of_mlp)(combined(m), x))
    found = jaxact.memory(step, arrays, X)
    # Weights and biases; gradients are as large.
    assert found.argument_bytes == 3 * 4 * (WIDTH**2 + WIDTH) + X.nbytes
    assert 0 <= found.output_bytes - 3 * 4 * (WIDTH**2 + WIDTH) <= 6 * 8  # pointers
    assert jaxact.compare({"4 bits": step}, arrays, X)["4 bits"].memory == found


def haiku_block():
    hk = pytest.importorskip("haiku")

    class Block(hk.Module):
        def __call__(self, x):
            h = jax.nn.gelu(hk.Linear(4 * WIDTH, name="up")(x))
            return x + hk.Linear(WIDTH, name="down")(h)

    return hk, Block


def test_a_haiku_class_is_refused_with_the_line_to_write():
    hk, block = haiku_block()
    with pytest.raises(TypeError, match=r"compress\(hk.transform\(f\).apply"):
        jaxact.compress(block)
    with pytest.raises(TypeError, match=r"Compress its apply: compress\(net.apply"):
        jaxact.compress(hk.transform(lambda x: block()(x)))


def test_haiku_around_apply():
    hk, block = haiku_block()
    net = hk.without_apply_rng(hk.transform(lambda x: block()(x)))
    params = net.init(KEY, X)
    gradient = lambda f: jax.grad(lambda p: (f(p, X) ** 2).mean())(params)
    for policy in (EXACT, Policy(bits=4)):
        small = jaxact.compress(net.apply, policy=policy, activations=1)
        equal(small(params, X), net.apply(params, X))
        error = relative_error(leaves(gradient(small)), leaves(gradient(net.apply)))
        assert error == 0 if policy is EXACT else 1e-3 < error < 0.2


def test_haiku_by_block():
    """Each block's parameters are lifted out of its compressed call."""
    hk, block = haiku_block()
    policy = Policy(bits=4)

    def compressed(x, name):
        inner = hk.without_apply_rng(hk.transform(lambda x: block(name="block")(x)))
        params = hk.lift(inner.init, name=name)(hk.maybe_next_rng_key(), x)
        with jax.named_scope(name):
            small = jaxact.compress(inner.apply, policy=policy, activations=1)
            return small(params, x)

    def forward(x):
        for i in range(2):
            x = compressed(x, f"layer{i}")
        return (x**2).mean()

    net = hk.transform(forward)
    params = net.init(KEY, X)
    assert sorted(params)[0].startswith("layer0")
    table = jaxact.residuals(lambda p: net.apply(p, KEY, X), params)
    stored = [row for row in table.rows if not row.is_outside]
    assert len(stored) == 6 and len({row.key for row in stored}) == 6
    parts = [row.key.partition("/")[0] for row in stored]
    assert parts == ["layer0"] * 3 + ["layer1"] * 3
    assert all(
        jnp.isfinite(g).all() for g in leaves(jax.grad(net.apply)(params, KEY, X))
    )

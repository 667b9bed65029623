"""Networks that scan over equal blocks compute what the unrolled ones do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.variants import thorough

pytest.importorskip("flax")
pytestmark = pytest.mark.unoptimized


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def renamed(tree, name, first, depth):
    """Parameters of blocks `first` and on, as those of one scanned block."""
    blocks = [tree.pop(f"{name}_{first + i}") for i in range(depth)]
    return tree | {f"{name}_{first}": stacked(blocks)}


@thorough
def test_a_scanned_resnet(load):
    """In float32; a stage is a block and two scanned ones."""
    resnet = load("models.resnet")
    net = functools.partial(
        resnet.ResNet, 3, (4,), 3, block=resnet.Bottleneck, dtype=jnp.float32
    )
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    init = lambda net: jax.jit(lambda: net.init(jax.random.key(1), images, True))
    variables = init(net())()
    # The last norm of a block starts as zero, which would hide the block.
    variables = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        variables,
    )
    moved = {k: renamed(dict(v), "Bottleneck", 1, 2) for k, v in variables.items()}
    scanned = net(scanned=True)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(moved) == shapes(jax.eval_shape(init(scanned)))
    apply = lambda net, v: net.apply(v, images, True, mutable=["batch_stats"])
    run = jax.jit(apply, static_argnums=0)
    (wanted, wanted_norms), (y, norms) = run(net(), variables), run(scanned, moved)
    # Float32 sums of up to 144 terms of order 1, and a few norms: 1e-4 is far above.
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    wanted_norms = renamed(dict(wanted_norms["batch_stats"]), "Bottleneck", 1, 2)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, norms["batch_stats"], wanted_norms)


@thorough
def test_a_scanned_text_encoder(load):
    vit = load("models.vit")
    net = functools.partial(
        vit.TextEncoder,
        *(3,),
        vocabulary=11,
        width=8,
        layers=2,
        heads=2,
        dtype=jnp.float32,
    )
    tokens = jnp.arange(10).reshape(2, 5)
    variables = jax.jit(net().init)(jax.random.key(0), tokens)
    head = variables["params"]["Dense_0"]  # zeros, which would hide the network
    head["kernel"] = jax.random.normal(jax.random.key(1), head["kernel"].shape)
    moved = {"params": renamed(dict(variables["params"]), "Block", 0, 2)}
    run = jax.jit(lambda net, v: net.apply(v, tokens), static_argnums=0)
    wanted, y = run(net(), variables), run(net(scanned=True), moved)
    assert y.shape == (2, 3) and np.ptp(y) > 0.1
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_a_wide_bottleneck(load):
    """Its inner convolutions are wider, its output is not."""
    resnet = load("models.resnet")
    x = jnp.zeros((1, 4, 4, 16))
    init = functools.partial(resnet.Bottleneck(4, widening=2.5).init, train=True)
    params = jax.eval_shape(init, jax.random.key(0), x)["params"]
    assert params["Conv_1"]["kernel"].shape == (3, 3, 10, 10)
    assert params["Conv_2"]["kernel"].shape == (1, 1, 10, 16)

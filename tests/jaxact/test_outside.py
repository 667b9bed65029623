"""Tables tell where arrays are that no compressed call keeps: outside, or inside of a
checkpoint."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxact
from jaxact import Exact, Quantize

pytestmark = pytest.mark.unoptimized

P = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
X = jnp.ones((32, 64))


def mlp(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def test_lines_are_those_of_the_user():
    """They were lines in Flax's normalization and in optax's loss."""
    optax = pytest.importorskip("optax")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(nn.Dense(64)(x))

    layer, labels = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.zeros(len(X), int)
    net = Net()
    variables = net.init(jax.random.key(0), X)

    def loss(v, layer, x):
        logits = nnx.gelu(layer(net.apply(v, x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    with jax.numpy_dtype_promotion("standard"):  # as optax asks
        table = jaxact.residuals(loss, variables, layer, X)
    sources = {row.source for row in table.rows if row.source}
    assert len(sources) >= 4
    assert all(source.startswith("test_outside.py:") for source in sources), sources
    functions = {source.rpartition(".")[2] for source in sources}
    assert functions == {"loss)", "__call__)"}


def test_the_summary_says_where_bytes_are_outside():
    block = jaxact.compress(mlp, activations="x")

    def network(p, x):
        x = block(p, x)
        with jax.named_scope("Net/stem"):
            return jnp.sin(jnp.cos(x))

    table = jaxact.residuals(network, P, X)
    outside = 2 * X.nbytes  # the slopes of sin and of cos
    assert sum(row.stored_bytes for row in table.rows if row.is_outside) == outside
    assert "16 KiB of " in table.summary()
    assert "made in Net/stem: compress what reads them" in table.summary()
    all_inside = jaxact.residuals(jaxact.compress(network), P, X)
    assert "outside" not in all_inside.summary()


def test_arrays_outside_that_no_line_makes():
    """JAX traces its own functions once, for all the lines that call them."""
    packed = jaxact.compress(mlp, activations="x")
    noise = lambda y: jax.random.normal(jax.random.key(0), y.shape)
    loss = lambda p, x: (lambda y: (y * noise(y)).mean())(packed(p, x))
    summary = jaxact.residuals(loss, P, X).summary()
    assert "are kept outside compressed calls: compress what reads them" in summary


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("is_step", [False, True])
def test_a_checkpointed_call_stores_nothing(loops, is_step):
    """But while it is computed again. The table said that nothing is compressed."""
    packed = jaxact.compress(mlp, activations="x")
    inside = jaxact.residuals(packed, P, X)
    small = jax.checkpoint(packed)
    loss = lambda p, x: (small(p, x) if not loops else network(p, x)).sum()
    network = lambda p, x: lax.scan(lambda x, _: (small(p, x), None), x, None, 3)[0]
    if is_step:
        table = jaxact.residuals(jax.grad(loss), P, X, argnums=())
    else:
        table = jaxact.residuals(loss, P, X)
    assert [row.action for row in table.rows] == [Exact()] * loops  # its carry
    found = [(r.key, r.stored_bytes, r.action) for r in table.checkpointed]
    assert found == [(r.key, r.stored_bytes, r.action) for r in inside.rows]
    assert "nothing is compressed" not in str(table)
    assert f"{len(inside.rows)} more are packed while checkpoints" in table.summary()
    assert jaxact.ResidualTable.from_dict(table.to_dict()) == table


def test_a_call_that_a_custom_rule_differentiates():
    """As adjoints of differential equations do: each step is computed again."""
    packed = jaxact.compress(mlp, activations="x")
    f = jax.custom_vjp(packed)
    f.defvjp(lambda p, x: (f(p, x), (p, x)), lambda r, ct: jax.vjp(packed, *r)[1](ct))
    inside = jaxact.residuals(packed, P, X)
    for table in (
        jaxact.residuals(lambda p, x: f(p, x).sum(), P, X),
        jaxact.residuals(jax.grad(lambda p, x: f(p, x).sum()), P, X, argnums=()),
    ):
        assert table.stored_bytes == 0
        assert [r.key for r in table.checkpointed] == [r.key for r in inside.rows]
        assert f"{len(inside.rows)} more are packed" in table.summary()


def test_checkpointed_linen_blocks():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))

    one = jaxact.compress(Block)
    net = nn.Sequential([nn.remat(one)(), nn.remat(one)()])
    variables = net.init(jax.random.key(0), X)
    table = jaxact.residuals(lambda v, x: net.apply(v, x).sum(), variables, X)
    assert all(row.is_outside for row in table.rows)
    paths = [row.path.partition("/")[0] for row in table.checkpointed]
    assert paths == ["layers_0"] * 3 + ["layers_1"] * 3  # in the order of forward
    assert {row.action for row in table.checkpointed} == {Quantize(4)}
    assert "nothing is compressed" not in table.summary()
    plain = nn.Sequential([nn.remat(Block)(), nn.remat(Block)()])
    table = jaxact.residuals(lambda v, x: plain.apply(v, x).sum(), variables, X)
    assert table.checkpointed == () and "nothing is compressed" in table.summary()

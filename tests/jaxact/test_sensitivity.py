"""What rounding adds to the whole gradient: measured, predicted, allocated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxact
from jaxact import Exact, Offload, Policy, Quantize, Rule
from support.variants import mostly_thorough

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (64, 128))
WS = tuple(jax.random.normal(k, (128, 128)) / 12 for k in KEYS[1:4])
DRAWS = 48


def layer(w, x):
    return jax.nn.gelu(x @ w)


def network(policy):
    small = jaxact.compress(layer, activations="x", policy=policy)

    def loss(ws, x, key=None):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                drawn = None if key is None else jax.random.fold_in(key, number)
                x = small(w, x, rounding_key=drawn)
        return jnp.square(x).sum()

    return loss


def squared(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.square(x - y).sum() for x, y in pairs)


def error_of(loss, exact):
    """Mean squared error of the compressed gradient over rounding keys."""
    clean = jax.grad(exact)(WS, X)
    one = lambda key: squared(jax.grad(loss)(WS, X, key), clean)
    errors = jax.jit(jax.vmap(one))(jax.random.split(KEYS[5], DRAWS))
    return float(errors.mean()), float(errors.std() / np.sqrt(DRAWS))


EXACT = network(Policy(default=Exact()))
MEASURED = jaxact.sensitivity(network(Policy(bits=2)), WS, X, draws=24)


def test_keys_are_paths_and_names():
    assert {row.key for row in MEASURED.rows} == {
        f"layer{i}/{name}" for i in range(3) for name in ("x", "derivative/mul#3")
    }
    assert {(row.size, row.bits) for row in MEASURED.rows} == {(X.size, 2)}


@pytest.mark.parametrize("row", MEASURED.rows, ids=lambda row: row.key)
def test_one_residual_rounded_alone(row):
    """Against the compressed program that rounds only this one."""
    others = Policy(rules=(Rule(Quantize(2), key=row.key), Rule(Exact())))
    found, deviation = error_of(network(others), EXACT)
    # Both are means, of 24 and of DRAWS draws; 6 deviations: below 1e-8 for each row.
    limit = 6 * deviation * np.sqrt(1 + DRAWS / 24)
    assert abs(row.error(2) - found) < limit, (row.error(2), found, limit)
    assert limit < 0.4 * found


def test_the_signal_is_the_squared_gradient():
    expected = squared(jax.grad(EXACT)(WS, X), jax.tree.map(jnp.zeros_like, WS))
    np.testing.assert_allclose(MEASURED.signal, expected, rtol=1e-5)


@pytest.mark.parametrize("bits", mostly_thorough([2, 3, 5], ("3",)))
def test_allocated_bits_add_what_is_predicted(bits):
    chosen = jaxact.allocate(MEASURED, bits=bits)
    assert chosen.average_bits <= bits
    found, deviation = error_of(network(chosen.policy()), EXACT)
    # 20 %: two sampling errors of a few percent, and S(b), which is the rounding
    # variance of values spread evenly over their groups' ranges; at 1 bit these have
    # up to a third more.
    assert abs(chosen.error - found) < 0.2 * found + 3 * deviation
    uniform = MEASURED.error(dict.fromkeys(dict(chosen.bits), bits))
    assert chosen.error <= uniform


@pytest.mark.parametrize("e2", mostly_thorough([0.3, 0.03, 0.003], ("0.03",)))
def test_an_error_bound_is_met_and_used(e2):
    """AC-GC: the added variance is in [0.5, 1.1] of e2 of the squared gradient."""
    chosen = jaxact.allocate(MEASURED, e2=e2, ladder=tuple(range(1, 9)))
    found, deviation = error_of(network(chosen.policy()), EXACT)
    assert 0.5 * e2 < found / MEASURED.signal < 1.1 * e2 + 3 * deviation / found * e2


@pytest.mark.thorough
def test_bits_of_what_a_checkpoint_saves_in_host_memory():
    base = Policy(bits=2, recompute=jax.checkpoint_policies.dots_saveable)
    measured = jaxact.sensitivity(network(base), WS, X)
    assert len(measured.rows) >= 3  # an output of a matmul for each layer
    chosen = jaxact.allocate(measured, bits=3, ladder=(2, 4, 8))
    here, away = (
        jax.jit(jax.grad(network(chosen.policy(base, action))))(WS, X)
        for action in (Quantize, lambda bits: Offload(Quantize(bits)))
    )
    assert squared(here, away) == 0


@pytest.mark.thorough
def test_the_same_however_it_is_called():
    def through(transform):
        loss = transform(network(Policy(bits=2)))
        return jaxact.sensitivity(loss, WS, X, draws=24)

    def accumulated(loss):
        halves = lambda x: x.reshape(2, 32, 128)
        return lambda ws, x: sum(loss(ws, half) for half in halves(x))

    for transform in (jax.checkpoint, accumulated):
        found = through(transform)
        assert [r.key for r in found.rows] == [r.key for r in MEASURED.rows]
        for row, known in zip(found.rows, MEASURED.rows, strict=True):
            # Other noise: two means of 24 draws, deviations of 10 % of the mean.
            np.testing.assert_allclose(row.variance, known.variance, rtol=0.25)


def test_one_key_gives_one_answer():
    loss = network(Policy(bits=2))
    loss = lambda w, x, f=loss: f((w,), x)
    one = jaxact.sensitivity(loss, WS[0], X, key=jax.random.key(1))
    assert one == jaxact.sensitivity(loss, WS[0], X, key=jax.random.key(1))
    assert one != jaxact.sensitivity(loss, WS[0], X, key=jax.random.key(2))


def test_a_policy_for_a_plain_loss():
    loss = lambda w, x: jnp.square(layer(w, x)).sum()
    found = jaxact.sensitivity(loss, WS[0], X, policy=Policy(bits=3))
    assert found.rows and {row.bits for row in found.rows} == {3}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        return nn.Dense(8)(x)


@pytest.mark.thorough
def test_linen_state_is_dropped():
    net = jaxact.compress(Net, policy=Policy(bits=4))()
    variables = net.init({"params": KEYS[0], "dropout": KEYS[1]}, X)

    def loss(params, stats, x):
        inputs = {"params": params, "batch_stats": stats}
        y, new = net.apply(inputs, x, rngs={"dropout": KEYS[2]}, mutable="batch_stats")
        return jnp.square(y).mean(), new

    args = variables["params"], variables["batch_stats"], X
    found = jaxact.sensitivity(loss, *args, has_aux=True)
    assert found.rows and all(row.variance > 0 for row in found.rows)


def test_nnx_state_stays():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(128, 128, rngs=rngs)
            self.norm = nnx.BatchNorm(128, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.drop(nnx.gelu(self.norm(self.up(x))))

    model = jaxact.compress(Model, policy=Policy(bits=4))(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    found = jaxact.sensitivity(lambda m, x: jnp.square(m(x)).mean(), model, X)
    assert found.rows and all(row.variance > 0 for row in found.rows)
    same = lambda a, b: (
        np.array_equal(jax.random.key_data(a), jax.random.key_data(b))
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        else np.array_equal(a, b)
    )
    assert all(jax.tree.leaves(jax.tree.map(same, before, nnx.state(model))))


def test_the_argument_may_be_a_module_in_any_place():
    exact = nnx.Linear(128, 8, rngs=nnx.Rngs(0))
    loss = lambda x, m: jnp.square(m(x)).mean()
    found = jaxact.sensitivity(loss, X, jaxact.compress(exact), argnums=-1)
    gradient = nnx.grad(loss, argnums=1)(X, exact)
    wanted = sum(jnp.square(g).sum() for g in jax.tree.leaves(gradient))
    np.testing.assert_allclose(found.signal, wanted, rtol=1e-5)


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="has 1 positional ones"):
        jaxact.sensitivity(lambda x: jnp.square(x).sum(), X, argnums=1)
    with pytest.raises(ValueError, match="nothing in the loss is stored rounded"):
        jaxact.sensitivity(lambda x: jnp.square(x).sum(), X)
    with pytest.raises(TypeError, match="has_aux=True"):
        jaxact.sensitivity(lambda w: (network(Policy())((w,), X), 1), WS[0])
    with pytest.raises(TypeError, match="inside jax.jit"):
        jax.jit(lambda w: jaxact.sensitivity(network(Policy()), w, X).signal)(WS)
    with pytest.raises(TypeError, match="real scalar"):
        jaxact.sensitivity(lambda w: layer(w, X), WS[0], policy=Policy())


def test_equal_calls_compile_once(caplog):
    """Also a loss that is another function, traced to the same program."""
    first = jaxact.sensitivity(network(Policy(bits=2)), WS, X)
    with jax.log_compiles(True), caplog.at_level("WARNING"):
        second = jaxact.sensitivity(network(Policy(bits=2)), WS, X)
        other = jaxact.sensitivity(network(Policy(bits=3)), WS, X)
    assert first == second != other
    compiled = [r.message for r in caplog.records if "Compiling jit" in r.message]
    assert len([m for m in compiled if "_gradient" in m]) == 1, "that of 3 bits"


def test_complex_and_narrow_parameters():
    """The suite promotes no dtypes by itself: a bfloat16 gradient is added up wide."""
    layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations="x")
    w, x = WS[0].astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    loss = lambda w, x: jnp.square(layer(w, x).astype(jnp.float32)).sum()
    assert jaxact.sensitivity(loss, w, x).signal > 0

    signal = jaxact.sensitivity(loss, WS[0], X).signal
    rotated = lax.complex(jnp.zeros_like(WS[0]), WS[0])
    found = jaxact.sensitivity(lambda w, x: loss(w.imag, x), rotated, X)
    assert found.signal == pytest.approx(signal, rel=1e-5)

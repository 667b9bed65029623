"""Noise measured in the backward pass of real training steps."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxact
from jaxact import Policy
from support import oracle
from support.eight_devices import run_on_eight_devices
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (128, 64))
W = jax.random.normal(KEYS[1], (3, 64, 64)) / 8


def layer(w, x):
    return jax.nn.gelu(x @ w)


packed = jaxact.compress(layer, activations="x", policy=Policy(bits=2))


def unrolled(ws, x):
    for w in ws:
        x = packed(w, x)
    return jnp.square(x).sum()


def packed_once(ws, x):
    return jnp.square(packed(ws[0], x)).sum()


def scanned(ws, x):
    x, _ = lax.scan(lambda x, w: (packed(w, x), None), x, ws)
    return jnp.square(x).sum()


def pushed(ws, x):
    """The scan is inside the compressed call."""
    body = lambda ws, x: lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]
    small = jaxact.compress(body, activations="x", policy=Policy(bits=2))
    return jnp.square(small(ws, x)).sum()


def jitted(ws, x):
    return jax.jit(unrolled)(ws, x)


def checkpointed(ws, x):
    return jax.checkpoint(unrolled)(ws, x)


def branched(ws, x):
    return lax.cond(x.sum() > -1e9, unrolled, lambda ws, x: 0.0, ws, x)


def mapped(ws, x):
    return jax.vmap(unrolled, (None, 0))(ws, x.reshape(4, 32, 64)).sum()


# JAX 0.10 keeps one record of what a custom rule in a branch saves, and takes it for
# that of another derivative of the same trace, by other arguments.
later = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="a defect of JAX")
PROGRAMS = [scanned, checkpointed, mapped]
PROGRAMS += [pytest.param(f, marks=thorough) for f in (unrolled, pushed, jitted)]
PROGRAMS += [pytest.param(branched, marks=later)]


def measure(f, *args):
    measured = jaxact.telemetry(f)
    derivative = jax.jit(jax.grad(measured, argnums=(0, 1)))
    return derivative(measured.probe(*args), *args)


def relative(noise):
    return {key: added / signal for key, (added, signal) in noise.values.items()}


def by_residual(noise):
    """The added variance of each residual, all calls of the layer together."""
    added = collections.Counter()
    for key, (variance, _) in noise.values.items():
        added[key.partition("@")[0]] += float(variance)
    return list(added.values())


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_gradients_stay(f):
    measured = jaxact.telemetry(f)
    assert jax.jit(measured)(measured.probe(W, X), W, X) == jax.jit(f)(W, X)
    plain = jax.jit(jax.grad(f))(W, X)
    _, gradient = measure(f, W, X)
    if f is not mapped:  # a batch of short rows has other groups, see below
        # The same numbers are computed; XLA may fuse what is measured with them.
        np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_the_same_residuals_give_the_same_noise(f):
    """However the three layers are called."""
    noise, _ = measure(f, W, X)
    found, known = by_residual(noise), by_residual(measure(unrolled, W, X)[0])
    assert len(found) == len(known) == 2
    for added, expected in zip(sorted(found), sorted(known), strict=True):
        # One draw against another, where the loop is inside: 24 576 squared errors,
        # each with a standard deviation of about its mean, are known to 0.6 %; weights
        # by cotangents make that 2 % at most (128 rows). Rows of 64 share a group when
        # they are mapped over, which has up to twice the range squared.
        np.testing.assert_allclose(added, expected, rtol=1.0 if f is mapped else 0.12)
    sizes = collections.Counter()
    for residual in noise.residuals:
        sizes[residual.key.partition("@")[0]] += residual.size
    assert set(sizes.values()) == {3 * X.size}


@pytest.mark.parametrize("codec", [jaxact.Quantize, jaxact.Dithered])
def test_a_linear_layer_has_the_exact_variance(codec):
    """ActNN, section 4.2: sum over samples of ||g_n||^2 sum_i Var(x_ni)."""
    linear = jaxact.compress(jnp.matmul, activations=0, policy=Policy(default=codec(2)))
    c = jax.random.normal(KEYS[2], (512, 48)) * jnp.exp(X[:1, :48])
    x = jax.random.normal(KEYS[3], (512, 256))
    w = jax.random.normal(KEYS[4], (256, 48))
    noise, _ = measure(lambda w, x: (linear(x, w) * c).sum(), w, x)
    ((added, signal),) = noise.values.values()
    c, x = np.asarray(c, np.float64), np.asarray(x)
    is_dithered = codec is jaxact.Dithered
    variance = oracle.rounding_variance(x, 2, is_dithered=is_dithered)
    expected = np.sum(np.square(c).sum(1) * variance.sum(1))
    # Squares of 131 072 independent errors: their sum is known to 0.3 %.
    np.testing.assert_allclose(added, expected, rtol=0.02)
    clean = np.square(x.T @ c).sum()
    # ||g + e||^2 - E ||e||^2: g . e has a standard deviation of at most ||g|| ||e||.
    np.testing.assert_allclose(signal, clean, atol=6 * np.sqrt(clean * added / 48))


def test_two_bits_more_are_a_quarter_of_the_noise_squared():
    few, many = (
        relative(
            measure(
                lambda w, x, bits=bits: jnp.square(
                    jaxact.compress(layer, policy=Policy(bits=bits), activations="x")(
                        w, x
                    )
                ).sum(),
                W[0],
                X,
            )[0]
        )
        for bits in (4, 6)
    )
    for key in few:
        # (63 / 15)^2 = 17.6; both are known to 2 %, see above.
        np.testing.assert_allclose(few[key] / many[key], 17.64, rtol=0.15)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = jaxact.compress(nn.Dense, policy=Policy(bits=2))
        x = nn.relu(block(64, name="first")(x))
        return block(64, name="second")(x)


def test_linen_modules():
    net = Net()
    variables = net.init(KEYS[5], X)
    noise, _ = measure(lambda v, x: jnp.square(net.apply(v, x)).sum(), variables, X)
    assert set(noise.values) == {"Net/first/inputs", "Net/second/inputs"}
    assert all(0.001 < r < 1 for r in noise.relative.values())
    assert "Net/first/inputs" in str(noise)


def test_nnx_modules():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 64, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return nnx.gelu(self.up(x))

    module = jaxact.compress(Layer, policy=Policy(bits=2))(nnx.Rngs(0))
    measured = jaxact.telemetry(lambda module, x: jnp.square(module(x)).sum())
    probe = measured.probe(module, X)
    assert module.calls[...] == 0  # the probe is of shapes
    loss = measured(probe, module, X)
    assert module.calls[...] == 1
    assert loss == jnp.square(nnx.gelu(module.up(X))).sum()
    graph, state = nnx.split(module)
    pure = lambda probe, state: measured(probe, nnx.merge(graph, state, copy=True), X)
    noise, _ = jax.jit(jax.grad(pure, argnums=(0, 1)))(probe, state)
    assert all(0.001 < r < 1 for r in noise.relative.values())
    assert len(noise.relative) == len(probe.values) > 0


def test_a_probe_is_for_one_policy_and_one_shape():
    """Its bits are in the report, with the noise at those in use."""
    loss = lambda w, x: packed(w, x).sum()
    measured = jaxact.telemetry(loss)
    probe, few = measured.probe(W[0], X), Policy(bits=3)
    with pytest.raises(ValueError, match="8192 elements.*for x.*4096.*measured.probe"):
        measured(probe, W[0], X[:64])
    with jaxact.using(few), pytest.raises(ValueError, match="bits=2.*bits=3.*using"):
        measured(probe, W[0], X)
    exact = Policy(default=jaxact.Exact())
    with jaxact.using(exact), pytest.raises(ValueError, match="call nothing rounded"):
        measured(probe, W[0], X)

    @jax.jit
    def step(w, x):
        return jax.grad(measured, argnums=(0, 1))(measured.probe(w, x), w, x)

    for policy in (few, Policy(bits=5)):
        with jaxact.using(policy):
            rows = step(W[0], X)[0].sensitivity().rows
        assert {row.bits for row in rows} == {policy.bits}


def test_what_cannot_be_followed_is_said():
    """The body of a loop that nothing was pushed into."""

    def looped(w, x):
        y = jnp.sin(x @ w)
        return jax.checkpoint(
            lambda y: lax.scan(lambda c, r: (c + jnp.tanh(r), None), y[0], y)[0]
        )(y)

    small = jaxact.compress(looped, activations="x", policy=Policy(bits=4))
    noise, _ = measure(lambda w, x: small(w, x).sum(), W[0], X)
    table = noise.sensitivity()
    assert {row.key for row in table.rows} | set(table.unmeasured) == set(noise.values)
    assert table.unmeasured
    assert "not measured" in str(table)
    assert "not measured (differentiate the parameters too" in str(noise)


def test_nothing_rounded_is_said():
    measured = jaxact.telemetry(lambda w, x: layer(w, x).sum())
    assert "nothing is stored rounded" in str(measured.probe(W[0], X))


def test_following_a_measurement():
    noise, _ = measure(unrolled, W, X)
    louder = jax.tree.map(lambda v: v * jnp.array([3.0, 1.0]), noise)
    measured = jaxact.sensitivity(unrolled, W, X)
    followed = louder.follow(noise, measured)
    for before, now in zip(measured.rows, followed.rows, strict=True):
        np.testing.assert_allclose(now.variance, 3 * before.variance, rtol=1e-6)


@thorough
def test_measuring_adds_few_operations():
    """Squares and sums of what is there anyway, no second matmul."""
    x = jax.random.normal(KEYS[6], (256, 256))
    ws = jax.random.normal(KEYS[7], (3, 256, 256)) / 16
    measured = jaxact.telemetry(unrolled)
    probe = measured.probe(ws, x)
    plain = jax.jit(jax.grad(unrolled)).lower(ws, x).compile()
    both = jax.grad(measured, argnums=(0, 1))
    probed = jax.jit(both).lower(probe, ws, x).compile()
    flops = [p.cost_analysis()["flops"] for p in (plain, probed)]
    # A matmul takes 512 operations for each element that is stored of it; squaring and
    # summing a cotangent, and an error, take about 10.
    assert flops[1] < 1.05 * flops[0]


def over_devices(f):
    """One device: JAX checks along which axes values vary all the same."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.shard_map(f, mesh=mesh, **specs)


@pytest.mark.parametrize("f", [packed_once, scanned], ids=["call", "scan"])
def test_a_gradient_taken_in_a_shard_map(f):
    """Its noise is summed over the devices, as any gradient that all share."""
    measured = jaxact.telemetry(f)

    def gradient(ws, x):
        loss = lambda probe, ws: lax.psum(measured(probe, ws, x), "data")
        return jax.grad(loss, argnums=(0, 1))(measured.probe(ws, x), ws)

    noise, _ = jax.jit(over_devices(gradient))(W, X)
    plain, _ = measure(f, W, X)
    assert noise.values.keys() == plain.values.keys()
    for key, pair in plain.values.items():
        np.testing.assert_allclose(noise.values[key], pair, rtol=1e-4)


@thorough
def test_a_shard_map_in_the_loss():
    """It was not entered: telemetry measured nothing in it, sensitivity zeros."""
    total = lambda ws, x: lax.psum(packed_once(ws, x), "data")
    loss = over_devices(total)
    noise, plain = measure(loss, W, X)[0], measure(packed_once, W, X)[0]
    assert noise.values.keys() == plain.values.keys()
    for key, pair in plain.values.items():
        np.testing.assert_allclose(noise.values[key], pair, rtol=1e-4)
    tried, known = (jaxact.sensitivity(f, W, X, draws=1) for f in (loss, packed_once))
    for row, expected in zip(tried.rows, known.rows, strict=True):
        np.testing.assert_allclose(row.variance, expected.variance, rtol=1e-4)


@pytest.mark.thorough
def test_eight_devices():
    run_on_eight_devices(__file__)


def check_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    for f in (unrolled, scanned):
        one, _ = measure(f, W, X)
        eight, _ = measure(f, W, sharded)
        for key, pair in one.values.items():
            # The same noise; only the order of sums differs.
            np.testing.assert_allclose(eight.values[key], pair, rtol=1e-4)
    plain, _ = measure(unrolled, W, X)
    for is_checked in (False, True):
        per_device = jax.shard_map(
            lambda ws, x: lax.psum(unrolled(ws, x), "data"),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
            check_vma=is_checked,
        )
        noise, _ = measure(per_device, W, sharded)
        for key, pair in plain.values.items():
            np.testing.assert_allclose(noise.values[key][0], pair[0], rtol=0.1)


if __name__ == "__main__":
    check_eight_devices()


def test_a_measured_call_has_the_barriers_of_a_compressed_one():
    """One after the forward pass, one before and one after the backward pass."""

    def barriers(gradient, *args):  # outside the codec, which has some of its own
        eqns = list(jax.make_jaxpr(gradient)(*args).jaxpr.eqns)
        eqns += [
            inner
            for e in eqns
            if e.params.get("name") in ("_pack", "_backward")
            for inner in e.params["jaxpr"].eqns
        ]
        return sum(e.primitive.name == "optimization_barrier" for e in eqns)

    def loss(w, x):
        return packed(w, x).sum()

    measured = jaxact.telemetry(loss)
    probe = measured.probe(W[0], X)
    assert barriers(jax.grad(loss), W[0], X) == 3
    assert barriers(jax.grad(measured, (0, 1)), probe, W[0], X) == 3


def test_one_compiled_step_measures_every_other_time():
    measured = jaxact.telemetry(unrolled)
    probe = measured.probe(W, X)

    @jax.jit
    def step(number):
        return lax.cond(
            number % 2 == 0,
            lambda: jax.grad(measured, argnums=(0, 1))(probe, W, X),
            lambda: (probe, jax.grad(unrolled)(W, X)),
        )

    (noise, gradient), (nothing, plain) = step(0), step(1)
    assert all(added > 0 for added, _ in noise.values.values())
    assert not any(pair.any() for pair in nothing.values.values())
    # The same numbers are computed; XLA may fuse what is measured with them.
    np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-4)


def test_reports_can_be_compared_and_kept_in_sets():
    """They hold arrays, so that one equals itself alone."""
    probe = jaxact.telemetry(unrolled).probe(W, X)
    again = jax.tree.map(lambda x: x, probe)
    assert probe == probe != again
    assert len({probe, probe, again}) == 2

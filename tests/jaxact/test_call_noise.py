"""Noise of its own for each compressed call, and the same in each trace of a program.

The oracle: d/dw of x * (x * w) is x x, a product of two residuals, one of each call.
Its mean over keys is x^2 where they are rounded apart, and x^2 + var where they are
rounded alike (59 % more at 2 bits).
"""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxact
from jaxact import Policy, Quantize
from jaxact._engine.number import _current_trace

pytestmark = pytest.mark.unoptimized

POLICY = Policy(default=Quantize(bits=2))
X = jax.random.normal(jax.random.key(0), (16, 64))
W = jnp.ones_like(X)
KEYS = jax.random.split(jax.random.key(1), 256)
# Normal means of 256 independent draws: |z| > 6 has probability 2e-9.
SIGMAS = 6


def product(a, b):
    return a * b


mul = jaxact.compress(product, policy=POLICY, activations=("a", "b"))


class Mul(nn.Module):
    @nn.compact
    def __call__(self, a, b):
        return a * b


small_mul = jaxact.compress(Mul, policy=POLICY)


def by_function(x, w, key):
    return mul(x, mul(x, w, rounding_key=key), rounding_key=key)


def by_applied_modules(x, w, key):
    """Two modules with one path."""
    rngs = {"jaxact": key}
    inner = small_mul().apply({}, x, w, rngs=rngs)
    return small_mul().apply({}, x, inner, rngs=rngs)


@pytest.mark.parametrize("call", [by_function, by_applied_modules])
def test_a_product_over_two_calls_with_one_key_is_unbiased(call):
    @jax.jit
    def total(key):
        return jax.grad(lambda w: call(X, w, key).sum())(W).sum()

    totals = np.array([total(key) for key in KEYS], np.float64)
    error = totals.mean() - np.square(np.asarray(X, np.float64)).sum()
    assert abs(error) < SIGMAS * totals.std(ddof=1) / len(KEYS) ** 0.5


def gradients_of_equal_data(w1, w2):
    def loss(w1, w2):
        return mul(X, w1).sum() + mul(X, w2).sum()

    return jax.grad(loss, argnums=(0, 1))(w1, w2)


def test_calls_without_a_key_are_rounded_apart():
    for wrap in (lambda f: f, jax.jit):
        first, second = wrap(gradients_of_equal_data)(W, W)
        assert not np.array_equal(first, second)


def test_scans_in_one_call_are_rounded_apart():
    def f(a, b):
        def twice(v):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), None), v, length=2)[0]

        return twice(a), twice(b)

    small = jaxact.compress(f, policy=POLICY, activations=("a", "b"))
    loss = lambda a, b: sum(y.sum() for y in small(a, b))
    first, second = jax.grad(loss, argnums=(0, 1))(X, X)
    assert not np.array_equal(first, second)


def gates(h, xs):
    """h times a gate a step; the gates of every group span 0 to 1."""
    return jax.lax.scan(lambda h, x: (jnp.clip(0.5 + 0.5 * x, 0, 1) * h, None), h, xs)


def nested_gates(h, xs):
    pairs = xs.reshape(2, -1, *xs.shape[1:])
    return jax.lax.scan(lambda h, xs: gates(h, xs), h, pairs)


@pytest.mark.parametrize(
    "f", [gates, pytest.param(nested_gates, marks=pytest.mark.slow)]
)
def test_steps_of_a_scan_are_rounded_apart(f):
    """With one noise for all steps the gradient's mean was 95 % too large."""
    xs = jax.random.uniform(jax.random.key(2), (8, 4, 256), minval=-1.1, maxval=1.1)
    h = jnp.ones(xs.shape[1:])
    small = jaxact.compress(f, policy=POLICY)

    @jax.jit
    def total(key):
        return jax.grad(lambda h: small(h, xs, rounding_key=key)[0].sum())(h).sum()

    totals = np.array([total(key) for key in KEYS], np.float64)
    gate = np.clip(0.5 + 0.5 * np.asarray(xs, np.float64), 0, 1)
    error = totals.mean() - gate.prod(0).sum()
    assert abs(error) < SIGMAS * totals.std(ddof=1) / len(KEYS) ** 0.5


def test_steps_of_a_scan_around_calls_with_one_key_are_rounded_apart():
    """With noise from extremes alone the gradient's mean was 96 % too large."""
    xs = jax.random.uniform(jax.random.key(2), (8, 4, 256), minval=-1.1, maxval=1.1)
    h = jnp.ones(xs.shape[1:])
    gate = lambda h, x: jnp.clip(0.5 + 0.5 * x, 0, 1) * h
    small = jaxact.compress(gate, policy=POLICY, activations=("h", "x"))

    def loss(h, key):
        step = lambda h, x: (small(h, x, rounding_key=key), None)
        return jax.lax.scan(step, h, xs)[0].sum()

    gradient = jax.jit(lambda key: jax.grad(loss)(h, key).sum())
    totals = np.array([gradient(key) for key in KEYS], np.float64)
    exact = np.clip(0.5 + 0.5 * np.asarray(xs, np.float64), 0, 1).prod(0).sum()
    error = totals.mean() - exact
    assert abs(error) < SIGMAS * totals.std(ddof=1) / len(KEYS) ** 0.5


@pytest.mark.parametrize("policy", [POLICY, Policy(default=jaxact.PerSample(2))])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_batches_without_a_key_are_rounded_apart(policy, is_mapped):
    """Errors of clipped batches average out: they had 59 % of one batch's left.

    The mean over 512 batches of an element's error has 1/512 of its mean square; the
    ratio for 1024 elements is 1 +- 6 (2 / 1024)^(1/2) but for a chance of 2e-9.
    """
    shape = (512, 4, 256)
    xs = jax.random.uniform(jax.random.key(3), shape, minval=-1.1, maxval=1.1)
    gate = lambda h, x: jnp.clip(0.5 + 0.5 * x, 0, 1) * h
    small = jaxact.compress(gate, policy=policy, activations="x")
    gradient = jax.grad(lambda h, x: small(h, x).sum())
    h = jnp.ones(shape[1:])
    of_batches = jax.vmap(gradient, (None, 0)) if is_mapped else gradient
    if not is_mapped:
        of_batches = lambda h, xs: jax.lax.map(lambda x: gradient(h, x), xs)
    found = np.asarray(jax.jit(of_batches)(h, xs), np.float64)
    errors = found - np.clip(0.5 + 0.5 * np.asarray(xs, np.float64), 0, 1)
    ratio = np.square(errors.mean(0)).mean() * len(xs) / np.square(errors).mean()
    assert abs(ratio - 1) < SIGMAS * (2 / errors[0].size) ** 0.5


PROGRAMS = {
    "eager": lambda f: f,
    "jit": lambda f: jax.jit(lambda *a: f(*a)),
    "vmap": lambda f: jax.vmap(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "scan": lambda f: (
        lambda x, w: jax.lax.scan(lambda c, xw: (c, f(*xw)), 0, (x, w))[1]
    ),
}


def chain(x, w):
    inner = jax.jit(lambda x, w: mul(x, w))  # a trace of its own in each call
    return mul(x, inner(x, mul(x, w)))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_two_traces_of_one_program_give_equal_gradients(kind):
    wrapped = PROGRAMS[kind]
    plain = wrapped(lambda x, w: product(x, product(x, product(x, w))))(X, W)
    gradients = []
    for _ in range(2):
        out, vjp = jax.vjp(wrapped(lambda x, w: chain(x, w)), X, W)
        np.testing.assert_array_equal(out, plain)
        gradients.append(vjp(jnp.ones_like(out)))
    for first, second in zip(*gradients, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_cached_function_does_not_change_the_noise_after_it():
    cached = jax.jit(lambda x, w: mul(x, w))

    def gradient():
        return jax.grad(lambda w: mul(X, cached(X, mul(X, w))).sum())(W)

    np.testing.assert_array_equal(gradient(), gradient())


def test_calls_under_vmap_and_grad_count_in_their_own_traces():
    def gradient(calls):
        def loss(w):
            for _ in range(calls):
                jax.vmap(mul)(X, W)  # traces inside
            return mul(X, w).sum()

        return jax.grad(loss)(W)

    np.testing.assert_array_equal(gradient(0), gradient(3))


def test_threads_count_apart():
    wanted = gradients_of_equal_data(W, W)
    results = {}

    def work(number):
        results[number] = gradients_of_equal_data(W, W)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results.values():
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
    assert len(results) == 3


def test_measurements_replay_the_noise_of_each_call():
    def loss(w1, w2):
        return mul(X, w1).sum() + mul(X, w2).sum()

    watched = jaxact.telemetry(loss)
    probe = watched.probe(W, W)
    first, second = jax.grad(lambda w1, w2: watched(probe, w1, w2), argnums=(0, 1))(
        W, W
    )
    wanted = gradients_of_equal_data(W, W)
    np.testing.assert_array_equal(first, wanted[0])
    np.testing.assert_array_equal(second, wanted[1])


def test_calls_outside_a_trace_leave_nothing_behind():
    """A session may make any number; each has its own noise by a count."""
    mul(X, W)
    trace = _current_trace()
    kept = [len(sites) for sites in trace.sites.values()]
    for _ in range(3):
        mul(X, W)
    assert [len(sites) for sites in trace.sites.values()] == kept


def test_a_key_that_varies_where_activations_do_not_is_refused():
    """JAX found a type in the backward pass, and spoke about pvary and cotangents."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    f = jaxact.compress(jnp.sin)

    def gradient(axis):
        def loss(x):
            key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(axis))
            return jax.lax.psum(f(x, rounding_key=key).sum(), "data")

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P())
        return jax.grad(mapped)(jnp.ones((64, 64)))

    assert gradient("data").shape == (64, 64)
    with pytest.raises(ValueError, match=r"no others: jax.lax.axis_index\('data'\)"):
        gradient("model")

"""Small stored arrays of a loop's step are one array for the scan that stacks them."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Offload, Policy, Quantize
from support.gpu_target import needs_target
from support.programs import relative_error

pytestmark = pytest.mark.unoptimized

W = 0.2 * jax.random.normal(jax.random.key(0), (16, 32))
X = jax.random.normal(jax.random.key(1), (6, 4, 16))


def recurrent(w, xs):
    """Gates of a recurrent network with so many steps, as [steps, batch, units]."""

    def step(carry, x):
        state, gate = jnp.split(jnp.tanh(jnp.sin(carry + x) @ w), 2, axis=-1)
        state = jnp.sin(x) * jnp.tanh(state) + jax.nn.sigmoid(gate) * carry
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[1]


def stacked(policy, shape=X.shape):
    """The shapes of the words and metadata that scans in a gradient stack."""
    small = jaxact.compress(recurrent, policy=policy, activations="xs")
    gradient = jax.grad(lambda w, xs: jnp.sum(small(w, xs) ** 2))
    closed = jax.make_jaxpr(gradient)(W, jnp.zeros(shape))
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    results = [v.aval for e in scans for v in e.outvars]
    return [aval.shape for aval in results if aval.dtype == jnp.uint32]


def test_a_step_has_its_words_in_one_array_and_its_metadata_in_another():
    words, metadata = sorted(stacked(Policy(4)), key=len, reverse=True)
    count = words[1]
    assert words == (6, count, 4, 1, 4)
    assert metadata == (6, count, 4, 1)
    assert count >= 4


def test_large_arrays_and_those_on_the_host_are_apart():
    # 2^16 groups of 32 elements at 4 bits: 2^20 bytes of words, 2^18 of metadata.
    large = stacked(Policy(4), (6, 2**16, 16))
    assert len([shape for shape in large if len(shape) == 4]) >= 4
    assert len(stacked(Policy(default=Offload(Quantize(4))))) >= 8


@pytest.mark.parametrize("lift", [lambda f: f, jax.vmap], ids=["alone", "vmap"])
def test_gradients_are_those_of_the_residuals(lift):
    args = W, X
    if lift is jax.vmap:
        args = jnp.stack([W, -W]), jnp.stack([X, 2 * X])
    small = jaxact.compress(recurrent, policy=Policy(8), activations="xs")
    total = lambda f: lambda w, xs: jnp.sum(lift(f)(w, xs)[..., -1, :, :] ** 2)
    gradient = lambda f: jax.jit(jax.grad(total(f), (0, 1)))(*args)
    # Each factor to 8 bits of a range of at most 8 deviations: 0.9 % of these.
    for got, want in zip(gradient(small), gradient(recurrent), strict=True):
        assert relative_error(got, want) < 0.02


def gated(w, xs):
    """Gates by one product with joined weights, whose gradients are pieces."""

    def step(carry, x):
        joined = jnp.concatenate([carry, x], -1) @ jnp.concatenate(w, axis=1)
        keep, write, read, value = map(jnp.tanh, jnp.split(joined, 4, axis=-1))
        state = keep * carry + write * value
        return read * state, state

    return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[1]


SIZED = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize(
    "f, weights, most",
    [(recurrent, SIZED((512, 1024)), 2), (gated, [SIZED((1024, 512))] * 4, 1.65)],
    ids=["recurrent", "gated"],
)
def test_a_recurrent_network_on_a_gpu(f, weights, most):
    """2.6 times as many kernels as uncompressed where a step's arrays are apart.

    And for joined weights 1.8 times where all gradients wait at a step's end.
    """
    small = jaxact.compress(f, policy=Policy(4), activations="xs")
    total = lambda f: lambda w, xs: jnp.sum(f(w, xs) ** 2)
    plain, packed = (
        jaxact.predicted_time(
            jax.grad(total(f)), weights, SIZED((128, 64, 512)), target="h100"
        ).kernels
        for f in (f, small)
    )
    assert packed < most * plain


@pytest.mark.thorough
def test_gradients_that_are_pieces_of_unlike_widths():
    wide = jnp.concatenate([W, -W], axis=1)
    weights = [jnp.concatenate([w, w]) for w in jnp.split(wide, [3, 20, 36], axis=1)]
    small = jaxact.compress(gated, policy=Policy(8), activations="xs")
    total = lambda f: lambda w: jnp.sum(f(w, X) ** 2)
    found, wanted = (jax.jit(jax.grad(total(f)))(weights) for f in (small, gated))
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got, want) < 0.02

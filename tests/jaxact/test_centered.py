"""What attention mixes may have an offset: rounded weights do not see it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact._form.centered import centered_p, mix_p, with_mixes
from jaxact._form.softmax import with_softmaxes
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import flow
from jaxact._jaxpr.links import NO_LINKS
from jaxact._jaxpr.rewrite import flatten, jit_body
from jaxact._plan.facts import ACTIVATION, is_activation
from jaxact._plan.program import Program
from support.programs import relative_error

pytestmark = pytest.mark.unoptimized

WIDTH, HEADS, TOKENS = 64, 4, 128
RNG = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
X, CT = normal(2, TOKENS, WIDTH), normal(2, TOKENS, WIDTH)
NOISELESS = jaxact.Policy(rules=(jaxact.Rule(jaxact.Exact(), where=lambda r: True),))


def weights(offset=0.0):
    params = {name: normal(WIDTH, WIDTH) / WIDTH**0.5 for name in "qkv"}
    return params | {name + "_bias": offset * normal(1, 1, WIDTH) for name in "kv"}


def split(p, x):
    """Queries, keys and values, [batch, tokens, heads, features]."""
    arrays = x @ p["q"], x @ p["k"] + p["k_bias"], x @ p["v"] + p["v_bias"]
    return [a.reshape(*x.shape[:-1], HEADS, -1) for a in arrays]


def rows(scores):
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def attention(p, x, weigh=rows, mix="bhqk,bkhd->bqhd"):
    q, k, v = split(p, x)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    return jnp.einsum(mix, weigh(scores), v).reshape(x.shape)


def library(p, x):
    with jax.numpy_dtype_promotion("standard"):  # as jax.nn asks
        return jax.nn.dot_product_attention(*split(p, x)).reshape(x.shape)


def in_columns(p, x):
    q, k, v = split(p, x)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhkq", q, k) / 4, axis=2)
    return jnp.einsum("bkhd,bhkq->bqhd", v, scores).reshape(x.shape)


def over_an_image(p, x):
    q, k, v = (a.reshape(2, 8, 16, HEADS, -1) for a in split(p, x))
    scores = jnp.einsum("bqrhd,byxhd->bhqryx", q, k) / 4
    scores = jax.nn.softmax(scores, (-2, -1))
    return jnp.einsum("bhqryx,byxhd->bqrhd", scores, v).reshape(x.shape)


def pooled(p, x):
    scores = jax.nn.softmax(x @ p["q"][:, 0], -1)
    return jnp.einsum("bt,btd->bd", scores, x + p["v_bias"])[:, None]


def narrow(p, x):
    p, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
    return attention(p, x).astype(jnp.float32)


def masked(p, x):
    allowed = jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS), bool))
    return attention(p, x, lambda s: rows(jnp.where(allowed, s, -1e9)))


MIXES = {
    "attention": attention,
    "the library's": library,
    "causal": masked,
    "in columns": in_columns,
    "over an image": over_an_image,
    "pooled": pooled,
    "bfloat16": narrow,
    "scanned": lambda p, x: jax.lax.map(lambda row: attention(p, row[None])[0], x),
}
OTHERS = {
    "dropout": lambda p, x: attention(p, x, lambda s: jnp.where(s > 0, rows(s), 0)),
    "some of the weights": lambda p, x: attention(
        p, x, lambda s: jnp.pad(rows(s)[..., :96], [(0, 0)] * 3 + [(0, 32)])
    ),
    "no softmax": lambda p, x: attention(p, x, jnp.exp),
    "summed over queries": lambda p, x: attention(p, x, mix="bhkq,bkhd->bqhd"),
    "with parameters": lambda p, x: jax.nn.softmax(x) @ p["v"],
    "no derivative": lambda p, x: attention(
        p, x, lambda s: jax.lax.stop_gradient(rows(s))
    ),
}


def count(f):
    """How many products become mixes."""
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x, p: f(p, x))(X, weights()))
    jaxpr, _ = flatten(jaxpr, jit_body)
    facts = flow(jaxpr, [ACTIVATION] + [0] * 5)
    depends = functools.partial(is_activation, facts)
    jaxpr = with_mixes(with_softmaxes(Program(jaxpr, facts), NO_LINKS), depends)
    return sum(eqn.primitive is mix_p for eqn in jaxpr.eqns)


@pytest.mark.parametrize("name", [name for name in MIXES if name != "scanned"])
def test_they_are_found(name):
    assert count(MIXES[name]) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not(name):
    assert count(OTHERS[name]) == 0


def gradients(f, p, x):
    return jax.jit(jax.grad(lambda p, x: (f(p, x) * CT).sum(), (0, 1)))(p, x)


@pytest.mark.parametrize("name", MIXES)
def test_the_derivative_is_the_same(name):
    p, f = weights(3.0), MIXES[name]
    small = jaxact.compress(f, activations="x", policy=NOISELESS)
    assert jnp.array_equal(jax.jit(small)(p, X), jax.jit(f)(p, X))
    got, want = gradients(small, p, X), gradients(f, p, X)
    if f is narrow:  # in which an offset's rounding is a part of the weights' gradients
        exact = gradients(attention, p, X)
        assert relative_error(got, exact) < 1.1 * relative_error(want, exact)
        return
    # Each of some 8 products in a row is rounded by up to sqrt(128) units, and the
    # offset of 3 to 5 deviations meets those of the weights: 500 units in all.
    limit = 500 * float(jnp.finfo(jnp.float32).eps)
    assert relative_error(got[0]["q"], want[0]["q"]) < limit
    assert relative_error(got, want) < limit


@pytest.mark.parametrize("name", ["attention", "over an image", "pooled", "scanned"])
def test_an_offset_adds_no_noise(name):
    """The queries' gradients: with an offset they erred by 5 to 6 times as much."""
    f = MIXES[name]
    small = jaxact.compress(f, activations="x", policy=jaxact.Policy(8))
    plain = jax.jit(jax.grad(lambda p: (f(p, X) * CT).sum()))
    rounded = jax.jit(jax.grad(lambda p, k: (small(p, X, rounding_key=k) * CT).sum()))

    def noise(offset):
        p, keys = weights(offset), jax.random.split(jax.random.key(0), 4)
        draws = [rounded(p, k)["q"] for k in keys]
        return np.mean([relative_error(draw, plain(p)["q"]) for draw in draws])

    # The mean of 32 rows is off by 0.2 of their deviations, on whose scale an offset of
    # none is; 4 draws of a norm over 4096 numbers are known to a few percent.
    assert noise(4.0) < 1.5 * noise(0.0)


@pytest.mark.parametrize("axes", [(1,), (0, 1)])
def test_a_batch_and_the_transpose(axes):
    centered = functools.partial(centered_p.bind, axes=axes)
    x, y = normal(3, 40, 50, 4), normal(3, 40, 50, 4)
    each = jnp.stack([centered(a) for a in x])
    assert jnp.allclose(jax.vmap(centered)(x), each, atol=1e-6)  # means of 32 near 1
    product = lambda a, b: jnp.sum(a * b)
    _, pull = jax.vjp(centered, x[0])
    both = product(centered(x[0]), y[0]), product(x[0], pull(y[0])[0])
    assert jnp.allclose(*both, rtol=1e-4, atol=1e-2)  # of 8000 terms near 1
    _, tangent = jax.jvp(centered, (x[0],), (y[0],))
    assert jnp.allclose(tangent, centered(y[0]), atol=1e-6)


def explicit(make, count):
    return make((count,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))


def test_rows_over_devices():
    """A stride through rows that are cut does not divide, which JAX refuses."""
    mesh = explicit(jax.sharding.AbstractMesh, 4)
    centered = jax.jit(functools.partial(centered_p.bind, axes=(1,)))
    with jax.sharding.use_abstract_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(None, "rows", None))
        x = jax.ShapeDtypeStruct((2, 132, 8), jnp.float32, sharding=sharding)
        centered.trace(x).lower(lowering_platforms=("cuda",))
        assert jax.eval_shape(centered, x).sharding == sharding


def test_the_mean_is_that_of_the_same_rows():
    centered = jax.jit(functools.partial(centered_p.bind, axes=(1,)))
    x = normal(2, 132, 8)
    with jax.set_mesh(mesh := explicit(jax.make_mesh, 1)):
        cut = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "rows", None)))
        got = np.asarray(centered(cut))
    assert np.allclose(got, centered(x), atol=1e-6)  # means of 27 near 1


def test_telemetry_measures_the_values():
    """The mean lies between them and their product with a cotangent."""
    p = weights(3.0)
    small = jaxact.compress(attention, activations="x", policy=jaxact.Policy(4))
    measured = jaxact.telemetry(lambda p, x: (small(p, x) * CT).sum())
    probe = measured.probe(p, X)
    noise, _ = jax.jit(jax.grad(measured, (0, 1)))(probe, p, X)
    assert noise.relative.keys() == {r.key for r in probe.residuals}

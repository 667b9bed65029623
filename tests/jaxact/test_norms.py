"""Norms whose rows share a group of codes, and norms inside of branches."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import jaxact
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

# Rows of 16 elements, 16 of which share a group of 256; their scales span 1000.
SCALES = 10.0 ** jnp.linspace(-1.5, 1.5, 8).reshape(1, 8, 1)
ROWS = SCALES * jax.random.normal(jax.random.key(0), (16, 8, 16))
GAIN = 1 + 0.1 * jax.random.normal(jax.random.key(1), (1, 1, 16))


def centered(x):
    return x - x.mean(-1, keepdims=True)


def deviation(x):
    return jnp.sqrt((centered(x) ** 2).mean(-1, keepdims=True) + 1e-6)


BY_ROW = {
    "divided": lambda x: centered(x) / deviation(x) * GAIN,
    "gain first": lambda x: GAIN * centered(x) * lax.rsqrt(x.var(-1, keepdims=True)),
    "gain in the factor": lambda x: (
        centered(x) * (lax.rsqrt(x.var(-1, keepdims=True)) * GAIN)
    ),
    "not centered": lambda x: (
        x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * GAIN
    ),
    "statistics without an axis": lambda x: (
        (x - x.mean(-1)[..., None]) * lax.rsqrt(x.var(-1))[:, :, None]
    ),
    "cast": lambda x: (
        centered(x) * lax.rsqrt(x.var(-1, keepdims=True)).astype(jnp.float32)
    ).astype(jnp.bfloat16),
}


def size(x):
    return jnp.sqrt((x * x).sum(-1, keepdims=True))


# By other powers, bounds and products: errors of 15 gradients, 0.1 where it is clipped.
BY_ROW |= {
    "a least size": lambda x: x / jnp.maximum(size(x), 1e-6),
    "a safe size": lambda x: x / jnp.where(size(x) > 1, size(x), 1.0),
    "clipped": lambda x: x * jnp.minimum(1.0, 1 / size(x)),
    "gain over the size": lambda x: x * (GAIN.sum() / (size(x) + 1e-6)),
    "epsilon beside the root": lambda x: x / (size(x) + 1e-6),
    "power": lambda x: x * (x * x).mean(-1, keepdims=True) ** -0.5,
    "reciprocal": lambda x: x * jnp.reciprocal(size(x)),
    "sum of sizes": lambda x: x * jnp.abs(x).sum(-1, keepdims=True) ** -1,
    "einsum": lambda x: (
        x * lax.rsqrt(jnp.einsum("abc,abc->ab", x, x)[..., None] + 1e-6)
    ),
    "scaled by a product": lambda x: jnp.einsum(
        "abc,ab->abc", x, lax.rsqrt((x * x).mean(-1) + 1e-6)
    ),
    "product of vectors": jax.vmap(jax.vmap(lambda x: x * (x @ x) ** -0.5)),
}


def draw_error(f, x):
    """Of one draw's gradient at 8 bits, relative to the gradient."""
    return gradient_error(f, x, policy=jaxact.Policy(8), seed=2)


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_of_any_scale_share_a_group(name):
    """With one step for all of a group's rows the error was 15 times the gradient."""
    # A group's range is at most 8 deviations; stochastic rounding errs by half of a
    # 255th of it, and the gradient has the rounded value times a cotangent's part.
    assert draw_error(BY_ROW[name], ROWS) < 8 / 255 / 2


def divisions(f):
    """How many of a gradient's operations divide something as large as the array."""
    traced = jax.make_jaxpr(jax.grad(lambda x: f(x).sum(dtype=jnp.float32)))(ROWS)
    return len(re.findall(r"f32\[16,8,16\] = div ", str(traced)))


def test_backward_divides_no_element_by_a_scale():
    """A GPU takes ten instructions to divide, and one to multiply."""
    f = BY_ROW["cast"]  # it divides sums by their number alone
    compressed = jaxact.compress(f, policy=jaxact.Policy(8), activations="x")
    assert divisions(compressed) == divisions(f) == 0


MASK = (jnp.arange(8) % 2 > 0).reshape(1, 8, 1)
MASKED = {
    "inverse": lambda x: x * jnp.where(MASK, 1 / size(x), 0.0),
    "divided": lambda x: jnp.where(MASK, x / jnp.where(MASK, size(x), 1.0), 0.0),
}


@pytest.mark.parametrize("f", MASKED.values(), ids=MASKED)
def test_rows_that_a_mask_leaves_as_they_are(f):
    """They are stored normalized like others, beside which they would be large."""
    x = 30 * jax.random.normal(jax.random.key(0), (16, 8, 16))
    assert draw_error(f, x) < 8 / 255 / 2


@pytest.mark.parametrize("norm", [nn.GroupNorm(4), nn.InstanceNorm()], ids=["4", "1"])
def test_channels_of_any_scale_share_a_group(norm):
    scales = SCALES.reshape(1, 1, 1, 8)
    if isinstance(norm, nn.GroupNorm):  # one scale for a group of two channels
        scales = scales[..., ::2].repeat(2, axis=-1)
    x = scales * jax.random.normal(jax.random.key(0), (4, 6, 6, 8))
    variables = norm.init(jax.random.key(1), x)
    f = lambda x: norm.apply(variables, x)
    assert draw_error(f, x) < 8 / 255 / 2


@pytest.mark.thorough
def test_a_quotient_by_a_statistic_before_a_norm():
    """The stored quotient has rows of scales that its numerator has not."""

    def f(x):
        squashed = x / (x.sum(-1, keepdims=True) ** 2 + 1)
        return BY_ROW["divided"](jax.nn.hard_silu(squashed))

    # The numerator and the slope of the activation are rounded too.
    assert draw_error(f, jax.random.normal(jax.random.key(0), (4, 8, 16))) < 0.1


TOKENS = jax.random.normal(jax.random.key(6), (2, 64, 16))


def attention(x):
    return jax.nn.softmax(2.5 * x @ jnp.roll(x, 1, -1).mT, axis=-1)


def normalizers(x):
    """Sums over queries: of keys that no query looks at they are tiny."""
    return attention(x).sum(-2, keepdims=True) + 1e-9


def linear_attention(x, divide=lambda x, sums: x / sums):
    features = jnp.exp(x - 0.5 * (x**2).sum(-1, keepdims=True)) + 1e-9
    numerators = features @ (features.mT @ x)
    sums = jnp.einsum("btm,bm->bt", features, features.sum(1))
    return jnp.tanh(divide(numerators, sums[..., None]))


def by_einsum(y, sums):
    return jnp.einsum("btd,bt->btd", y, 1 / sums[..., 0])


# The most error: three times that of attention alone (0.03); one gradient for features
# whose rows have sizes from 1e-9 to 1, and are rounded in groups of 16 rows.
QUOTIENTS = {
    "over queries": (lambda x: (attention(x) / normalizers(x)).mT @ x, 0.1),
    "inverse": (lambda x: (attention(x) * (1 / normalizers(x))).mT @ x, 0.1),
    "linear attention": (linear_attention, 1.0),
    "its inverse": (lambda x: linear_attention(x, lambda y, s: y * (1 / s)), 1.0),
    "the same by einsum": (lambda x: linear_attention(x, by_einsum), 1.0),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_by_statistics_of_any_size(name):
    """Stored as numerators they had errors of 1.8, 1.8, 190, 21 and 40 gradients."""
    f, most = QUOTIENTS[name]
    assert draw_error(f, TOKENS) < most


def norm_of_few(x):
    rows = x.reshape(*x.shape[:-1], -1, 4)
    centered = rows - rows.mean(-1, keepdims=True)
    normalized = centered * lax.rsqrt(rows.var(-1, keepdims=True) + 1e-3)
    return normalized.reshape(x.shape)


@pytest.mark.parametrize("f", [BY_ROW["not centered"], norm_of_few])
def test_statistics_inside_of_a_branch_stay_exact(f):
    """Rounded, they had errors of 20 to 80 gradients."""
    inside = lambda x: lax.cond(x[0, 0, 0] > 0, f, f, x * x)
    x = jax.random.normal(jax.random.key(3), (8, 16, 32))[..., :16]
    assert draw_error(inside, x) < 8 / 255


POLES = {
    "logarithm": lambda x: jnp.log(jax.nn.softmax(4 * x) + 1e-9),
    "quotient": lambda x: jnp.sin(3 * x) / (jax.nn.relu(x) + 1e-3),
    "root": lambda x: jnp.cos(x) * lax.rsqrt(jax.nn.relu(x) + 1e-4),
}


@pytest.mark.parametrize("name", POLES)
def test_arguments_near_a_pole_inside_of_a_branch_stay_exact(name):
    f = POLES[name]
    inside = lambda x: lax.cond(x[0, 0] > 0, f, f, jnp.sin(x))
    x = jax.random.normal(jax.random.key(3), (16, 64))
    assert draw_error(inside, x) < 8 / 255


BEFORE = {
    "halved": lambda x: 0.5 * x,
    "gain": lambda x: x / CHANNELS,
    "mask": lambda x: x * (jnp.arange(64)[None] % 4 > 0).astype(x.dtype),
}
CHANNELS = 10.0 ** jnp.linspace(-1.5, 1.5, 64).reshape(1, 64)


@pytest.mark.parametrize("name", BEFORE)
def test_channels_of_any_scale_that_are_scaled_before_their_norm(name):
    """Stored as they were before the scaling, they had an error of 0.6 gradients."""

    def f(x):
        x = BEFORE[name](x)
        x = x - x.mean(0, keepdims=True)
        return x * lax.rsqrt((x * x).mean(0, keepdims=True) + 1e-5)

    x = CHANNELS * jax.random.normal(jax.random.key(4), (64, 64))
    assert draw_error(f, x) < 8 / 255 / 2


WITH_ZEROS = jnp.where(jnp.arange(8).reshape(1, 8, 1) > 0, ROWS, 0.0)


def with_unused_norm(x):
    x / jnp.sqrt((x * x).sum(-1, keepdims=True))  # NaN in rows of zeros
    return x**2


def scaled_up(x):
    scaled = x * jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return scaled @ jnp.ones((16, 16)) + x**2


@pytest.mark.parametrize("f", [with_unused_norm, scaled_up])
def test_rows_of_zeros_have_finite_gradients(f):
    """They were divided by their deviation before they were stored."""
    assert draw_error(f, WITH_ZEROS) < 8 / 255 / 2


@pytest.mark.thorough
def test_a_gain_that_is_stored_is_not_normalized():
    """It was, as if it had the rows of the array that it scales: a TypeError."""

    def f(x, gain):
        y = jnp.log1p(x * x)[:, :65]
        scaled = gain[None] * y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        return jax.nn.gelu(scaled), x * jnp.roll(x, 1, 0)

    x = jax.random.normal(jax.random.key(5), (8, 128))
    small = jaxact.compress(f, policy=jaxact.Policy(8))
    outputs, pullback = jax.vjp(small, x, jnp.ones(65))
    assert all(jnp.isfinite(g).all() for g in pullback(outputs))


def test_divisors_that_overflow():
    """0 * inf was the decoded numerator where a quotient by inf is 0."""
    sizes = jnp.where(jnp.arange(8) > 0, 1.0, 1e20)[None, :, None]

    def f(x):
        sums = jnp.square(sizes * x).sum(-1, keepdims=True)
        return jnp.square(x) + x / lax.stop_gradient(sums)

    # Rows of size 1 share groups with rows that are divided by 35 of their sums.
    x = 1 + jax.random.uniform(jax.random.key(7), (16, 8, 16))
    assert draw_error(f, x) < 35 * 8 / 255 / 2


OTHER_SIZES = {
    "divided": lambda x, sums: x / sums,
    "inverse": lambda x, sums: x * (1 / sums),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_divisors_that_tell_nothing_about_the_array(name):
    """Its rows are alike; divided by 1 to 1000 they would not be."""
    degrees = 10.0 ** jnp.linspace(0, 3, 8)[None, :, None]

    def f(x, logs):
        sums = jnp.exp(logs + 0.01 * x).sum(-1, keepdims=True)
        return jnp.square(x) + OTHER_SIZES[name](x, sums)

    x = jax.random.normal(jax.random.key(7), (16, 8, 16))
    logs = jnp.log(jnp.broadcast_to(degrees, x.shape) / 16)
    assert gradient_error(f, x, logs, policy=jaxact.Policy(8), seed=2) < 8 / 255


@pytest.mark.thorough
def test_sums_that_a_bound_takes_the_place_of():
    """An mLSTM's: rows over sums near 0 were stored in a group with the others."""
    q, k, v = jax.random.normal(jax.random.key(8), (3, 4, 48, 16))
    gates = jax.random.normal(jax.random.key(9), (4, 48, 1))

    def f(q, k, v, gates):
        scores = jnp.einsum("btd,bsd->bts", q, k) / 4
        sums = jnp.abs(scores.sum(-1, keepdims=True))
        return jnp.einsum("bts,bsd->btd", scores / jnp.maximum(sums, gates), v)

    policy = jaxact.Policy(8)
    gates = jnp.exp(gates)
    assert gradient_error(f, q, k, v, gates, policy=policy, argnums=1) < 0.05


# The mean is not what is subtracted, but a multiple, a square or a rounded one.
OTHER_MEANS = {
    "half": lambda m: 0.5 * m,
    "twice": lambda m: 2 * m,
    "square": lambda m: m * m,
    "whole": lambda m: m.astype(jnp.int32).astype(m.dtype),
    "rounded": lambda m: lax.reduce_precision(m, 8, 4),
}


@pytest.mark.parametrize("other", OTHER_MEANS.values(), ids=OTHER_MEANS)
def test_what_is_subtracted_is_not_the_mean(other):
    """It was given back less its mean: errors of 0.1 to 0.5 gradients, in the mean."""

    def f(x):
        mean = jnp.broadcast_to(x.mean(-1, keepdims=True), x.shape)
        return (x - other(mean)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    assert draw_error(f, ROWS / SCALES + 2) < 8 / 255 / 2

"""Gradients near the plain ones where they once were wrong, or drowned in noise."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize, Rule
from jaxact._policy import SMALL_PART, small_size
from support import blocks
from support.programs import assert_same_bits, gradient_error, relative_error

pytestmark = [
    pytest.mark.unoptimized,
    # Functions near a pole alone leave nothing to compress, and say so.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

T, D = 16, 64
X = jax.random.normal(jax.random.key(0), (T, D))
CT = jax.random.normal(jax.random.key(1), (T, D))
X_EXACT = (Rule(Exact(), where=lambda residual: not residual.primitive),)
EXACT = Policy(bits=8, rules=(Rule(Exact(), where=lambda residual: True),))


def rfft(x):
    return jnp.fft.rfft(x)


def mod_relu(x):
    z = rfft(x)
    size = abs(z)
    gain = jax.nn.relu(size - 0.5) / (size + 1e-3)
    return (gain.astype(z.dtype) * z).real


def gate(x):
    z = rfft(x)
    return (z * jax.nn.sigmoid(abs(z)).astype(z.dtype)).real


COMPLEX = {
    "log": lambda x: jnp.log(abs(rfft(x))),
    "shifted log": lambda x: jnp.log(abs(rfft(x)) + 1e-3),
    "tanh": lambda x: jnp.tanh(abs(rfft(x))),
    "log1p of a power": lambda x: jnp.log1p(abs(rfft(x)) ** 2),
    "modReLU": mod_relu,
    "gate": gate,
    "square": lambda x: abs(rfft(x)) ** 2,
}


@pytest.mark.parametrize("f", COMPLEX.values(), ids=COMPLEX)
def test_size_of_a_complex_number(f):
    # A transform of 64 values and its transpose, in float32, in another order of sums.
    assert gradient_error(f, X, policy=EXACT) < 1e-5
    # Rounding to 8 bits of a group's range R, where it is 6 to 8 deviations, has a
    # deviation of at most R / 255 / 2: 1.6 %; twice that, for two factors.
    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.032


def test_the_size_of_a_complex_number_in_a_logarithm_and_in_a_product():
    """Rounded for the product, it gave the logarithm's slope, which is large there."""
    x = jnp.fft.irfft(rfft(X).at[:, 5].set(0).at[:, 6].set(1e-2))
    w = jax.random.normal(jax.random.key(2), (D // 2 + 1, D // 2 + 1)) / 8
    f = lambda w, x: jnp.log(abs(rfft(x)) ** 2 + 1e-5) + abs(rfft(x)) @ w
    error = gradient_error(f, w, x, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.032  # as above


@pytest.mark.parametrize("policy", [EXACT, Policy(bits=8)], ids=["exact", "8 bits"])
def test_product_of_slopes_beyond_float16(policy):
    x = X.astype(jnp.float16)
    f = lambda x: jnp.tanh(x * 1e-4) * 1000 * 1000
    small = jaxact.compress(f, policy=policy, activations=0)
    ct = jnp.full_like(x, 1e-3)
    got = jax.vjp(small, x)[1](ct)[0]
    assert got.dtype == jnp.float16
    # 1e-4 and three products of float16: half an ulp (2^-11) each, in both gradients.
    assert relative_error(got, jax.vjp(f, x)[1](ct)[0]) < 8 * 2**-11


def guarded(x):
    positive = jax.nn.relu(x)
    return jax.scipy.special.xlogy(positive, positive + (x <= 0).astype(x.dtype))


SPECIAL = {
    "guarded xlogy": guarded,
    "entr": lambda x: jax.scipy.special.entr(abs(x) + 0.1),
    "xlog1py": lambda x: jax.scipy.special.xlog1py(x, jnp.square(x)),
    "rel_entr": lambda x: jax.scipy.special.rel_entr(jax.nn.relu(x), jnp.exp(x)),
}


def test_chain_through_a_cast_under_strict_promotion():
    """A slope in bfloat16 times one in float32, which strict promotion refuses."""
    x = X.astype(jnp.bfloat16)
    f = lambda x: jnp.sin(jnp.tanh(jnp.exp(-x)).astype(jnp.float32)) * 0.125
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    # Three products of bfloat16, half an ulp (2^-9) each, in both gradients; 8 bits'
    # 0.5 % beside them.
    assert gradient_error(f, x, policy=Policy(bits=8)) < 2e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("f", SPECIAL.values(), ids=SPECIAL)
def test_custom_derivative_with_a_broadcast_number(f, dtype):
    x = X.astype(dtype)
    small = jaxact.compress(f, policy=Policy(bits=8), activations=0)
    # One array: the slope or, near a pole, the argument, which is referenced.
    rows = jaxact.residuals(small, x).rows
    assert len([row for row in rows if row.dtype != jnp.bool_]) <= 1
    ways = [lambda g: g, jax.jit, jax.vmap]
    for way in ways:
        got = jax.vjp(way(small), x)[1](CT.astype(dtype))[0]
        wanted = jax.vjp(way(f), x)[1](CT.astype(dtype))[0]
        assert jnp.isfinite(got).all()
        # Of the slope's range, at most 16 deviations (logarithms): 16 / 255 / 2; in
        # bfloat16 each of a handful of steps rounds by 2^-9.
        assert relative_error(got, wanted) < 0.032 + 4 * float(jnp.finfo(dtype).eps)


def instance_norm(x):
    return blocks.normalize(x.reshape(T, 8, -1), 1) ** 2


def pair_norm(x):
    x = x.reshape(T, -1, 2)
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 0.1) + jnp.tanh(x)


@pytest.mark.parametrize("f", [instance_norm, pair_norm])
def test_statistics_of_a_few_elements(f):
    table = jaxact.residuals(jaxact.compress(f, activations=0), X)
    statistics = [row for row in table.rows if isinstance(row.action, Exact)]
    assert statistics
    assert all(row.why in ("a statistic", "small") for row in statistics)
    # At 2 bits a step is a third of a group's range of 4 to 6 deviations: an error of
    # about the elements' own size, in each factor.
    assert gradient_error(f, X, policy=Policy(bits=2)) < 6


def test_a_pooled_feature_is_no_statistic():
    w = jax.random.normal(jax.random.key(2), (D, D))
    f = lambda w, x: jax.nn.gelu(x.reshape(T, 2, D).mean(1)) @ w
    x = jax.random.normal(jax.random.key(3), (T, 2 * D))
    table = jaxact.residuals(jaxact.compress(f, activations=1), w, x)
    assert all(row.action == Quantize(4) for row in table.rows if row.primitive)


def test_a_statistic_multiplied_by_einsum_stays_exact():
    f = lambda x: jnp.einsum("td,t->td", x, jax.lax.rsqrt((x * x).mean(1) + 1e-5)) ** 2
    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.032


def test_small_is_a_bound_on_all_that_is_spared():
    assert small_size([]) == 0
    assert small_size([100] * SMALL_PART) == 0  # each alone is small, not all
    assert small_size([100, 100 * SMALL_PART]) == 100
    assert small_size([100, 1, 101 * SMALL_PART]) == 100
    assert small_size([100, 1, 99 * SMALL_PART]) == 1


def test_long_sequences_keep_no_more_exactly():
    """[B, H, T, T] scores do not make [B, T, D] arrays small."""
    heads, width = 4, 64
    split = lambda y: y.reshape(-1, heads, width)

    def attention(p, x):
        q, k, v = (split(x @ p[i]) for i in range(3))
        weights = jax.nn.softmax(jnp.einsum("thw,shw->hts", q, k))
        return jnp.einsum("hts,shw->thw", weights, v)

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    small = jaxact.compress(attention, activations=1)
    p = shape(3, heads * width, heads * width)
    shorter, longer = (
        jaxact.residuals(small, p, shape(length, heads * width)).stored_bytes
        for length in (2047, 2048)
    )
    # (2048 / 2047)^2, and a group more in a row of 2048 than in 2047.
    assert longer < 1.01 * shorter


RATES = jnp.linspace(0, 1, 16)[None, None]


@jax.custom_vjp
def growth(x):
    return jnp.exp(x[..., None] * RATES)


def _backward(x, ct):
    """From x: what multiplies the cotangent has sixteen times its elements."""
    return ((ct * RATES * jnp.exp(x[..., None] * RATES)).sum(-1),)


growth.defvjp(lambda x: (growth(x), x), _backward)


def test_a_rule_that_computes_values_again_gets_8_bits():
    w = jax.random.normal(jax.random.key(2), (D, D)) / 8
    f = lambda w, x: -growth(x @ w)
    actions = {
        Policy(bits=2): Quantize(8),
        Policy(default=Quantize(3)): Quantize(3),
        Policy(rules=(Rule(Quantize(4), recomputed_from=True),)): Quantize(4),
        Policy(rules=(Rule(Quantize(4), recomputed_from=False),)): Quantize(8),
    }
    for policy, action in actions.items():
        table = jaxact.residuals(jaxact.compress(f, policy=policy, activations=1), w, X)
        (row,) = (row for row in table.rows if row.bias.value == "biased")
        assert row.action == action
    # exp(x + e) is wrong by e: less than a step, of 1/255 of a range of 8 deviations.
    assert gradient_error(f, w, X, policy=Policy(bits=2, rules=X_EXACT)) < 0.03


def test_recomputed_from_is_checked():
    with pytest.raises(TypeError, match="recomputed_from=True"):
        Rule(Exact(), recomputed_from=1)  # pyright: ignore


CLASSES = jax.nn.one_hot(jnp.arange(T) % D, D)
SOFT = jax.nn.softmax(3 * CT)

POLES = {
    "cross-entropy": lambda z: -(CLASSES * jnp.log(jax.nn.softmax(z) + 1e-9)),
    "rel_entr": lambda z: jax.scipy.special.rel_entr(SOFT, jax.nn.softmax(z)),
    "inverse": lambda z: SOFT / (jax.nn.softmax(z) + 1e-6),
    "root": lambda z: jnp.sqrt(jax.nn.softmax(z)),
    "power": lambda z: (jax.nn.softmax(z) + 1e-2) ** -1.5,
}
MATRIX = jax.random.normal(jax.random.key(2), (D, D)) * 3 / 8


@pytest.mark.parametrize("f", POLES.values(), ids=POLES)
def test_argument_near_a_pole(f):
    g = lambda w, x: f(x @ w)
    small = jaxact.compress(g, policy=Policy(bits=8), activations=1)
    rows = jaxact.residuals(small, MATRIX, X).rows
    assert [row.primitive for row in rows if "pole" in row.why] == ["exp"]
    assert gradient_error(g, MATRIX, X, policy=Policy(bits=8), argnums=(0, 1)) < 0.032


NEAR = {
    "logarithm": lambda z: jnp.log(jnp.abs(z) + 1e-3),
    "division": lambda z: jnp.tanh(z) / (jnp.abs(z) + 1e-2),
    "power": lambda z: (jax.nn.relu(z) + 1e-2) ** -1.5,
    # Rounded, z has errors that 1 / (z^2 + 1e-3) magnifies: 0.1 to 1.8 gradients.
    "logarithm of a square": lambda z: jnp.log(z * z + 1e-3),
    "inverse square": lambda z: 1 / (z**2 + 1e-2),
    "direction": lambda z: z * jax.lax.rsqrt(z * z + 1e-4),
    "logarithm of a size": lambda z: jnp.log(z**2 + jnp.roll(z, 1, 0) ** 2 + 1e-4),
    "logarithm of a gamma distribution's tail": lambda z: jnp.log(
        jax.scipy.special.gammainc(2.0, jnp.exp(z))
    ),
    "logarithm of a beta distribution's tail": lambda z: jnp.log(
        jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(2 * z))
    ),
    "normalizer of a von Mises distribution": lambda z: jnp.log(
        jax.scipy.special.i0e(jnp.exp(3 * z))
    ),
}


@pytest.mark.parametrize("f", NEAR.values(), ids=NEAR)
def test_activation_near_a_pole(f):
    g = lambda w, x: f(x @ w)
    assert gradient_error(g, MATRIX, X, policy=Policy(bits=8), argnums=(0, 1)) < 0.032


FAR = {
    "swish": lambda x: x / (1 + jnp.exp(-x)),
    "softplus": lambda x: jnp.log(1 + jnp.exp(x)),
    "log1p": lambda x: jnp.log1p(jnp.exp(x)),
    "root": lambda x: jnp.sqrt(x * x + 1),
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "logaddexp": lambda x: jax.nn.softplus(x),
    "square root of a gate": lambda x: jnp.sqrt(0.5 + jax.nn.sigmoid(x)),
    "clipped": lambda x: jnp.log(jnp.clip(x, 0.2, 5.0)),
    "safe": lambda x: jnp.log(jnp.where(x > 1, jnp.exp2(jax.nn.relu(x)), 1.0)),
}


@pytest.mark.parametrize("f", FAR.values(), ids=FAR)
def test_argument_far_from_a_pole_is_compressed(f):
    w = jnp.eye(D)
    small = jaxact.compress(lambda w, x: f(x) @ w, activations=1)
    rows = jaxact.residuals(small, w, X).rows
    assert not [row for row in rows if isinstance(row.action, Exact) and row.primitive]


def test_a_rule_decides_near_a_pole():
    policy = Policy(bits=8, rules=(Rule(Quantize(4), primitive="exp"),))
    f = lambda w, x: POLES["cross-entropy"](x @ w)
    rows = jaxact.residuals(jaxact.compress(f, policy=policy), MATRIX, X).rows
    assert [row.action for row in rows if row.primitive == "exp"] == [Quantize(4)]


def batch_norm(x):
    centered = x - x.mean(0, keepdims=True)
    variance = (centered**2).mean(0, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-6)


def unit_pairs(x):
    pairs = x.reshape(-1, 2)
    size = jnp.sqrt((pairs * pairs).sum(-1, keepdims=True))
    return pairs / (size + 1e-3)


@pytest.mark.parametrize(
    "f, rows", [(batch_norm, 4), (batch_norm, 2), (unit_pairs, 32)]
)
def test_norms_over_a_few_values_read_exact_ones(f, rows):
    """Rounded at 8 bits, they had noise from half to many times the gradient."""
    x = jax.random.normal(jax.random.key(5), (rows, D))
    w = jax.random.normal(jax.random.key(6), (D, D))
    error = gradient_error(lambda w, x: f(x @ w), w, x, policy=Policy(8))
    # That of x alone: steps of 1/255 of a row's 5 deviations, of which a stochastic
    # rounding errs by 0.4.
    assert error < 0.01


def test_norms_over_many_values_are_stored_rounded():
    x = jax.random.normal(jax.random.key(5), (64, 256))
    table = jaxact.residuals(
        jaxact.compress(lambda w, x: batch_norm(x * w[None]), activations="x"), x[0], x
    )
    assert table.stored_bytes < table.exact_bytes / 5


def test_an_equation_without_results_is_no_statistic():
    def printing(w, x):
        jax.debug.callback(lambda: None)
        return jnp.tanh(x @ w)

    small = jaxact.compress(printing, policy=Policy(8), activations="x")
    w = jnp.eye(D)
    assert_same_bits(jax.jit(small)(w, X), jax.jit(printing)(w, X))
    jax.grad(lambda w: small(w, X).sum())(w)


def norm_with_the_gain_first(x, gain):
    centered = x - x.mean(0, keepdims=True)
    return gain * centered * jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-5)


def test_a_channel_without_variance_in_a_norm_that_multiplies_with_the_gain_first():
    """Its inverse deviation is 316: noise in x itself was 3 times the gradient."""
    x = jnp.where(jnp.arange(D)[None] % 4 > 0, X, 0.0)
    gain = jnp.ones((1, D))
    error = gradient_error(norm_with_the_gain_first, x, gain, policy=Policy(bits=8))
    assert error < 1e-2  # 8 bits of a range of some 5 deviations: 0.6 %


def test_a_branch_without_results_reads_a_value():
    """The equations that computed it were dropped: a KeyError."""

    def f(x):
        y = jax.lax.rsqrt(x * x + 0.5)
        z = y * y.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return jax.lax.cond(y[0, 0] > 0, lambda _: z, lambda _: z, y)

    assert gradient_error(f, X, policy=Policy(bits=8)) < 1e-2


def test_a_product_of_float8_values_beside_a_float32_slope():
    """Their slopes had no common dtype: a TypePromotionError."""

    def f(x):
        narrow = x.astype(jnp.float8_e5m2)
        return (narrow * narrow).astype(jnp.float32) * jnp.sin(x)

    # JAX rounds the products of the tangent to float8, with 2 bits of mantissa.
    assert gradient_error(f, X, policy=Policy(bits=8)) < 2**-3


def test_the_gradient_of_a_number_is_summed_in_its_dtype():
    """In bfloat16, to which the product is cast, a sum of 4,096 terms was halved."""
    x = jnp.abs(jax.random.normal(jax.random.key(7), (64, 64)))

    def f(scale, x):
        return (jnp.tanh(x) * jax.nn.sigmoid(scale)).astype(jnp.bfloat16)

    ct = jnp.ones_like(x, jnp.bfloat16)
    pull = lambda f: jax.vjp(f, jnp.float32(0.3), x)[1](ct)[0]
    found = pull(jaxact.compress(f, policy=Policy(8), activations=1))
    # Each term's slope is rounded to bfloat16, by at most 2^-9 of it; to 8 bits without
    # bias, so that 4,096 of them add five deviations of 1 / 255 / 2 / 64.
    assert abs(found / pull(f) - 1) < 2**-9 + 5 / 255 / 2 / 64

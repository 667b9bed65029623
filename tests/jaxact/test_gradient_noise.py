"""The noise of whole layers, read off their backward programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.backward_programs import Program, check, normal, uneven
from support.variants import thorough

pytestmark = pytest.mark.unoptimized


def linear(x, w):
    return x @ w


def test_linear_is_the_closed_form():
    x, w, variance = normal(0, 24, 10), normal(1, 10, 6), uneven(2, 24, 10)
    program = Program.of(linear, x, w)
    i = program.where(x)
    check(program, i, variance, targets=[1])
    noise = program.noise({i: variance})[i]
    g = np.asarray(program.values[-1], np.float64)
    closed = np.sum(np.sum(g**2, 1) * np.asarray(variance, np.float64).sum(1))
    np.testing.assert_allclose(noise.added, closed, rtol=1e-6)


def test_linear_over_tokens():
    x, w = normal(0, 4, 6, 10), normal(1, 10, 6)
    program = Program.of(linear, x, w)
    check(program, program.where(x), uneven(2, 4, 6, 10), targets=[1])


def test_one_variance_for_many_elements():
    program = Program.of(linear, normal(0, 24, 10), normal(1, 10, 6))
    i = program.where(normal(0, 24, 10))
    rows = jnp.linspace(0.0, 1.0, 24)[:, None]
    few, many = program.noise({i: rows}), program.noise({i: rows * jnp.ones((24, 10))})
    np.testing.assert_allclose(few[i].added, many[i].added, rtol=1e-6)


@pytest.mark.parametrize("side", [0, 1])
def test_product_of_two_activations(side):
    q, k = normal(0, 2, 2, 5, 4), normal(1, 2, 2, 6, 4)
    program = Program.of(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), q, k)
    x = (q, k)[side]
    check(program, program.where(x), uneven(2, *x.shape), targets=[1 - side])


def convolution(stride=1, padding="SAME", dilation=1, groups=1):
    return lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def transposed(stride):
    return lambda x, w: lax.conv_transpose(x, w, (stride, stride), "SAME")


CONVOLUTIONS = {
    "3x3": (convolution(), (3, 3, 4, 6)),
    "stride 2": (convolution(stride=2), (3, 3, 4, 6)),
    "uneven padding": (convolution(2, [(1, 1), (2, 0)]), (3, 3, 4, 6)),
    "3x2 dilated": (convolution(dilation=2), (3, 2, 4, 6)),
    "1x1": (convolution(), (1, 1, 4, 6)),
    "grouped": (convolution(groups=2), (3, 3, 2, 6)),
    "depthwise": (convolution(groups=4), (3, 3, 1, 8)),
    "transposed": (transposed(1), (3, 3, 4, 5)),
    "transposed, stride 2": (transposed(2), (3, 3, 4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    f, kernel = CONVOLUTIONS[name]
    x = normal(0, 2, 6, 5, 4)
    program = Program.of(f, x, normal(1, *kernel))
    check(program, program.where(x), uneven(2, *x.shape), targets=[1])


@pytest.mark.parametrize("name", ["stride 2", "grouped", "depthwise"])
def test_convolution_with_a_kernel_that_is_computed(name):
    """A noisy kernel reaches the gradient of the input."""
    f, shape = CONVOLUTIONS[name]
    kernel = normal(1, *shape)
    program = Program.of(f, normal(0, 2, 6, 5, 4), kernel)
    check(program, program.where(kernel), uneven(2, *shape), targets=[0])


def test_convolution_with_groups_of_both_kinds():
    """As vmap over kernels of a grouped convolution makes them."""
    x, w = normal(0, 2, 2, 6, 5, 4), normal(1, 2, 3, 3, 2, 6)
    program = Program.of(jax.vmap(convolution(groups=2)), x, w)
    (i,) = [i for i, r in enumerate(program.residuals) if r.size == x.size]
    variance = uneven(2, *program.residuals[i].shape)
    check(program, i, variance, targets=[1])


def norm_program(x, axes):
    """Backward of a norm from its normalized value: gradients of x, gamma and beta."""
    rest = tuple(range(x.ndim - 1))
    mean, deviation = x.mean(axes, keepdims=True), x.std(axes, keepdims=True)

    def run(residuals, g):
        normalized, inverse, gamma = residuals
        h = g * gamma
        along = (h * normalized).mean(axes, keepdims=True)
        gx = inverse * (h - h.mean(axes, keepdims=True) - normalized * along)
        return gx, (g * normalized).sum(rest), g.sum(rest)

    gamma = normal(5, *[1] * len(rest), x.shape[-1])
    residuals = [(x - mean) / deviation, 1 / deviation, gamma]
    return Program(run, residuals, normal(6, *x.shape))


@pytest.mark.parametrize("output", [0, 1], ids=["x", "gamma"])
@pytest.mark.parametrize(
    "shape, axes",
    [((4, 5, 5, 32), (0, 1, 2)), ((20, 24), (1,))],
    ids=["batch", "layer"],
)
def test_norm(shape, axes, output):
    """By 2 / (elements of a statistic), which are 100 and 24: see `deviations`.

    Errors of variance 0.001: products of two are left out.
    """
    both = norm_program(1 + normal(0, *shape), axes)
    g = both.values[-1]
    one = Program(lambda r, c: [both.plain(*r, c)[output]], both.residuals, g)
    check(one, 0, 0.01 * uneven(2, *shape), rtol=2 / 24 if axes == (1,) else 2 / 100)


def test_norm_and_its_consumer():
    """One stored value: the norm's, and the next matmul's input by an affine map."""
    base = norm_program(normal(0, 20, 24), (1,))
    w, beta = normal(8, 24, 6), normal(9, 1, 24)

    def run(residuals, g):
        normalized, inverse, gamma = residuals
        gx, ggamma, _ = base.plain(normalized, inverse, gamma, g @ w.T)
        return (normalized * gamma + beta).T @ g, gx, ggamma

    program = Program(run, base.residuals, normal(6, 20, 6))
    check(program, 0, 0.01 * uneven(2, 20, 24), rtol=2 / 24)


def test_whole_norm():
    """A norm as JAX differentiates it: each use of the centered value on its own."""

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)

    x = normal(0, 20, 24)
    program = Program.of(norm, x)
    noisy = [i for i, r in enumerate(program.residuals) if r.shape == x.shape]
    assert noisy
    for i in noisy:
        check(program, i, uneven(i, 20, 24), rtol=2 / 24)


def test_slopes_of_an_activation():
    """The residuals of tanh-GELU meet the cotangent element by element."""
    program = Program.of(jax.nn.gelu, jnp.linspace(-2.0, 2.0, 800))
    noisy = [i for i, r in enumerate(program.residuals) if r.shape == (800,)]
    assert len(noisy) >= 2
    for i in noisy:
        check(program, i, uneven(2, 800))


@pytest.mark.parametrize("f", [jax.nn.silu, jax.nn.gelu, jax.nn.softplus])
def test_activation_recomputed_from_its_input(f):
    """The paths of one residual meet again, which is exact to first order.

    By 0.01: errors of deviation below 0.02 have a second order of its square.
    """
    x = normal(0, 300)
    program = Program.of(jax.checkpoint(f), x)
    check(program, program.where(x), 1e-3 * uneven(2, 300), rtol=0.01)


def attention_program(length, width=8, heads=2):
    """With a zero added to the scores, whose gradient is that of the scores."""
    q, k, v = (normal(i, heads, length, width) for i in range(3))

    def attention(zero, q, k, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / width**0.5 + zero
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)

    zero = jnp.zeros((heads, length, length))
    return Program.of(attention, zero, q, k, v), (q, k, v)


@pytest.mark.parametrize("which, reached", [(0, 2), (1, 1)], ids=["q", "k"])
def test_attention_operands(which, reached):
    """q reaches the gradient of k, and k that of q."""
    program, operands = attention_program(16)
    x = operands[which]
    check(program, program.where(x), uneven(4, *x.shape), targets=[reached])


def test_attention_values():
    """v reaches the gradient of the weights: each error meets a column of g."""
    program, (_, _, v) = attention_program(16)
    i, variance = program.where(v), uneven(4, *v.shape)
    g, variances = (np.asarray(x, np.float64) for x in (program.values[-1], variance))
    closed = np.einsum("bqd,bkd->", g**2, variances)
    noise = program.noise({i: variance})[i]
    np.testing.assert_allclose(noise.added, closed, rtol=1e-5)


@pytest.mark.parametrize("bits, rtol", [(2, 0.15), (4, 0.08), (8, 0.06)])
def test_softmax_weights(bits, rtol):
    """Too much by `rtol`: errors of a row's sum count as independent of the row's.

    The variances are those of rounding each row's exponentials to so many bits. Found
    at 32 columns: 1.08, 1.04, 1.04 times the drawn noise; at 128: 1.03, 1.02, 1.01; at
    128 with scores 2.5 times as large: 1.18, 1.05, 1.01.
    """
    program, _ = attention_program(32)
    square = [i for i, r in enumerate(program.residuals) if r.shape == (2, 32, 32)]
    (i,) = [i for i in square if np.all(program.residuals[i].max(-1) == 1)]
    scale = 1 / (2**bits - 1)
    place = program.residuals[i] / scale % 1
    check(program, i, scale**2 * place * (1 - place), targets=[0], rtol=rtol)


def test_two_consumers_add():
    x, w, u = normal(0, 24, 10), normal(1, 10, 6), normal(2, 10, 3)
    program = Program.of(lambda x, w, u: (x @ w, x @ u), x, w, u)
    check(program, program.where(x), uneven(3, 24, 10), targets=[1, 2])


def test_noise_stops_at_its_first_target():
    """A slope's noise is measured in the gradient that two matmuls read, once."""

    def run(residuals, g):
        x, slope, w = residuals
        inner = g * slope
        return x.T @ inner, inner @ w.T

    x, slope, w, g = normal(0, 9, 5), normal(1, 9, 7), normal(2, 5, 7), normal(3, 9, 7)
    noise = Program(run, [x, slope, w], g).noise({1: uneven(4, 9, 7)})[1]
    np.testing.assert_allclose(noise.added, np.sum(g**2 * uneven(4, 9, 7)), rtol=1e-5)
    np.testing.assert_allclose(noise.signal, np.sum((g * slope) ** 2), rtol=1e-5)


def test_several_noisy_inputs_are_told_apart():
    a, b, g = normal(0, 9), normal(1, 9), normal(2, 9)
    program = Program(lambda r, g: [r[0] * r[1] * g], [a, b], g)
    noise = program.noise({0: 0.1, 1: uneven(3, 9)})
    closed = np.sum(0.1 * (b * g) ** 2), np.sum(uneven(3, 9) * (a * g) ** 2)
    np.testing.assert_allclose([noise[0].added, noise[1].added], closed, rtol=1e-5)


def test_half_precision():
    x, w = normal(0, 24, 10).astype(jnp.bfloat16), normal(1, 10, 6).astype(jnp.bfloat16)
    program = Program.of(linear, x, w)
    noise = program.noise({program.where(x): 0.1})[program.where(x)]
    g = np.asarray(program.values[-1], np.float32)
    np.testing.assert_allclose(noise.added, 0.1 * 10 * np.sum(g**2), rtol=1e-5)
    assert noise.added.dtype == noise.signal.dtype == jnp.float32


def loop(x, ws):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def test_what_enters_a_loop_is_not_measured():
    program = Program.of(loop, normal(0, 6, 5), normal(1, 3, 5, 5))
    stacked = [i for i, r in enumerate(program.residuals) if r.shape == (3, 6, 5)]
    assert stacked
    assert program.noise(dict.fromkeys(stacked, 0.1)) == dict.fromkeys(stacked)


def test_a_product_that_a_loop_reads_is_a_target():
    def run(residuals, g):
        slope, ws = residuals
        return [loop(g * slope, ws)]

    slope, g = normal(0, 6, 5), normal(2, 6, 5)
    noise = Program(run, [slope, normal(1, 3, 5, 5)], g).noise({0: 0.1})[0]
    np.testing.assert_allclose(noise.added, 0.1 * np.sum(g**2), rtol=1e-5)
    np.testing.assert_allclose(noise.signal, np.sum((g * slope) ** 2), rtol=1e-5)


@pytest.mark.parametrize(
    "recompute",
    [
        lambda x, w: jnp.sin(x @ w),
        lambda x, w: jnp.where(x[:, :4] > 0, 0.5, 1.0),
        lambda x, w: jnp.where(x[:, :4] == 0, 0.5, 1.0),
        lambda x, w: jnp.sort(x)[:, :4],
        lambda x, w: x[:, :4].astype(jnp.int32).astype(jnp.float32),
    ],
    ids=["matmul", "comparison", "equality", "sort", "integer"],
)
def test_what_is_not_understood_is_not_measured(recompute):
    """Not even where another reader is understood: half of the noise is no answer."""

    def run(residuals, g):
        x, w = residuals
        return [recompute(x, w) * g, x.T @ g]

    program = Program(run, [normal(0, 6, 5), normal(1, 5, 4)], normal(2, 6, 4))
    assert program.noise({0: 0.1}) == {0: None}


def test_an_unused_residual_is_not_measured():
    program = Program(lambda r, g: [g], [normal(0, 5)], normal(1, 5))
    assert program.noise({0: 0.1}) == {0: None}


def test_what_nobody_reads_does_not_matter():
    def run(residuals, g):
        jnp.sort(residuals[0])
        return [residuals[0] * g]

    assert Program(run, [normal(0, 5)], normal(1, 5)).noise({0: 0.1})[0] is not None


def network(params, x, labels):
    for w in params["convolutions"]:
        x = jax.nn.silu(convolution(stride=2)(x, w))
    x = x.mean((1, 2))
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    logits = jax.nn.gelu(x @ params["w"]) @ params["u"]
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))


@thorough
@pytest.mark.parametrize(
    "f", [network, jax.checkpoint(network)], ids=["plain", "remat"]
)
def test_outputs_are_those_of_the_plain_program(f):
    params = {
        "convolutions": [normal(0, 3, 3, 4, 8), normal(1, 3, 3, 8, 16)],
        "w": normal(2, 16, 32),
        "u": normal(3, 32, 10),
    }
    labels = jax.nn.one_hot(jnp.arange(6), 10)
    program = Program.of(lambda p, x: f(p, x, labels), params, normal(4, 6, 12, 12, 4))
    noisy = [i for i, r in enumerate(program.residuals) if r.dtype == jnp.float32]
    variances = dict.fromkeys(noisy, jnp.float32(0.01))
    with jax.disable_jit():  # else XLA fuses, and so rounds, each program in its way
        out, _ = program.measured(variances, program.values)
        true = program.plain(*program.values)
    assert all(map(np.array_equal, out, true))


def test_costs_little():
    """About 3 operations for each element of x and g, and the matmuls take 4 * 128."""

    def mlp(ws, x):
        for w in ws[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ ws[-1]

    def flops(f, *args):
        return jax.jit(f).lower(*args).compile().cost_analysis()["flops"]

    program = Program.of(
        mlp, [normal(i, 128, 128) for i in range(3)], normal(9, 64, 128)
    )
    like = normal(9, 64, 128)
    noisy = [
        i
        for i, r in enumerate(program.residuals)
        if r.shape == like.shape and r.dtype == like.dtype
    ]
    variances = {i: jnp.full((64, 1), 0.1) for i in noisy}
    measured = [x for x in program.noise(variances).values() if x is not None]
    assert len(measured) == 3
    plain = flops(program.plain, *program.values)
    assert flops(program.measured, variances, program.values) < 1.02 * plain


@pytest.mark.parametrize(
    "variances, message",
    [
        ({0: np.ones((3, 5))}, "does not broadcast to the input's shape"),
        ({0: np.ones((1, 6, 5))}, "does not broadcast to the input's shape"),
        ({1: 0.1}, "floating inputs only"),
    ],
)
def test_wrong_variances(variances, message):
    residuals = [normal(0, 6, 5), jnp.ones((6, 5), jnp.int32)]
    program = Program(lambda r, g: [r[0] * g, r[1]], residuals, normal(1, 6, 5))
    with pytest.raises(ValueError, match=message):
        program.measured(variances, program.values)

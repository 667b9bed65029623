"""The noise of a gradient is what the rounding of the stored residuals predicts.

Contract: let n_i be the rounding errors of the stored elements, independent, of mean 0
and variance v_i = scale^2 f (1 - f), f the fraction of the code. Each gradient has the
expected squared error that is derived beside each cell below, within 10 %: both its
total and, relative to that, the absolute deviations of its elements together.

Published formulas (AC-GC, Evans and Aamodt 2021, and the like for other layers) have
one v for all elements. Here each element keeps its own, because noise is uneven: none
on a code, most half way between two. Predictions are float64 NumPy; scales and
fractions come from `oracle`, which shares no code with the library.

Measured over predicted totals:

                                    2 bits          4 bits
    linear, conv                    0.999, 1.001    0.999, 1.001
    matmul, both operands           1.001, 1.000    0.999, 1.000
    GELU                            1.000           1.000
    LayerNorm, gain and x           1.000, 1.003    1.003, 0.998
    BatchNorm, channels last        1.005, 0.999    0.995, 0.994
    BatchNorm, channels first       1.002, 1.000    0.998, 1.004
    the same, a channel a group     1.000, 1.009    0.992, 0.998
    softmax                         0.958           0.996
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from support.oracle import rounding_variance
from support.variants import thorough

DRAWS = 4096
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Cell:
    """A layer, and the noise of its gradients.

    Attributes:
      f: the layer, called with arrays of `shapes`.
      activations: the arguments that are no parameters.
      noise: (cotangent, bits, *arguments) in float64 -> E[error^2] of each element of
        the gradients, by argument.
    """

    f: Callable[..., jax.Array]
    shapes: dict[str, tuple[int, ...]]
    activations: tuple[str, ...]
    noise: Callable[..., dict[str, np.ndarray]]

    def arguments(self):
        return [uneven(i + 1, shape) for i, shape in enumerate(self.shapes.values())]

    def cotangent(self):
        return uneven(0, jax.eval_shape(self.f, *self.arguments()).shape)


def uneven(seed, shape):
    """Normal numbers whose size and place vary along every axis."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    for axis, size in enumerate(shape):
        along = [size if i == axis else 1 for i in range(len(shape))]
        x = x * rng.uniform(0.5, 1.5, along) + rng.uniform(-0.5, 0.5, along)
    return jnp.asarray(x, jnp.float32)


def linear(w, x):
    return x @ w


def linear_noise(g, bits, w, x):
    """gw_ij = sum_b x_bi g_bj is linear in x, and no x_bi enters an element twice.

    E[error_ij^2] = sum_b v_bi g_bj^2. Nothing dropped. (Even v: v d_in ||g||^2 in all.)
    """
    return {"w": rounding_variance(x, bits).T @ g**2}


def conv(w, x):
    return lax.conv(x, w, (1, 1), "SAME")


def conv_noise(g, bits, w, x):
    """gw_ocrs = sum_bpq x_b,c,p+r,q+s g_bopq, again linear in x.

    E[error_ocrs^2] = sum_bpq v_b,c,p+r,q+s g_bopq^2. Nothing dropped: padding has
    v = 0, so that this sum is below the closed v C_in R S ||g||^2. Groups run along the
    channels, which a GPU has last for a convolution.
    """
    height, width = w.shape[2:]
    v = rounding_variance(x.transpose(0, 2, 3, 1), bits).transpose(0, 3, 1, 2)
    v = np.pad(v, ((0, 0), (0, 0), (height // 2,) * 2, (width // 2,) * 2))
    out = np.zeros(w.shape)
    for r, s in np.ndindex(height, width):
        window = v[:, :, r : r + g.shape[2], s : s + g.shape[3]]
        out[:, :, r, s] = np.einsum("bcpq,bopq->oc", window, g**2)
    return {"w": out}


def matmul(a, b):
    return a @ b


def matmul_noise(g, bits, a, b):
    """ga = g b^T and gb = a^T g: each is linear in the other operand.

    E[error_mk^2] = sum_n g_mn^2 v(b)_kn; E[error_kn^2] = sum_m v(a)_mk g_mn^2. Nothing
    dropped. (Even v: v(b) K ||g||^2 and v(a) K ||g||^2 in all.)
    """
    return {
        "a": g**2 @ rounding_variance(b, bits).T,
        "b": rounding_variance(a, bits).T @ g**2,
    }


def gelu_noise(g, bits, x):
    """gx_i = g_i d_i. What is stored is the derivative d = gelu'(x) itself, not x.

    E[error_i^2] = g_i^2 v(d)_i. Nothing dropped. (With x stored instead, and d computed
    from it, the error would be v(x)_i g_i^2 gelu''(x_i)^2 and biased.)
    """
    c, k = np.sqrt(2 / np.pi), 0.044715
    t = np.tanh(c * (x + k * x**3))
    d = (1 + t) / 2 + x / 2 * (1 - t**2) * c * (1 + 3 * k * x**2)
    return {"x": g**2 * rounding_variance(d, bits)}


@dataclasses.dataclass(frozen=True)
class Norm:
    """LayerNorm or BatchNorm: statistics over `axes`, and a gain that broadcasts.

    Statistics are kept exactly, and x so that xhat = (x - mean) r is affine in what is
    rounded: x itself where statistics are the same all over a group of codes, else
    xhat. So xhat' = xhat + n, with variance u = r^2 v(x) or u = v(xhat).

    Gain. ggain_j = sum_t g_tj xhat_tj is linear: E[error_j^2] = sum_t g_tj^2 u_tj.
    Nothing dropped.

    Input. With q = g gain, over the d elements that are normalized together,
        gx_j = r (q_j - mean q - xhat_j a / d),  a = sum_k q_k xhat_k,
    where xhat enters twice: in xhat_j, from which backward subtracts the mean (0 but
    for noise), and in a. With m_j = n_j - mean n and N = sum_k q_k n_k,
        error_j = -(r / d) (a m_j + xhat_j N + m_j N),
        E[m_j^2] = u_j (1 - 2 / d) + sum u / d^2,
        E[N^2] = sum q^2 u,  E[m_j N] = q_j u_j - sum q u / d,
        E[error_j^2] = (r / d)^2 (a^2 E[m_j^2] + xhat_j^2 E[N^2] + 2 a xhat_j E[m_j N]
                                  + E[m_j^2] E[N^2]).
    (Even v: v r^4 (a^2 (1 + 1 / d) + ||q||^2) / d, and the last term; 1 + 2 / d where
    the mean is not subtracted.) The last term, of second order, is 15 to 35 % of all at
    two bits, where u is 0.6 to 1.2, and 1 to 2 % at four. Dropped is what (m_j N)^2 and
    the products of m_j N with the first two terms have on average beyond it, because
    m_j and N share n_j. That is one of the d summands of N, so 1 / d (d = 256) of what
    is kept; 1 / sqrt(d) for a E[m_j^2 N] = a q_j E[n_j^3], if all signs conspire.
    """

    axes: tuple[int, ...]
    is_xhat_rounded: bool = False

    def __call__(self, gain, x):
        mean = x.mean(self.axes, keepdims=True)
        rstd = lax.rsqrt(x.var(self.axes, keepdims=True) + EPSILON)
        return (x - mean) * rstd * gain

    def noise(self, g, bits, gain, x):
        total = functools.partial(np.sum, axis=self.axes, keepdims=True)
        d = x.size / total(x).size
        r = (x.var(self.axes, keepdims=True) + EPSILON) ** -0.5
        xhat = (x - x.mean(self.axes, keepdims=True)) * r
        if self.is_xhat_rounded:
            u = rounding_variance(xhat, bits)
        else:
            u = r**2 * rounding_variance(x, bits)
        q = g * gain
        a, nn = total(q * xhat), total(q**2 * u)
        mm = u * (1 - 2 / d) + total(u) / d**2
        mn = q * u - total(q * u) / d
        square = a**2 * mm + xhat**2 * nn + 2 * a * xhat * mn + mm * nn
        repeated = tuple(axis for axis, n in enumerate(gain.shape) if n == 1)
        ggain = (g**2 * u).sum(repeated, keepdims=True)
        return {"gain": ggain, "x": (r / d) ** 2 * square}


def softmax_noise(g, bits, x):
    """e = exp(x - max x) is stored, and its sum exactly; y = e / sum has u = v / sum^2.

    gx_j = y_j (g_j - c), c = sum_k y_k g_k. With n the errors of y, N = sum_k g_k n_k:
        error_j = (g_j - c) n_j - y_j N - n_j N,
        E[N^2] = sum g^2 u,  E[n_j N] = g_j u_j,
        E[error_j^2] = u_j (g_j - c)^2 + y_j^2 E[N^2] - 2 (g_j - c) y_j g_j u_j
                       + u_j E[N^2].
    (Even u: the published u (sum (g - c)^2 + ||y||^2 ||g||^2 - 2 sum (g - c) y g), and
    the last term: 2 % at two bits.) Dropped is what n_j in N adds to products with
    n_j N: -2 (g_j - c) g_j E[n_j^3], and less. |E[n_j^3]| is at most scale of y times
    u_j; evaluated for these rows it is -4.2 % of all at two bits, -0.5 % at four.
    """
    total = functools.partial(np.sum, axis=-1, keepdims=True)
    e = np.exp(x - x.max(-1, keepdims=True))
    y, u = e / total(e), rounding_variance(e, bits) / total(e) ** 2
    rest, var_n = g - total(y * g), total(g**2 * u)
    square = u * rest**2 + y**2 * var_n - 2 * rest * y * g * u
    return {"x": square + u * var_n}


LAYER = Norm((1,))
CHANNELS_LAST = Norm((0, 1, 2), is_xhat_rounded=True)
CHANNELS_FIRST = Norm((0, 2, 3), is_xhat_rounded=True)  # a group: 4 channels of 8 x 8
WIDE_CHANNELS_FIRST = Norm((0, 2, 3))  # a group is a channel's 16 x 16
CELLS = {
    "linear": Cell(linear, {"w": (64, 8), "x": (32, 64)}, ("x",), linear_noise),
    "conv": Cell(conv, {"w": (4, 8, 3, 3), "x": (4, 8, 8, 8)}, ("x",), conv_noise),
    "matmul": Cell(matmul, {"a": (32, 64), "b": (64, 32)}, ("a", "b"), matmul_noise),
    "gelu": Cell(jax.nn.gelu, {"x": (16, 128)}, ("x",), gelu_noise),
    "layer_norm": Cell(LAYER, {"gain": (1, 256), "x": (32, 256)}, ("x",), LAYER.noise),
    "batch_norm_last": Cell(
        CHANNELS_LAST,
        {"gain": (1, 1, 1, 32), "x": (4, 8, 8, 32)},
        ("x",),
        CHANNELS_LAST.noise,
    ),
    "batch_norm_first": Cell(
        CHANNELS_FIRST,
        {"gain": (1, 32, 1, 1), "x": (4, 32, 8, 8)},
        ("x",),
        CHANNELS_FIRST.noise,
    ),
    "batch_norm_first_wide": Cell(
        WIDE_CHANNELS_FIRST,
        {"gain": (1, 8, 1, 1), "x": (2, 8, 16, 16)},
        ("x",),
        WIDE_CHANNELS_FIRST.noise,
    ),
    "softmax": Cell(
        lambda x: -jax.nn.softmax(x), {"x": (16, 256)}, ("x",), softmax_noise
    ),
}


def squared_errors(cell, bits):
    """Squared errors by argument: of each element, averaged; of all, for each draw."""
    policy = jaxact.Policy(default=jaxact.Quantize(bits))
    small = jaxact.compress(cell.f, policy=policy, activations=cell.activations)

    @jax.jit
    def run(keys, g, *args):
        exact = jax.vjp(cell.f, *args)[1](g)

        def add(sums, key):
            rounded = jax.vjp(functools.partial(small, rounding_key=key), *args)[1](g)
            squares = [(a - b) ** 2 for a, b in zip(rounded, exact, strict=True)]
            return jax.tree.map(jnp.add, sums, squares), [jnp.sum(x) for x in squares]

        return lax.scan(add, [jnp.zeros_like(x) for x in args], keys)

    keys = jax.random.split(jax.random.key(bits), DRAWS)
    elements, totals = run(keys, cell.cotangent(), *cell.arguments())
    as_float64 = lambda x: np.asarray(x, np.float64)
    pairs = zip(map(as_float64, elements), map(as_float64, totals), strict=True)
    return {k: (e / DRAWS, t) for k, (e, t) in zip(cell.shapes, pairs, strict=True)}


@pytest.mark.parametrize("name", CELLS)
def test_activations_are_packed_and_statistics_are_not(name):
    cell = CELLS[name]
    small = jaxact.compress(cell.f, activations=cell.activations)
    rows = jaxact.residuals(small, *cell.arguments()).rows
    packed = [row.shape for row in rows if isinstance(row.action, jaxact.Quantize)]
    assert packed == [cell.shapes[activation] for activation in cell.activations]


@thorough
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", CELLS)
def test_noise_of_gradients_is_as_predicted(name, bits):
    """In all and, which is more, element by element.

    The measured total has a standard error below 1.1 %, taken from the draws and
    asserted. Predictions of totals are within 2 % of the truth (softmax at two bits:
    5 %, with an error of 0.2 %), so a false alarm takes 7 standard errors: below 1e-10
    for all comparisons. An element's measured variance has a standard error of 2.2 %
    for normal errors, more where few codes differ, of mean size 2 % to 3 %; over all
    elements that hardly varies. The keys are fixed.
    """
    cell = CELLS[name]
    exact = [np.asarray(x, np.float64) for x in (cell.cotangent(), *cell.arguments())]
    predicted = cell.noise(exact[0], bits, *exact[1:])
    drawn = squared_errors(cell, bits)
    for argument, wanted in predicted.items():
        elements, totals = drawn[argument]
        spread = totals.std() / totals.mean() / DRAWS**0.5
        ratio = totals.mean() / wanted.sum()
        off = abs(elements - wanted).sum() / wanted.sum()
        assert spread < 0.011, (argument, spread)
        assert abs(ratio - 1) < 0.10, (argument, ratio)
        assert off < 0.10, (argument, off)

"""Losses written by hand: a pole is near to single elements of what has many.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

ROWS, CLASSES = 1024, 10
X = jax.random.normal(jax.random.key(0), (ROWS, 64))
# Logits with a deviation of 4: probabilities of e^-20 are among them.
W = jax.random.normal(jax.random.key(1), (64, CLASSES)) / 2
LABELS = jnp.arange(ROWS) * 7 % CLASSES
MASK = jax.nn.one_hot(LABELS, CLASSES)


def of_label(p):
    return jnp.take_along_axis(p, LABELS[:, None], -1)[:, 0]


def without_maximum(z):
    e = jnp.exp(z)
    return of_label(e) / e.sum(-1)


# Errors were 2 to 6e4 gradients.
LOSSES = {
    "indexed": lambda z: -jnp.log(jax.nn.softmax(z)[jnp.arange(ROWS), LABELS]),
    "taken along rows": lambda z: -jnp.log(of_label(jax.nn.softmax(z))),
    "with epsilon": lambda z: -jnp.log(of_label(jax.nn.softmax(z)) + 1e-8),
    "masked": lambda z: -jnp.log((MASK * jax.nn.softmax(z)).sum(-1)),
    "masked by a condition": lambda z: (
        -jnp.log(jnp.where(MASK > 0, jax.nn.softmax(z), 0).sum(-1))
    ),
    "focal": lambda z: -((1 - (p := of_label(jax.nn.softmax(z)))) ** 2) * jnp.log(p),
    "distributional": lambda z: (
        -(
            jnp.roll(jax.lax.stop_gradient(p := jax.nn.softmax(z)), 3, -1)
            * jnp.log(p + 1e-8)
        ).sum(-1)
    ),
    "one of several": lambda z: 1 / (of_label(jax.nn.softmax(z)) + 1e-6),
    "without a maximum": lambda z: -jnp.log(without_maximum(z)),
    "sigmoid": lambda z: -jnp.log(of_label(jax.nn.sigmoid(z))),
}
# Functions with a pole of a part of an array that comes from another one: 0.5 to 8.
PARTS = {
    "deviation": lambda m, d: (m - 1) ** 2 / d + jnp.log(d),
    "inverse": lambda m, d: m / d,
    "gamma function": lambda m, d: jax.lax.lgamma(m) - jax.lax.lgamma(m + d),
    "counts": lambda m, d: d * jnp.log((d + m) / d) + 3 * jnp.log((d + m) / m),
}
WIDE = jax.random.normal(jax.random.key(2), (64, 64)) * 3 / 8
POSITIVE = {"softplus": jax.nn.softplus, "exp": jnp.exp, "sigmoid": jax.nn.sigmoid}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_probability_of_any_size_has_its_gradient(loss):
    error = gradient_error(
        lambda w, x: loss(x @ w), W, X, policy=Policy(bits=8), argnums=(0, 1)
    )
    assert error < 0.05


@thorough
@pytest.mark.parametrize("positive", POSITIVE.values(), ids=POSITIVE)
@pytest.mark.parametrize("body", PARTS.values(), ids=PARTS)
def test_a_pole_near_a_part_of_an_array(body, positive):
    def f(w, x):
        return body(*jnp.split(positive(x @ w) + 1e-3, 2, axis=-1))

    error = gradient_error(f, WIDE, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


ORDER = jax.random.permutation(jax.random.key(3), 64)
# Errors were 0.1 to 60 gradients.
ON_THE_WAY = {
    "permuted": lambda p: p[:, ORDER],
    "sorted": lambda p: jnp.sort(p, -1),
    "the largest": lambda p: jax.lax.top_k(p, 8)[0],
    "the least": lambda p: p[:, :4].min(-1),
    "accumulated": lambda p: jnp.cumsum(p[:, :4], -1),
    "multiplied": lambda p: p[:, :32] * p[:, 32:],
    "joined": lambda p: jnp.concatenate([p, 2 * p[:, :8]], -1),
}
VANISHING = POSITIVE | {
    "square": jnp.square,
    "softmax": jax.nn.softmax,
    "relu": jax.nn.relu,
    "absolute": jnp.abs,
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", ON_THE_WAY.values(), ids=ON_THE_WAY)
@pytest.mark.parametrize("positive", VANISHING.values(), ids=VANISHING)
def test_what_is_on_the_way_to_a_pole(positive, way):
    """A slope that vanishes with the argument is multiplied with the pole's."""

    def f(w, x):
        q = way(positive(x @ w))
        return jnp.log(q + 1e-6) + 1e-4 / (q + 1e-3)

    error = gradient_error(f, WIDE, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


# Of a value and a probability that softmax multiplies with again: up to 2e3.
PAIRS = {
    "cross-entropy": lambda q, p: q * jnp.log(p + 1e-8),
    "quotient": lambda q, p: q / (p + 1e-3),
    "chi-squared": lambda q, p: (q - p) ** 2 / (p + 1e-6),
    "hyperbolic": lambda q, p: jnp.tanh(q * jnp.log(p + 1e-6)),
}
VALUES = {"tanh": jnp.tanh, "relu": jax.nn.relu, "linear": lambda z: z}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("loss", PAIRS.values(), ids=PAIRS)
def test_a_probability_times_what_comes_from_others(loss, value):
    def f(w, v, x):
        return loss(value(x @ v), jax.nn.softmax(x @ w))

    v = jax.random.normal(jax.random.key(4), W.shape) / 2
    policy = Policy(bits=8)
    assert gradient_error(f, W, v, X, policy=policy, argnums=(0, 1, 2)) < 0.05


ATOMS = 51


def of_actions(z):
    return z[jnp.arange(ROWS), LABELS % 4]


# Rows that an index selects, a distribution each (C51): errors were 0.5 to 3 gradients.
DISTRIBUTIONS = {
    "selected before": lambda z: jax.nn.softmax(of_actions(z)),
    "selected after": lambda z: of_actions(jax.nn.softmax(z)),
    "with epsilon": lambda z: jax.nn.softmax(of_actions(z)) + 1e-5,
    "clipped after": lambda z: jnp.clip(of_actions(jax.nn.softmax(z)), 1e-5, 1),
    "clipped before": lambda z: of_actions(jnp.clip(jax.nn.softmax(z), 1e-5, 1)),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_distribution_of_a_selected_row(distribution):
    def f(w, x, targets):
        p = distribution((x @ w).reshape(ROWS, 4, ATOMS))
        return (targets * jnp.log(p)).sum(-1)

    targets = jax.nn.softmax(jax.random.normal(jax.random.key(5), (ROWS, ATOMS)))
    w = jax.random.normal(jax.random.key(6), (64, 4 * ATOMS)) * 3 / 8
    error = gradient_error(f, w, X, targets, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


@thorough
def test_distances_in_a_ball():
    """Poincare's: arccosh has a pole in its slope at 1, where the distance is 0."""

    def f(w, x):
        v = x @ w / 20
        lengths = jnp.linalg.norm(v, axis=-1, keepdims=True)
        u = jnp.tanh(lengths) * v / lengths
        near = jax.lax.stop_gradient(u[:64]) + 1e-3 * W[:, :1].T
        squares = ((u[:, None] - near[None]) ** 2).sum(-1)
        inside = (1 - (u**2).sum(-1))[:, None] * (1 - (near**2).sum(-1))[None]
        distances = jnp.arccosh(jnp.maximum(1 + 2 * squares / inside, 1 + 1e-6))
        return (jax.nn.softmax(-10 * distances) * distances).sum(-1)

    error = gradient_error(f, WIDE, X, policy=Policy(bits=8))
    assert error < 0.05


def test_a_new_probability_over_the_old_one():
    """PPO's ratio: those with a gradient are as small as the old ones."""
    old = of_label(jax.nn.softmax(X @ W))

    def f(w, x):
        ratio = of_label(jax.nn.softmax(x @ w)) / old
        return jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))

    w = W + jax.random.normal(jax.random.key(5), W.shape) / 50
    error = gradient_error(f, w, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


def test_a_pole_near_single_numbers_of_rows():
    """Rows of one number are no smaller packed; what is computed from them would be."""

    def f(w, x):
        concentration = jax.nn.softplus(x @ w)[:, 0]
        return x.mean(-1) * concentration - jnp.log(concentration + 1e-6)

    w = 3 * WIDE[:, :1]
    error = gradient_error(f, w, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


def splatted(w, x):
    """Pixels under normals in the plane, whose covariances determinants invert."""
    scale, skew = jnp.exp(x @ w[:, :2] / 2 + 0.7), jnp.tanh(x @ w[:, 2])
    a, c = scale[:, 0] ** 2 + 0.3, scale[:, 1] ** 2 + 0.3
    b = 0.9 * skew * scale[:, 0] * scale[:, 1]
    det = a * c - b * b
    grid = jnp.arange(-3.0, 4.0)
    first, second = jnp.repeat(grid, 7)[:, None], jnp.tile(grid, 7)[:, None]
    of_first, of_second, of_both = ((k / det)[None] for k in (c, a, b))
    power = of_first * first**2 + of_second * second**2 - 2 * of_both * first * second
    return jnp.exp(-power / 2).sum(-1)


@thorough
def test_a_determinant_of_exponentials():
    """Slopes over its square erred by 0.83 gradients; 0.006 is left."""
    w = jax.random.normal(jax.random.key(6), (64, 3)) / 8
    error = gradient_error(splatted, w, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.03


def of_experts(h):
    """A class's probability by two networks' geometric mean."""
    p, q = jax.nn.softmax(h[:, :32]), jax.nn.softmax(h[:, 32:64])
    both = jnp.sqrt(p * q + 1e-8)
    return jnp.log((both / both.sum(-1, keepdims=True))[:, 3] + 1e-8)


def test_a_class_by_several():
    """The error was 0.3 gradients."""
    w = jax.random.normal(jax.random.key(6), (64, 96)) / 4
    f = lambda w, x: of_experts(x @ w)
    assert gradient_error(f, w, X, policy=Policy(bits=8), argnums=(0, 1)) < 0.05


def test_a_value_that_is_exact_for_a_slope_says_so():
    f = lambda w, x: jnp.tanh(x @ w) / (jax.nn.softmax(x @ w[::-1]) + 1e-3)
    small = jaxact.compress(f, policy=Policy(bits=8), activations=1)
    reasons = {r.key: r.why for r in jaxact.residuals(small, W, X).rows}
    assert "a derivative near a pole" in reasons["dot_general"]
    assert "comes near a pole" in reasons["exp"]


def test_a_value_that_is_stored_anyway_is_rounded():
    """Of two softmaxes in a divergence the one that no pole is near to."""

    def f(w, v, x):
        return jax.nn.softmax(x @ v) * jnp.log(jax.nn.softmax(x @ w) + 1e-8)

    small = jaxact.compress(f, policy=Policy(bits=2), activations=2)
    rows = jaxact.residuals(small, W, W[::-1], X).rows
    exact = [r.shape for r in rows if r.bias.value == "exact"]
    assert exact.count((ROWS, CLASSES)) == 1


def test_a_cell_with_a_pole_inside_keeps_its_derivative_alone():
    """Nothing magnifies the noise of log(softplus(z) + 1e-3): its slope is bounded."""
    f = lambda w, x: jnp.log(jax.nn.softplus(x @ w) + 1e-3)
    small = jaxact.compress(f, policy=Policy(bits=2), activations=1)
    assert jaxact.residuals(small, WIDE, X).stored_bytes < 2 * 3 / 8 * X.size


def test_attention_whose_mask_comes_after_its_exponential_is_rounded():
    """A sum over a row that has a maximum is at least 1, and no single element."""

    def f(w, x):
        q = x @ w
        scores = (q @ q.T) / 8
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        e = jnp.where(e > 1e-4, e, 0)
        return (e @ q) / e.sum(-1, keepdims=True)

    small = jaxact.compress(f, policy=Policy(bits=2), activations=1)
    exact = [
        r.shape
        for r in jaxact.residuals(small, WIDE, X).rows
        if r.bias.value == "exact" and r.dtype == jnp.float32
    ]
    assert (ROWS, ROWS) not in exact


WITHOUT_TAILS = {
    "gate": lambda a, b: a / (1 + jnp.exp(-b)),
    "elu": lambda a, b: a * jnp.where(b > 0, b, jnp.exp(b) - 1),
    "coupling": lambda a, b: a * jnp.exp(b),
    "decay": lambda a, b: a * jnp.exp(-jax.nn.softplus(b)),
}


@pytest.mark.parametrize("body", WITHOUT_TAILS.values(), ids=WITHOUT_TAILS)
def test_exponentials_that_no_likelihood_is_taken_of_are_rounded(body):
    """A gated unit, a flow's coupling, a decay: their slopes meet no such factor."""

    def f(w, v, x):
        return jnp.tanh(body(*jnp.split(x @ w, 2, -1)) @ v)

    small = jaxact.compress(f, policy=Policy(bits=2), activations=2)
    rows = jaxact.residuals(small, WIDE, WIDE[:32], X).rows
    assert all(r.bias.value != "exact" for r in rows if r.dtype == jnp.float32)


MAXIMA = {
    "row": lambda d: d.max(-1, keepdims=True),
    "row and another": lambda d: jnp.maximum(d.max(-1), d[:, 0])[:, None],
}


@pytest.mark.parametrize("maximum", MAXIMA.values(), ids=MAXIMA)
def test_decays_from_a_maximum_leave_scores_rounded(maximum):
    """As an mLSTM's (Beck et al., 2024), which are at most 1: no slope is large."""

    def f(w, v, x):
        q, k = jnp.split(x @ w, 2, -1)
        forgets, gates = jnp.split(x @ v, 2, -1)
        sums = jnp.cumsum(jax.nn.log_sigmoid(forgets), 0)
        d = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), sums - sums.T, -jnp.inf)
        d = d + gates.T
        scores = (q @ k.T) * jnp.exp(d - maximum(d))
        sums = jnp.abs(scores.sum(-1, keepdims=True))
        return (scores / (jnp.maximum(sums, jnp.exp(-maximum(d))) + 1e-6)) @ q

    small = jaxact.compress(f, policy=Policy(bits=2), activations=2)
    rows = jaxact.residuals(small, WIDE, WIDE[:, :2], X[:64]).rows
    shapes = [r.shape for r in rows if r.bias.value == "exact" and r.dtype == X.dtype]
    assert (64, 64) not in shapes


def test_a_factor_for_a_whole_row_leaves_its_groups_rounded():
    """The likelihood of one normal scales all slopes of its row alike."""

    def f(w, x):
        means, deviations = jnp.split(x @ w, 2, -1)
        return jnp.exp(-(means**2 * jnp.exp(-deviations)).mean(-1))

    small = jaxact.compress(f, policy=Policy(bits=2), activations=1)
    shapes = {(ROWS, 64), (ROWS, 32)}
    rows = [r for r in jaxact.residuals(small, WIDE, X).rows if r.shape in shapes]
    assert all(r.bias.value != "exact" for r in rows)

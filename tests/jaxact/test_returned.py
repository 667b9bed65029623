"""Calls that return probabilities or deviations; a loss outside takes their logarithm.

The oracle is JAX's own gradient: one draw must lie near it. Rounded among larger ones,
small results had noise of 0.05 to 2.3 gradients at 8 bits, and of 0.3 to 60 at 4.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, Policy
from jaxact._form.intervals import find_intervals
from jaxact._jaxpr.compat import open_jaxpr
from support.programs import relative_error

pytestmark = pytest.mark.unoptimized

ROWS, INPUTS, HIDDEN, OUTPUTS = 256, 64, 128, 64
RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * RNG.standard_normal(shape), jnp.float32)


X = normal(ROWS, INPUTS)
WEIGHTS = normal(INPUTS, HIDDEN, scale=1 / 8), normal(HIDDEN, OUTPUTS, scale=3 / 11)
LABELS = RNG.integers(0, OUTPUTS, ROWS)
TARGETS = normal(ROWS, OUTPUTS)
EVENTS = TARGETS > 0


@dataclasses.dataclass(frozen=True)
class Case:
    """The last function of a network, and a loss of its results."""

    head: Callable[[Any], Any]
    loss: Callable[[Any], Any]

    def network(self, weights, x):
        return self.head(jax.nn.gelu(x @ weights[0]) @ weights[1])


def likelihood(p):
    return -jnp.log(p[jnp.arange(ROWS), LABELS] + 1e-8).mean()


def bernoulli(p):
    return -jnp.where(EVENTS, jnp.log(p), jnp.log(1 - p)).mean()


def laplace(scale):
    return (jnp.log(scale) + jnp.abs(TARGETS) / scale).mean()


# A mixture's number of softmaxes, and the words of a source that may be copied.
PARTS, COPIED = 4, 16
WORDS = RNG.integers(0, OUTPUTS, (ROWS, COPIED))


def mixture(z):
    """A mixture of softmaxes (Yang et al. 2018, eq. 2)."""
    parts = jax.nn.softmax(z.reshape(-1, PARTS, OUTPUTS // PARTS))
    return jnp.einsum("bk,bkv->bv", jax.nn.softmax(z[:, :PARTS]), parts)


def pointer(z):
    """Softmax, and with some probability a word of the source (See et al. 2017)."""
    copies, chosen = jax.nn.sigmoid(z[:, :1]), jax.nn.softmax(z[:, :COPIED])
    own = (1 - copies) * jax.nn.softmax(z)
    return own.at[jnp.arange(ROWS)[:, None], WORDS].add(copies * chosen)


def pointer_by_product(z):
    copies, chosen = jax.nn.sigmoid(z[:, :1]), jax.nn.softmax(z[:, :COPIED])
    copied = jnp.einsum("bs,bsv->bv", chosen, jax.nn.one_hot(WORDS, OUTPUTS))
    return (1 - copies) * jax.nn.softmax(z) + copies * copied


def with_rule(f, slope):
    """The function with a backward rule of its own, which keeps the operand."""
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda z: (ruled(z), z), lambda z, g: (g * slope(z),))
    return ruled


CASES = {
    "softmax": Case(jax.nn.softmax, likelihood),
    "clipped softmax": Case(lambda z: jnp.clip(jax.nn.softmax(z), 1e-7, 1), likelihood),
    "own softmax": Case(
        lambda z: jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True), likelihood
    ),
    "one of two": Case(
        lambda z: (z, jax.nn.softmax(z).astype(jnp.float32)),
        lambda both: likelihood(both[1]) + (both[0] ** 2).mean() / 100,
    ),
    "complement": Case(
        lambda z: 1 - jax.nn.softmax(z), lambda q: -jnp.log(1 - q + 1e-8).mean()
    ),
    "entropy": Case(jax.nn.softmax, lambda p: (p * jnp.log(p)).sum(-1).mean()),
    "sigmoid": Case(jax.nn.sigmoid, bernoulli),
    "own sigmoid": Case(lambda z: 1 / (1 + jnp.exp(-z)), bernoulli),
    "clipped sigmoid": Case(
        lambda z: jnp.clip(jax.nn.sigmoid(z), 1e-6, 1 - 1e-6), bernoulli
    ),
    "softplus": Case(lambda z: jax.nn.softplus(z) + 1e-4, laplace),
    "exponential": Case(jnp.exp, laplace),
    "elu": Case(lambda z: jax.nn.elu(z) + 1.0001, laplace),
    "square": Case(lambda z: 1e-4 + z**2, laplace),
    "sigmoid with a rule": Case(
        with_rule(
            lambda z: 1 / (1 + jnp.exp(-z)),
            lambda z: jax.nn.sigmoid(z) * jax.nn.sigmoid(-z),
        ),
        bernoulli,
    ),
    "softplus with a rule": Case(
        with_rule(lambda z: jax.nn.softplus(z) + 1e-4, jax.nn.sigmoid), laplace
    ),
    "own softplus": Case(lambda z: jnp.log(1 + jnp.exp(z)), laplace),
    "squared softplus": Case(lambda z: jax.nn.softplus(z) ** 2 + 1e-4, laplace),
    "one of each row": Case(
        lambda z: (jax.nn.softmax(z) * jax.nn.one_hot(LABELS, OUTPUTS)).sum(-1),
        lambda p: -jnp.log(p + 1e-8).mean(),
    ),
    "ensemble": Case(
        lambda z: jax.nn.softmax(z.reshape(-1, 4, OUTPUTS)).mean(1),
        lambda p: -jnp.log(p + 1e-8)[:, 0].mean(),
    ),
    "in a loop": Case(
        lambda z: jax.lax.map(jax.nn.softmax, z.reshape(4, -1, OUTPUTS)),
        lambda p: likelihood(p.reshape(ROWS, OUTPUTS)),
    ),
    "in a branch": Case(
        lambda z: jax.lax.cond(z[0, 0] > -9, jax.nn.softmax, jax.nn.sigmoid, z),
        likelihood,
    ),
    "mixture": Case(mixture, lambda p: -jnp.log(p + 1e-8)[:, 3].mean()),
    "pointer": Case(pointer, likelihood),
    "pointer by product": Case(pointer_by_product, likelihood),
    "mixture, loss inside": Case(lambda z: -jnp.log(mixture(z) + 1e-8)[:, 3], jnp.mean),
    "pointer, loss inside": Case(
        lambda z: -jnp.log(pointer(z)[jnp.arange(ROWS), LABELS] + 1e-8), jnp.mean
    ),
    "pointer by product, loss inside": Case(
        lambda z: -jnp.log(pointer_by_product(z)[jnp.arange(ROWS), LABELS] + 1e-8),
        jnp.mean,
    ),
    "rates": Case(jnp.exp, lambda r: (r - jnp.abs(TARGETS) * jnp.log(r)).mean()),
}


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.2)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_through_a_logarithm_outside(case, bits, most):
    compressed = jaxact.compress(
        case.network, policy=Policy(bits=bits), activations="x"
    )
    of = lambda f: jax.grad(lambda *args: case.loss(f(*args)), (0, 1))(WEIGHTS, X)
    got, wanted = jax.tree.leaves(of(compressed)), jax.tree.leaves(of(case.network))
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < most


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "exponential"])
def test_the_table_says_why(name):
    table = jaxact.residuals(
        jaxact.compress(CASES[name].network, activations="x"), WEIGHTS, X
    )
    (row,) = [row for row in table.rows if "a positive output" in row.why]
    assert row.action == Exact()
    assert row.shape == (ROWS, OUTPUTS)


RETURNED_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu with a rule": with_rule(jax.nn.relu, lambda z: jnp.where(z > 0, 1.0, 0.0)),
    "squared relu": lambda z: jax.nn.relu(z) ** 2,
    "square": jnp.square,
    "sum of squares": lambda z: z**2 + z[::-1] ** 2,
    "gate of a relu": lambda z: jax.nn.relu(z) * jax.nn.sigmoid(z[::-1]),
    "gate": lambda z: z * jax.nn.sigmoid(z),
    "gated relu": lambda z: jax.nn.relu(z + z[:, ::-1] * jax.nn.sigmoid(z)),
    "tanh": jnp.tanh,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "attention": lambda z: jax.nn.softmax(z @ z.T) @ z,
}


@pytest.mark.parametrize("f", RETURNED_ACTIVATIONS.values(), ids=RETURNED_ACTIVATIONS)
def test_returned_activations_are_packed(f):
    case = Case(f, jnp.sum)
    table = jaxact.residuals(jaxact.compress(case.network, activations="x"), WEIGHTS, X)
    assert not [row for row in table.rows if "a positive output" in row.why]


def test_the_state_of_a_loop_is_packed():
    """An Elman network with sigmoids: its state goes to the next step."""

    def f(weights, x):
        def step(h, u):
            h = jax.nn.sigmoid(h @ weights[0][:, :INPUTS] + u)
            return h, h @ weights[0]

        return jax.lax.scan(step, x, jnp.stack([x, -x]))[1]

    table = jaxact.residuals(jaxact.compress(f, activations="x"), WEIGHTS, X)
    assert not [row for row in table.rows if "a positive output" in row.why]


def series(weights, x):
    """A recurrent network that gives a mean and a deviation for each step (DeepAR)."""

    def step(h, u):
        h = jnp.tanh(0.3 * h + u @ weights[0])
        z = h @ weights[1]
        return h, (z, jax.nn.softplus(z[:, ::-1]) + 1e-3)

    steps = x.reshape(4, -1, INPUTS)
    return jax.lax.scan(step, jnp.zeros((ROWS // 4, HIDDEN)), steps)[1]


def normal_likelihood(moments):
    mean, deviation = (a.reshape(ROWS, OUTPUTS) for a in moments)
    return (jnp.log(deviation) + 0.5 * ((TARGETS - mean) / deviation) ** 2).mean()


@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
def test_deviations_from_a_loop(is_inside):
    """Rounded, 28 gradients at 8 bits, with the likelihood in the call as well."""
    whole = lambda weights, x: normal_likelihood(series(weights, x))
    pack = lambda f: jaxact.compress(f, policy=Policy(bits=8), activations="x")
    apart = lambda weights, x: normal_likelihood(pack(series)(weights, x))
    of = lambda f: jax.tree.leaves(jax.jit(jax.grad(f, (0, 1)))(WEIGHTS, X))
    got = of(pack(whole) if is_inside else apart)
    for a, b in zip(got, of(whole), strict=True):
        assert relative_error(a, b) < 0.03


def test_an_ensemble_in_the_call():
    """The sum of a few probabilities is as small as they are."""
    case = CASES["ensemble"]
    f = lambda weights, x: case.loss(case.network(weights, x))
    small = jaxact.compress(f, policy=Policy(bits=8), activations="x")
    got, wanted = (jax.grad(g)(WEIGHTS, X) for g in (small, f))
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 0.03


@pytest.mark.parametrize("axis, is_bounded", [(0, True), (None, True), (1, False)])
def test_a_share_is_of_a_sum_that_has_the_element(axis, is_bounded):
    """A row's elements over another row's sum may have any size."""
    share = lambda e: e / jnp.broadcast_to(e.sum(axis), e.shape)
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: share(jnp.exp(x)))(jnp.eye(4)))
    bounds = find_intervals(jaxpr)[jaxpr.outvars[0]]
    assert bounds == (0.0, 1.0 if is_bounded else np.inf)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.tanh(x) / 0.0,
        lambda x: jnp.tanh(x) / jnp.zeros_like(x),
        lambda x: jnp.exp(x) / 0.0 - jnp.exp(x) / 0.0,
    ],
)
def test_a_quotient_by_zero_has_any_value(f):
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(f)(jnp.eye(4)))
    assert jaxpr.outvars[0] not in find_intervals(jaxpr)

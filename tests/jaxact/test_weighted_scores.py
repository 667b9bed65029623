"""Scores that meet their own exponentials: exact where both get a gradient."""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (64, 32))
# Scores with a deviation of 6: most rows are peaked.
W, OTHERS = 6 * jax.random.normal(KEYS[1], (2, 32, 64)) / 32**0.5
VALUES = jax.random.normal(KEYS[2], (64, 64))


def entropy(z):
    return jax.nn.softmax(z) * jax.nn.log_softmax(z)


def entropy_of_logarithms(z):
    log_p = jax.nn.log_softmax(z)
    return jnp.exp(log_p) * log_p


def discrete_actor(z):
    log_p = jax.nn.log_softmax(z)
    return jnp.exp(log_p) * (0.2 * log_p - VALUES)


def smooth_maximum(z):
    return jnp.einsum("ij,ij->i", jax.nn.softmax(z), z)


def smooth_maximum_by_hand(z):
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return (e * z).sum(-1) / e.sum(-1)


LOSSES = [
    entropy,
    entropy_of_logarithms,
    discrete_actor,
    smooth_maximum,
    smooth_maximum_by_hand,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_distribution_times_its_own_scores(loss):
    """Rounded, both had noise of 0.03 to 0.09 gradients."""
    f = lambda w, x: loss(x @ w).sum()
    # That of the input alone: 8 bits of a range of 6 to 8 deviations, at most 1.6 %.
    assert gradient_error(f, W, X, policy=Policy(8)) < 0.016


def divergence(p_scores, q_scores):
    log_p, log_q = jax.nn.log_softmax(p_scores), jax.nn.log_softmax(q_scores)
    return (jax.nn.softmax(p_scores) * (log_p - log_q)).sum(-1)


def divergence_by_logarithms(p_scores, q_scores):
    log_p, log_q = jax.nn.log_softmax(p_scores), jax.nn.log_softmax(q_scores)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def divergence_from_their_mean(p_scores, q_scores):
    log_p, log_q = jax.nn.log_softmax(p_scores), jax.nn.log_softmax(q_scores)
    mean = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return (jnp.exp(log_p) * (log_p - mean) + jnp.exp(log_q) * (log_q - mean)).sum(-1)


DIVERGENCES = [divergence, divergence_by_logarithms, divergence_from_their_mean]


@pytest.mark.parametrize("of", DIVERGENCES, ids=lambda f: f.__name__)
def test_the_divergence_of_two_distributions(of):
    """Rounded, their factors had noise of 0.04 to 0.06 gradients."""
    f = lambda w, v, x: of(x @ w, x @ v).sum()
    assert gradient_error(f, W, OTHERS, X, policy=Policy(8), argnums=(0, 1)) < 0.016


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:jaxact")
def test_costs_weighted_by_a_plan_of_transport():
    """Rounded, costs and plan had noise of 0.2 gradients."""

    x, y = jax.random.normal(KEYS[3], (2, 256, 32))

    def transport(w, x):
        costs = ((jnp.tanh(x @ w)[:, None] - y[None]) ** 2).mean(-1)
        u, temperature = jnp.zeros((len(x), 1)), 0.1
        for _ in range(5):
            scores = (u - costs) / temperature
            v = -temperature * jax.nn.logsumexp(scores, 0, keepdims=True)
            scores = (v - costs) / temperature
            u = -temperature * jax.nn.logsumexp(scores, 1, keepdims=True)
        return (jnp.exp((u + v - costs) / temperature) * costs).sum()

    w = W[:, :32] / 6
    assert gradient_error(transport, w, x, policy=Policy(8), jit=True) < 0.016


def test_weights_without_a_gradient_leave_scores_rounded():
    """A teacher's, also where the teacher is the network itself."""

    def distillation(w, x):
        return divergence(jax.lax.stop_gradient(2 * x @ w), x @ w).sum()

    def pseudo_labels(w, x):
        labels = jax.lax.stop_gradient(jax.nn.softmax(2 * x @ w))
        return (labels * jax.nn.log_softmax(x @ w)).sum()

    for f in (distillation, pseudo_labels):
        small = jaxact.compress(f, policy=Policy(8), activations="x")
        kept = jax.eval_shape(lambda w, f=small: jax.vjp(lambda w: f(w, X), w)[1], W)
        size = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(kept))
        # Weights, the student's exponentials and x in 8 bits, each group with its
        # scale and zero point; four statistics of rows.
        arrays = 2 * VALUES.size + X.size
        assert size <= 1.1 * arrays + 4 * 4 * len(X)

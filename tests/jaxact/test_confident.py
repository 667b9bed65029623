"""Cross-entropies whose rows are confident: the gradient is far below the largest.

The oracle is JAX's own gradient, which one draw at 8 bits must lie near.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxact
from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

ROWS, WIDTH = 64, 64
SEEDS = [jax.random.key(i) for i in range(3)]


def rows_with_margin(classes, margin):
    """Weights, labels, and rows whose label has a score so far above all others."""
    w = jax.random.normal(SEEDS[0], (WIDTH, classes)) / WIDTH**0.5
    labels = jax.random.randint(SEEDS[1], (ROWS,), 0, classes)
    h = jax.random.normal(SEEDS[2], (ROWS, WIDTH))
    own = w[:, labels].T
    is_label = jax.nn.one_hot(labels, classes, dtype=bool)
    for _ in range(100):
        scores = h @ w
        others = jnp.where(is_label, -jnp.inf, scores).max(-1)
        lack = margin + others - jnp.where(is_label, scores, 0).sum(-1)
        h = h + (0.7 * lack / (own**2).sum(-1))[:, None] * own
    return h, w, labels


LOSSES = {
    "selected": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], -1).mean()
    ),
    "one-hot": lambda z, y: optax.softmax_cross_entropy(
        z, jax.nn.one_hot(y, z.shape[-1])
    ).mean(),
    "integers": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(
        z, y
    ).mean(),
    "of columns": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z.T, axis=0), y[None], 0).mean()
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("classes", [16, 256])
def test_a_label_far_above_all_others(loss, classes):
    """Errors were 18 to 29 gradients."""
    h, w, labels = rows_with_margin(classes, 12)
    f = lambda h, w: loss(h @ w, labels)
    assert gradient_error(f, h, w, policy=Policy(bits=8), argnums=(0, 1)) < 0.03


@pytest.mark.thorough
@pytest.mark.parametrize("classes", [16, 256])
def test_a_label_far_above_all_others_that_a_mask_keeps(classes):
    """Errors were 18 and 22 gradients; short rows are stored over their sums, too."""
    h, w, labels = rows_with_margin(classes, 12)
    is_kept = jnp.arange(classes) >= labels.min()

    def f(h, w):
        p = jax.nn.log_softmax(h @ w, where=is_kept)
        return -jnp.take_along_axis(p, labels[:, None], -1).mean()

    assert gradient_error(f, h, w, policy=Policy(bits=8), argnums=(0, 1)) < 0.03


def test_a_label_far_above_all_others_in_rows_with_unlike_sums():
    """The error was 18 gradients."""
    h, w, labels = rows_with_margin(16, 12)

    def f(h, w):
        z = h @ w + jnp.arange(ROWS)[:, None] / 4
        label = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
        return (jnp.log(jnp.exp(z).sum(-1)) - label).mean()

    assert gradient_error(f, h, w, policy=Policy(bits=8), argnums=(0, 1)) < 0.03


def contrasted(a, b):
    """Pairs of two views, by rows and by columns, at CLIP's largest temperature."""
    a, b = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
    z = 30 * a @ b.T
    return LOSSES["integers"](z, jnp.arange(ROWS)) + LOSSES["selected"](
        z.T, jnp.arange(ROWS)
    )


@pytest.mark.thorough
def test_pairs_that_are_told_apart():
    """The error was 6e3 gradients."""
    a, noise = (jax.random.normal(key, (ROWS, WIDTH)) for key in SEEDS[:2])
    policy = Policy(bits=8)
    assert gradient_error(contrasted, a, a + 0.3 * noise, policy=policy) < 0.03


@pytest.mark.parametrize("bits", [2, 8])
def test_the_largest_takes_little(bits):
    """An index and an element for each row."""
    h, w, labels = rows_with_margin(256, 12)
    f = lambda w, h: LOSSES["selected"](h @ w, labels)
    small = jaxact.compress(f, policy=Policy(bits=bits), activations=1)
    table = jaxact.residuals(small, w, h)
    (packed,) = [r for r in table.rows if r.shape == (ROWS, 256)]
    assert packed.bias.value != "exact"
    exact = sum(r.stored_bytes for r in table.rows if r.bias.value == "exact")
    assert exact <= ROWS * (4 + 4 + 2) + labels.nbytes


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA there rounds scores elsewhere in any two programs on a CPU",
)
def test_logits_in_bfloat16_give_the_same_loss():
    h, w, labels = rows_with_margin(256, 8)

    def f(h, w):
        z = h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return LOSSES["selected"](z.astype(jnp.float32), labels)

    small = jaxact.compress(f, policy=Policy(bits=8), activations=(0, 1))
    expected, _ = jax.jit(jax.value_and_grad(f, (0, 1)))(h, w)
    actual, _ = jax.jit(jax.value_and_grad(small, (0, 1)))(h, w)
    assert actual == expected


def test_checkpoint_around_packs_the_input():
    h, w, labels = rows_with_margin(64, 1)

    def f(h, w):
        return LOSSES["selected"](jnp.sin(h @ w) @ w, labels)

    policy = Policy(bits=8, recompute=jaxact.Checkpoint())
    table = jaxact.residuals(jaxact.compress(f, policy=policy, activations="h"), h, w)
    (row,) = table.rows
    assert row.key == "h"
    assert 8 * row.stored_bytes <= 9 * h.size

"""Losses of boxes: an overlap that may vanish, divided by an area, plus an epsilon.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it. Areas have no
sign that bounds show; it is the epsilon that tells of a pole nearby.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy, Quantize
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

ROWS = 256
X = jax.random.normal(jax.random.key(0), (ROWS, 64))
W = jax.random.normal(jax.random.key(1), (64, 4)) / 8  # outputs with a deviation of 1
CENTERS, SIZES = jax.random.uniform(jax.random.key(2), (2, ROWS, 2))
TARGETS = jnp.concatenate([CENTERS - SIZES / 4, CENTERS + SIZES / 4 + 0.1], -1)


def area(lower, upper):
    return (upper - lower).prod(-1)


def overlap(box):
    """Intersection over union, the union, and the box around both."""
    lower, upper = box[:, :2], box[:, 2:]
    low, high = TARGETS[:, :2], TARGETS[:, 2:]
    both = jnp.clip(jnp.minimum(upper, high) - jnp.maximum(lower, low), 0)
    both = both[:, 0] * both[:, 1]
    union = area(lower, upper) + area(low, high) - both
    hull = jnp.minimum(lower, low), jnp.maximum(upper, high)
    return both / (union + 1e-6), union, hull


def generalized(box):  # Rezatofighi et al., 2019
    iou, union, hull = overlap(box)
    return 1 - iou + 1 - union / (area(*hull) + 1e-6)


def distance(box):  # Zheng et al., 2020
    iou, _, (low, high) = overlap(box)
    apart = (box[:, :2] + box[:, 2:] - TARGETS[:, :2] - TARGETS[:, 2:]) / 2
    return 1 - iou + (apart**2).sum(-1) / (((high - low) ** 2).sum(-1) + 1e-7)


# Errors were 0.08 to 320 gradients where a derivative was stored of which one is large.
LOSSES = {
    "overlap": lambda box: 1 - overlap(box)[0],
    "logarithm": lambda box: -jnp.log(overlap(box)[0] + 1e-6),  # UnitBox, 2016
    "generalized": generalized,
    "distance": distance,
}


def around(center, size):
    return jnp.concatenate([center - size / 2, center + size / 2], -1)


BOXES = {
    "sigmoids": lambda z: around(jax.nn.sigmoid(z[:, :2]), jax.nn.sigmoid(z[:, 2:])),
    "exponentials": lambda z: around(z[:, :2], jnp.exp(z[:, 2:])),
    "corners": lambda z: jnp.concatenate(
        [z[:, :2], z[:, :2] + jax.nn.softplus(z[:, 2:])], -1
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_boxes_has_its_gradient(loss, box):
    def f(w, x):
        return loss(box(x @ w))

    error = gradient_error(f, W, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05
    rows = jaxact.residuals(
        jaxact.compress(f, policy=Policy(8), activations=1), W, X
    ).rows
    # Four numbers a box and what each derivative is of are all that the loss keeps.
    assert [r.key for r in rows if isinstance(r.action, Quantize)] == ["x"]

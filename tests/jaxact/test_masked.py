"""Values that a mask sets to zero may be larger than all that it keeps.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxact import Policy
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

HEADS, TOKENS, WIDTH = 4, 64, 64
KEYS = jax.random.split(jax.random.key(0), 3)
ACTIVATIONS = dict(
    zip("qkv", jax.random.normal(KEYS[0], (3, HEADS, TOKENS, 16)), strict=True),
    gates=jax.random.normal(KEYS[1], (HEADS, TOKENS)),
)
W = jax.random.normal(KEYS[2], (WIDTH, WIDTH)) / 8
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))

# Decays of a gated linear attention: each exponential is below 1 where the mask keeps
# it, and up to e^60 elsewhere.
DECAYED = {
    "selected": lambda s, d: s * jnp.where(CAUSAL, jnp.exp(d), 0),
    "lower triangle": lambda s, d: s * jnp.tril(jnp.exp(d)),
    "times a mask": lambda s, d: s * (jnp.exp(d) * jnp.tril(jnp.ones_like(d))),
    "selected after a product": lambda s, d: jnp.where(CAUSAL, s * jnp.exp(d), 0),
    "times a mask after a product": lambda s, d: (
        s * jnp.exp(d) * (d <= 0).astype(d.dtype)
    ),
    "inverse": lambda s, d: s * jnp.where(CAUSAL, 1 / (1 + jnp.exp(-d)), 0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("names", ["q k v gates", "q k v", "gates"])
@pytest.mark.parametrize("decayed", DECAYED.values(), ids=DECAYED)
def test_a_masked_exponential(decayed, names):
    """In one group with unmasked ones it was lost: 1 to 8 gradients, or no number."""

    def f(*active):
        given = ACTIVATIONS | dict(zip(names.split(), active, strict=True))
        q, k, v, gates = given.values()
        sums = jnp.cumsum(jax.nn.log_sigmoid(gates), -1)
        scores = jnp.einsum("htd,hsd->hts", q, k)
        scores = decayed(scores, sums[:, :, None] - sums[:, None, :])
        out = jnp.einsum("hts,hsd->thd", scores, v)
        return jnp.tanh(out.reshape(TOKENS, WIDTH) @ W)

    active = [ACTIVATIONS[name] for name in names.split()]
    argnums = range(len(active))
    error = gradient_error(f, *active, policy=Policy(bits=8), argnums=[*argnums])
    assert error < 0.1


STEPS = jnp.tril(jnp.ones((16, 16), bool))


def test_decays_that_end_within_a_step():
    """Gates had 2 gradients of noise: that of scores which have not decayed."""
    rows = (32, 16, 16)

    k, v = jax.random.normal(KEYS[0], (2, *rows))

    def f(q, gates):
        sums = jnp.cumsum(8 * gates, -1)
        decays = jnp.where(STEPS, sums[:, :, None] - sums[:, None, :], -1e30)
        scores = jnp.einsum("htd,hsd->hts", q, k) * jnp.exp(decays)
        return jnp.einsum("hts,hsd->htd", scores, v)

    q = jax.random.normal(KEYS[1], rows)
    gates = jax.nn.log_sigmoid(jax.random.normal(KEYS[2], rows[:2]))
    error = gradient_error(f, q, gates, policy=Policy(bits=8), argnums=[0, 1])
    assert error < 0.05


# One exponential, or one mask, on both sides.
BOTH_SIDES = {
    "other side": lambda x, e: jnp.where(CAUSAL, x, 0) + jnp.where(CAUSAL, 0, e * X),
    "either side": lambda x, e: jnp.where(CAUSAL, e, 0) + jnp.where(CAUSAL, 0, e * X),
    "numbers": lambda x, e: (m := jnp.tril(jnp.ones_like(x))) * e * X + (1 - m) * e,
    "square": lambda x, e: jnp.where(CAUSAL, e * e, 0) + jnp.where(CAUSAL, 0, x),
    "output": lambda x, e: jnp.where(CAUSAL, e * X, 0) + jax.nn.relu(X) * e,
}
X = jax.random.normal(jax.random.key(3), (TOKENS, WIDTH))


@pytest.mark.parametrize("body", BOTH_SIDES.values(), ids=BOTH_SIDES)
def test_a_mask_hides_no_element_that_is_needed(body):
    def f(x):
        return jnp.tanh(body(x @ W, jnp.exp(x @ W)) @ W)

    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.05


# JAX divides all elements and masks the quotient; the product reads that once more.
WITH_EMPTY_ROWS = {
    "a product": lambda x, p: p @ W[:32, :32],
    "another factor": lambda x, p: jnp.sin(x) * p,
    "itself": lambda x, p: x * p,
    "a sum": lambda x, p: x + jnp.vdot(x, p),
    "twice": lambda x, p: jax.nn.relu(p @ W[:32, :32]) * p,
    "a function": lambda x, p: jnp.tanh(p) * x,
}
LENGTHS = jnp.array([16, 5, 8, 0, 3, 0, 16, 9]).reshape(8, 1, 1)
ROW_MASKS = {
    "given": lambda x: jnp.arange(16).reshape(1, 16, 1) < LENGTHS,
    "of the activation": lambda x: x > 1.5,
}


@pytest.mark.parametrize("body", WITH_EMPTY_ROWS.values(), ids=WITH_EMPTY_ROWS)
@pytest.mark.parametrize("mask", ROW_MASKS.values(), ids=ROW_MASKS)
def test_a_softmax_of_rows_without_an_element(body, mask):
    """JAX's exponentials are NaN there, and their neighbours in a group were too."""
    x = X.reshape(8, 16, 32)
    f = lambda x: body(x, jax.nn.softmax(x, where=mask(x)))
    assert gradient_error(f, x, policy=Policy(bits=8)) < 0.05


# Of the masked exponential these would be infinite, and are masked afterwards.
POLES = {
    "quotient": lambda x, e: X / e * x,
    "logarithm": lambda x, e: jnp.log(e * X**2) * x,
    "power": lambda x, e: e**-1.5 * x,
}


@pytest.mark.parametrize("pole", POLES.values(), ids=POLES)
def test_a_pole_at_the_masked_value(pole):
    def f(x):
        e = jnp.exp(x @ W)
        return jnp.where(CAUSAL, e * x, 0) @ W + jnp.where(CAUSAL, pole(x, e), 0)

    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.05


@pytest.mark.thorough
def test_a_mask_made_after_what_it_masks():
    """The program evaluates it first where the exponential is stored masked."""

    def f(x):
        e = jnp.exp(x @ W * 20)
        share = e / e.sum(-1, keepdims=True)
        kept = jnp.where(jnp.sin(X) > 0, e, 0) * X
        return kept @ W + jnp.where(jnp.sin(X) > 0, share, 0)

    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.05


@pytest.mark.parametrize("function", [jnp.exp, jax.nn.softplus, jnp.square])
def test_a_number_that_a_mask_spreads(function):
    """Its gradient sums over the mask: a mask of the array is none of the number."""

    def f(scale, x):
        return jnp.sin(x + function(scale) * jnp.eye(TOKENS, WIDTH))

    scale = jnp.float32(-0.7)
    error = gradient_error(f, scale, X, policy=Policy(bits=8), argnums=(0, 1))
    assert error < 0.05


FLAGS = {
    "python": True,
    "false": False,
    "numpy": np.bool_(True),
    "array": jnp.asarray(True),
    "all": jnp.ones((TOKENS, WIDTH), bool),
}


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_flag_that_selects(flag):
    """A number in the program has no `astype`."""
    f = lambda x: jnp.where(flag, jnp.sin(x), jnp.exp(x)) ** 2
    assert gradient_error(f, X, policy=Policy(bits=8)) < 0.02
    one = lambda x: lax.select(flag, jnp.sin(x), jnp.exp(x)) ** 2
    assert gradient_error(one, X, policy=Policy(bits=8)) < 0.02

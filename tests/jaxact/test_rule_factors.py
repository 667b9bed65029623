"""Custom backward rules that compare or bend a value which they keep.

The oracle is JAX's own gradient. At 8 bits a comparison of the rounded value errs by
5 % to 25 % here, and in the mean of the draws too.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Exact, Policy, Rule
from support.programs import gradient_error

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(1), 6)
X = jax.random.normal(KEYS[0], (64, 64))
W1 = 0.2 * jax.random.normal(KEYS[1], (64, 128))
W2 = 0.1 * jax.random.normal(KEYS[2], (128, 128))


def with_rule(f, slope, kept=lambda x: x):
    """`f` of one array, with `ct` to `slope(kept(x), ct)` for its backward rule."""
    rule = jax.custom_vjp(lambda x: f(x))
    rule.defvjp(lambda x: (f(x), kept(x)), lambda r, ct: (slope(r, ct),))
    return rule


def fires(x):
    return (x > 0).astype(x.dtype)


relu = with_rule(jax.nn.relu, lambda x, ct: jnp.where(x > 0, ct, 0))
fast_sigmoid = with_rule(fires, lambda x, ct: ct / (10 * jnp.abs(x) + 1) ** 2)


@jax.custom_gradient
def relu6(x):
    return jnp.clip(x, 0, 6), lambda ct: ct * ((x > 0) & (x < 6)).astype(x.dtype)


COMPARISONS = {
    "relu": relu,
    "relu by its output": with_rule(
        jax.nn.relu, lambda y, ct: ct * (y > 0).astype(y.dtype), jax.nn.relu
    ),
    "leaky": with_rule(jax.nn.leaky_relu, lambda x, g: jnp.where(x > 0, g, 0.01 * g)),
    "sign": with_rule(jnp.sign, lambda x, ct: jnp.where(jnp.abs(x) <= 1, ct, 0)),
    "by closure": relu6,
    "in a jit": jax.jit(relu),
}
SLOPES = {
    "surrogate, arctangent": with_rule(
        fires, lambda x, ct: ct / (1 + (jnp.pi * x) ** 2)
    ),
    "surrogate, fast sigmoid": fast_sigmoid,
    "surrogate, triangle": with_rule(
        fires, lambda x, ct: ct * jnp.maximum(0, 1 - jnp.abs(x))
    ),
    "differentiated anew": with_rule(
        jax.nn.gelu, lambda x, ct: jax.vjp(jax.nn.gelu, x)[1](ct)[0]
    ),
}


def network(act):
    return lambda x, w1, w2: act(x @ w1) @ w2


def rows(f, *args, bits=4, rules=()):
    """The residuals of `f`, whose first argument is an activation."""
    policy = Policy(bits, rules=rules)
    small = jaxact.compress(f, policy=policy, activations=(0,))
    return jaxact.residuals(small, *args).rows


@pytest.mark.parametrize("act", COMPARISONS.values(), ids=COMPARISONS)
def test_a_comparison_is_one_exact_bit(act):
    """So what passes it is exact, at any number of bits."""
    for bits in 2, 8:
        f = lambda x: network(act)(x, W1, W2)
        assert gradient_error(f, X, policy=Policy(bits)) == 0
    found = rows(network(act), X, W1, W2)
    assert "biased" not in {row.bias.value for row in found}
    masks = [row for row in found if row.dtype == bool]
    assert masks and all(row.stored_bytes == math.prod(row.shape) // 8 for row in masks)


@pytest.mark.parametrize("act", SLOPES.values(), ids=SLOPES)
def test_a_slope_is_rounded_after_it_was_computed(act):
    """One array with the policy's own bits, without bias; 0.02 to 0.19 before."""
    f = network(act)
    for argnums in 0, 1:
        error = gradient_error(f, X, W1, W2, policy=Policy(8), argnums=argnums)
        assert error < 0.02
    found = rows(f, X, W1, W2)
    assert "biased" not in {row.bias.value for row in found}
    inner = [r for r in found if r.shape == (64, 128) and r.dtype == "float32"]
    assert sum(r.stored_bytes for r in inner) < 2 * 0.6 * 64 * 128


def test_two_slopes_of_a_gate():
    @jax.custom_vjp
    def swiglu(a, b):
        return jax.nn.silu(a) * b

    def backward(kept, ct):
        (a, b), s = kept, jax.nn.sigmoid(kept[0])
        return ct * b * (s + a * s * (1 - s)), ct * a * s

    swiglu.defvjp(lambda a, b: (swiglu(a, b), (a, b)), backward)
    f = lambda x, w1, w3, w2: swiglu(x @ w1, x @ w3) @ w2
    args = X, W1, W1[::-1], W2
    assert gradient_error(f, *args, policy=Policy(8), argnums=(0, 1, 2)) < 0.02
    assert "biased" not in {row.bias.value for row in rows(f, *args)}


def test_a_learned_step_size():
    """LSQ (Esser et al. 2020): where x is in range, and how far from a level."""

    @jax.custom_vjp
    def quantized(x, step):
        return jnp.clip(jnp.round(x / step), -8, 7) * step

    def backward(kept, ct):
        x, step = kept
        v = x / step
        inside = (v >= -8) & (v <= 7)
        to_level = jnp.where(inside, jnp.round(v) - v, jnp.clip(v, -8, 7))
        return jnp.where(inside, ct, 0), (ct * to_level).sum()

    quantized.defvjp(lambda x, step: (quantized(x, step), (x, step)), backward)
    f = lambda x, step: quantized(x @ W1, step) @ W2
    args = X, jnp.float32(0.2)
    assert gradient_error(f, *args, policy=Policy(8)) == 0
    assert gradient_error(f, *args, policy=Policy(8), argnums=1) < 0.02


def spiking(unroll):
    def f(x, w1, w2):
        def step(state, x):
            v, spikes = state
            v = 0.9 * v + x @ w1 - spikes
            spikes = fast_sigmoid(v - 1)
            return (v, spikes), spikes @ w2

        state = jnp.zeros((2, 16, 128))
        if not unroll:
            return lax.scan(step, tuple(state), x)[1]
        outputs, state = [], tuple(state)
        for one in x:
            state, out = step(state, one)
            outputs.append(out)
        return jnp.stack(outputs)

    return f


@pytest.mark.parametrize("unroll", [False, True], ids=["scan", "loop"])
def test_a_spiking_network(unroll):
    x = jax.random.normal(KEYS[3], (5, 16, 64))
    error = gradient_error(spiking(unroll), x, W1, W2, policy=Policy(8), argnums=(0, 1))
    assert error < 0.03  # 0.2 before


def test_the_mean_of_the_draws():
    """The bias was 0.05 at 2 bits and 0.02 at 8; the mean of n draws errs by theirs."""
    f = lambda x, w: fast_sigmoid(x @ W1) @ w
    ct = jax.random.normal(KEYS[4], (64, 128))
    small = jaxact.compress(f, policy=Policy(2), activations=(0,))
    draw = lambda key: jax.grad(lambda x: (small(x, W2, rounding_key=key) * ct).sum())(
        X
    )
    draws = jax.jit(jax.vmap(draw))(jax.random.split(KEYS[5], 256))
    exact = jax.grad(lambda x: (f(x, W2) * ct).sum())(X)
    along = np.asarray((draws * exact[None]).sum((1, 2)) / (exact**2).sum())
    # A normal mean lies 5 standard errors away in one of 1.7e6 tests.
    assert abs(along.mean() - 1) < 5 * along.std() / np.sqrt(len(along))


def test_a_loop_in_a_rule_that_makes_other_values_too():
    """Of its results one is bent from x; another is from the weights alone."""

    def scanned(x, w):
        step = lambda w, x: (w, (jnp.tanh(x), jnp.cos(w)))
        return lax.scan(step, w, x)[1]

    def backward(kept, ct):
        ys, slopes = scanned(*kept)
        return ct * (1 - ys**2) * slopes, (ct * ys).sum(0)

    rule = jax.custom_vjp(lambda x, w: jnp.tanh(x) * w[None])
    rule.defvjp(lambda x, w: (rule(x, w), (x, w)), backward)
    w = jax.random.normal(KEYS[3], (128,))
    f = lambda x: rule(x @ W1, w) @ W2
    for bits, most in (8, 0.02), (4, 0.3):
        assert gradient_error(f, X, policy=Policy(bits)) < most


def test_a_selection_from_zeros_protects_a_row_without_a_norm():
    """0 / 0 times a slope of zero would be NaN."""

    def normalized(x):
        n = jnp.linalg.norm(x, axis=-1, keepdims=True)
        return jnp.where(n > 0, x / jnp.where(n > 0, n, 1), 0)

    def backward(x, ct):
        n = jnp.linalg.norm(x, axis=-1, keepdims=True)
        y = x / n
        along = (ct * y).sum(-1, keepdims=True)
        return jnp.where(n > 0, (ct - y * along) / n, 0)

    f = network(with_rule(normalized, backward))
    x = X.at[11].set(0)
    assert gradient_error(f, x, W1, W2, policy=Policy(4), argnums=(0, 1)) < 0.3


def test_a_factor_near_a_pole_takes_no_more_than_the_values():
    """Exact, as slopes of a quotient are: 34 KiB for both, where a and b take 20.5."""
    quotient = jax.custom_vjp(lambda a, b: a / b)
    quotient.defvjp(
        lambda a, b: (a / b, (a, b)),
        lambda kept, ct: (ct / kept[1], -ct * kept[0] / kept[1] ** 2),
    )
    f = lambda x, w: quotient(x @ w[:, :64], 1e-3 + jax.nn.relu(x @ w[:, 64:]))
    found = rows(f, X, W1)
    assert sum(r.stored_bytes for r in found) < 1.4 * 64 * 64 * 4


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 4) @ v


def test_a_rule_that_spares_memory_keeps_its_residuals():
    """Scores of 64 x 64 are four times the queries."""
    rule = jax.custom_vjp(attention)
    rule.defvjp(
        lambda *args: (attention(*args), args),
        lambda args, ct: jax.vjp(attention, *args)[1](ct),
    )
    f = lambda x, w: rule(*jnp.split(x @ w, 3, axis=1))
    found = rows(f, X[:, :32], W1[:32, :48])
    assert max(math.prod(r.shape) for r in found) < 64 * 64
    assert "biased" in {r.bias.value for r in found}


def test_a_rule_for_parameters_stores_nothing():
    """Weights that a rule rounds are at hand in the backward pass."""
    ste = with_rule(jnp.round, lambda w, ct: jnp.where(jnp.abs(w) < 1, ct, 0))
    f = lambda params, x: jnp.tanh(x @ ste(params))
    plain = lambda params, x: jnp.tanh(x @ params)
    stored = [
        jaxact.residuals(jaxact.compress(g, activations=(1,)), W1, X).stored_bytes
        for g in (f, plain)
    ]
    assert stored[0] == stored[1]


def test_a_rule_for_the_value_is_for_its_slope():
    f = lambda x, w1: fast_sigmoid(checkpoint_name(x @ w1, "current"))
    found = rows(f, X, W1, rules=(Rule(Exact(), name="current"),))
    assert any(r.why == "rule name=current" and r.shape == (64, 128) for r in found)


def test_exact_values_stay_as_they_are():
    """A rule that keeps them exactly gives JAX's gradient."""
    exact = (Rule(Exact(), where=lambda residual: residual.dtype != bool),)
    f = network(SLOPES["surrogate, arctangent"])
    policy = Policy(4, rules=exact)
    assert gradient_error(f, X, W1, W2, policy=policy, argnums=(0, 1, 2)) < 1e-6

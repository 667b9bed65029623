"""The values that a checkpoint or a `custom_vjp` keeps are told, and told right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as save, lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Exact, Policy, Rule
from support.programs import assert_same_bits, gradient_error, relative_error

pytestmark = pytest.mark.unoptimized

T, D = 96, 64
W = jax.random.normal(jax.random.key(1), (D, D)) / 8
X = jax.random.normal(jax.random.key(0), (T, D))


@jax.custom_vjp
def shifted_sine(x, shift):
    return jnp.sin(x) + jnp.float32(shift)


def _forward(x, shift):
    return shifted_sine(x, shift), (jnp.cbrt(x), shift)


def _backward(residuals, ct):
    root, _ = residuals
    return ct * jnp.cos(root**3), None


shifted_sine.defvjp(_forward, _backward)
SHIFT = jnp.arange(1)[0]


def labels(f):
    """The label of each residual of f(x @ w), by its primitive."""
    g = lambda w, x: f(x @ w)
    small = jaxact.compress(g, policy=Policy(bits=2), activations="x")
    return {row.primitive: row.bias.value for row in jaxact.residuals(small, W, X).rows}


def test_a_forward_rule_computes_and_keeps():
    f = lambda y: jnp.square(shifted_sine(y, SHIFT))
    # Two times the returned value, times the cosine.
    assert labels(f) == {"": "unbiased", "mul": "unbiased"}


def test_a_value_that_a_rule_keeps_and_others_use_too():
    f = lambda y: jnp.square(y) + shifted_sine(y, SHIFT)
    # The sum of both slopes.
    assert labels(f) == {"": "unbiased", "add_any": "unbiased"}
    f = lambda y: jnp.square(y) + jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y)))(y)
    assert labels(f) == {"": "unbiased", "dot_general": "biased"}


def test_a_checkpoint_saves_by_its_policy():
    product = lambda y: jnp.sin(jnp.tanh(y) @ W)
    f = jax.checkpoint(product, policy=save.dots_saveable)
    # The sine is computed again from the saved product.
    assert labels(f) == {"": "unbiased", "dot_general": "biased"}


def test_scopes_and_names_make_no_rule():
    def f(y):
        with jax.named_scope("custom_vjp"):
            y = checkpoint_name(y, "given to a custom rule")
            return jnp.square(checkpoint_name(y, "custom_vjp_call"))

    assert labels(f) == {"": "unbiased", "dot_general": "unbiased"}


def noisy(x, key):
    """Given a key, as dropout by a custom rule is."""

    @jax.custom_vjp
    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    drop.defvjp(lambda x, key: (drop(x, key), key), lambda key, ct: (ct * 0.5, None))
    return jnp.tanh(drop(x @ W, key))


EXACT = Policy(rules=(Rule(Exact(), where=lambda residual: True),))
TRANSFORMS = {
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "scan": lambda f: lambda x, s: lax.scan(lambda c, x: (c, f(x, s)), 0.0, x)[1],
    "checkpoint": jax.checkpoint,
}
RULES = {
    "sine": (lambda x, n: jnp.tanh(shifted_sine(x @ W, n)), SHIFT),
    "key": (noisy, jax.random.key(2)),
}


@pytest.mark.parametrize("f, extra", RULES.values(), ids=RULES)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_custom_rules_inside_are_kept(transform, f, extra):
    """tanh's slope is 1 - y**2 either way: at most an ulp or two of another order."""
    small = jaxact.compress(f, policy=EXACT, activations="x")
    outer = lambda f: lambda x, extra: transform(f)(x, extra).sum()
    x = X.reshape(4, -1, D)
    assert_same_bits(
        jax.jit(transform(small))(x, extra), jax.jit(transform(f))(x, extra)
    )
    got, want = (jax.jit(jax.grad(outer(g)))(x, extra) for g in (small, f))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_outputs_and_gradients_may_be_python_numbers():
    """An output that is a constant; a gradient that a rule gives as a number."""

    @jax.custom_vjp
    def f(x, count):
        return x, 7

    f.defvjp(lambda x, count: ((x, 7), None), lambda _, ct: (2.0, None))
    small = jaxact.compress(f, policy=Policy(default=Exact()))
    gradient, total = jax.grad(small, has_aux=True)(1.0, 3)
    assert gradient == 2 and total == 7


@pytest.mark.thorough
def test_a_rule_that_raises_is_asked_for_where_it_is_differentiated_alone():
    """As in JAX: the Gumbel density computes xlogy(-1, scale), which has no rule."""

    @jax.custom_jvp
    def refusing(x):
        return jnp.round(x)

    @refusing.defjvp
    def _refuse(primals, tangents):
        raise NotImplementedError("refusing has no derivative")

    def f(w, x):
        density = jax.scipy.stats.gumbel_r.logpdf(x @ w, 0.0, 2.0)
        return (density * refusing(x) * refusing(2 * x)).sum()

    small = jaxact.compress(f, policy=EXACT, activations="x")
    assert_same_bits(jax.grad(small)(W, X), jax.grad(f)(W, X))
    with pytest.raises(NotImplementedError, match="refusing has no derivative"):
        jax.grad(small, 1)(W, X)


@pytest.mark.parametrize(
    "policy", [EXACT, Policy(8), Policy(8, recompute=save.dots_saveable)]
)
def test_a_function_without_outputs(policy):
    """JAX's checks of every program it makes find none with a variable undefined."""
    small = jaxact.compress(lambda xs, y: None, policy=policy)

    def body(xs, _):
        y = jnp.zeros(1)
        _, pull = jax.vjp(small, xs, y)
        return xs, pull(None)

    with jax.enable_checks(True):
        _, gradients = jax.lax.scan(body, jnp.ones(5), None, 3)
    assert not any(g.any() for g in gradients)


@jax.custom_vjp
def with_weight(w, x):
    return w, jnp.tanh(x @ w)


def _with_weight(w, x):
    return with_weight(w, x), (w, x)


def _with_weight_back(residuals, cts):
    return jax.vjp(lambda w, x: (w, jnp.tanh(x @ w)), *residuals)[1](cts)


with_weight.defvjp(_with_weight, _with_weight_back)


def test_a_weight_that_a_forward_rule_returns_stays_exact():
    """The rule calls its own function, as JAX's documentation has it."""

    def f(w, x):
        w, y = with_weight(w, x)
        return jnp.sin(y @ w)

    rows = jaxact.residuals(jaxact.compress(f, activations="x"), W, X).rows
    assert {row.action for row in rows if row.path == "w"} <= {Exact()}
    assert not all(row.action == Exact() for row in rows)


@jax.custom_vjp
def scaled(x, history):
    """By the largest element of earlier steps, as products in 8-bit floats."""
    return x / (1 + history.max())


def _scaled(x, history):
    latest = jnp.roll(history, 1).at[0].set(jnp.abs(x).max())
    return scaled(x, history), (history.max(), latest)


def _scaled_back(residuals, ct):
    largest, latest = residuals
    return ct / (1 + largest), latest


scaled.defvjp(_scaled, _scaled_back)


@pytest.mark.parametrize("recompute", [None, save.everything_saveable])
def test_a_value_that_a_rule_returns_as_a_gradient_stays_exact(recompute):
    def f(x, history, w):
        return jnp.tanh(scaled(x, history) @ w).sum()

    history = jax.random.uniform(jax.random.key(2), (1024,))
    of = lambda f: jax.grad(f, (0, 1))(X, history, W)
    policy = Policy(bits=2, recompute=recompute)
    rounded, exact = of(jaxact.compress(f, policy=policy)), of(f)
    assert np.any(rounded[0] != exact[0])
    np.testing.assert_array_equal(rounded[1], exact[1])


@jax.custom_jvp
def constant(n):
    return n


constant.defjvp(lambda primals, tangents: (constant(*primals), *tangents))


@jax.custom_vjp
def times(x, n):
    return x * n.astype(x.dtype)


times.defvjp(
    lambda x, n: (times(x, n), n), lambda n, ct: (ct * n.astype(ct.dtype), None)
)


def test_a_number_that_a_rule_keeps():
    """Equinox's rules are such: of a constant the program has its value alone."""
    loss = lambda x: jnp.sin(times(jnp.tanh(x), constant(jnp.int32(2)))).sum()
    exact = jax.grad(loss)(X)
    found = jax.grad(jaxact.compress(loss, policy=Policy(bits=8)))(X)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)


def rounded_to_float8(t):
    return t.astype(jnp.float8_e4m3fn).astype(t.dtype)


MIXING = {
    "centered": lambda t: t - t.mean(-1, keepdims=True),
    "rolled": lambda t: jnp.roll(t, 1, -1),
    "multiplied": lambda t: t @ W,
    "running sums": lambda t: jnp.cumsum(t, -1),
    "rounded": rounded_to_float8,
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_a_rule_that_mixes_tangents(mix):
    """The function is elementwise, its derivative is not: errors of 3 gradients."""

    @jax.custom_jvp
    def f(x):
        return 1 * x

    f.defjvp(lambda primals, tangents: (1 * primals[0], mix(tangents[0])))
    g = lambda x: f(jnp.tanh(x)) ** 2
    exact = gradient_error(g, X, policy=Policy(default=Exact()))
    assert exact < 1e-5
    assert gradient_error(g, X, policy=Policy(8)) < 0.02


def test_a_rule_with_slopes_joins_its_neighbours():
    """One local derivative, as without a rule."""

    @jax.custom_jvp
    def f(x):
        return jnp.abs(x)

    f.defjvp(lambda p, t: (f(p[0]), t[0] * jnp.tanh(p[0] * p[0].mean())))
    g = lambda x: jnp.sin(f(jnp.sin(x)))
    assert len(jaxact.residuals(g, X, policy=Policy(8)).rows) == 1
    assert gradient_error(g, X, policy=Policy(8)) < 0.02


INNER = {
    "square": lambda z: z * z,
    "sigmoid": lambda z: jax.nn.sigmoid(4 * z),
    "softplus": jax.nn.softplus,
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_a_rule_that_divides_by_its_operand(inner):
    """What a logarithm is taken of keeps exact slopes where its rule calls it again."""

    @jax.custom_vjp
    def log(x):
        return jnp.log(x)

    log.defvjp(lambda x: (log(x), x), lambda x, ct: (ct / x,))
    f = lambda w, v, x: log(inner(x @ w) + 1e-6) @ v
    loss = lambda f: lambda ws: ((f(*ws, X) - X) ** 2).mean()
    gradient = lambda f: jax.jit(jax.grad(loss(f)))((jnp.tile(W, 4), jnp.tile(W, 4).T))
    small = jaxact.compress(f, policy=Policy(8))
    assert relative_error(gradient(small)[0], gradient(f)[0]) < 0.02

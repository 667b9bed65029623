"""The values that a checkpoint or a `custom_vjp` keeps are told, and told right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as save, lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Exact, Policy, Rule
from jaxact._form.tags import Tag, inside_custom_rules, tag_p, with_tags
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import fact_of
from support.programs import same_bits

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
    # Squared is the returned value, which is affine in the sine.
    assert labels(f) == {"": "unbiased", "cbrt": "biased", "add": "unbiased"}


def test_a_value_that_a_rule_keeps_and_others_use_too():
    f = lambda y: jnp.square(y) + shifted_sine(y, SHIFT)
    assert labels(f) == {"": "unbiased", "cbrt": "biased", "dot_general": "unbiased"}
    f = lambda y: jnp.square(y) + jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y)))(y)
    assert labels(f) == {"": "unbiased", "dot_general": "biased"}


def test_a_checkpoint_saves_by_its_policy():
    product = lambda y: jnp.sin(jnp.tanh(y) @ W)
    f = jax.checkpoint(product, policy=save.dots_saveable)
    # The sine is computed again from the saved product.
    assert labels(f) == {"": "unbiased", "dot_general": "biased"}


def test_scopes_and_names_make_no_rule():
    def f(y):
        with jax.named_scope("block"), jax.named_scope("custom_vjp"):
            y = checkpoint_name(jnp.square(y) @ W, Tag.GIVEN.value)
            return jnp.square(checkpoint_name(y, "custom_vjp_call"))

    computed = dict.fromkeys(["square", "dot_general"], "unbiased")
    assert labels(f) == {"": "unbiased"} | computed


def test_between_the_tags():
    def f(x, n):
        y = shifted_sine(jnp.exp(x), n)
        return jnp.tanh(y) * jnp.exp(x)

    jaxpr, _ = open_jaxpr(jax.make_jaxpr(f)(X, SHIFT))
    jaxpr = with_tags(jaxpr)
    facts = inside_custom_rules(jaxpr)
    (call,) = [e for e in jaxpr.eqns if "custom_vjp" in e.primitive.name]
    inside = {v for v in facts if fact_of(facts, v)}
    assert inside == {*call.invars, *call.outvars}
    tags = [e.params["tag"] for e in jaxpr.eqns if e.primitive is tag_p]
    assert tags == [Tag.GIVEN, Tag.GIVEN, Tag.RETURNED]


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
def test_tags_change_nothing(transform, f, extra):
    """tanh's slope is 1 - y**2 either way: at most an ulp or two of another order."""
    small = jaxact.compress(f, policy=EXACT, activations="x")
    outer = lambda f: lambda x, extra: transform(f)(x, extra).sum()
    x = X.reshape(4, -1, D)
    got, want = (jax.jit(transform(g))(x, extra) for g in (small, f))
    assert same_bits(got, want)
    got, want = (jax.jit(jax.grad(outer(g)))(x, extra) for g in (small, f))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

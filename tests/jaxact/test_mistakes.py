"""What users write by mistake: one sentence says what is required, what to write."""

import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies

import jaxact
from jaxact import Cast, Exact, Offload, PerSample, Policy, Quantize, Rule

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(w):
    return jaxact.compress(layer, activations="x")(w, X).sum()


class Plain:
    def __call__(self, x):
        return x


# By the text of the mistake: the call, and a part of the message.
MISTAKES = {
    "compress(f, Policy())": (
        lambda: jaxact.compress(layer, Policy()),
        "compress(target, policy=Policy(bits=2))",
    ),
    "compress(f, bits=2)": (
        lambda: jaxact.compress(layer, bits=2),
        "compress(target, policy=Policy(bits=2))",
    ),
    "compress(f, policy=2)": (
        lambda: jaxact.compress(layer, policy=2),
        "Policy(bits=2)",
    ),
    "policy=Quantize": (
        lambda: jaxact.compress(layer, policy=Quantize(2)),
        "a jaxact.Policy is required",
    ),
    "policy=dots_saveable": (
        lambda: jaxact.compress(layer, policy=checkpoint_policies.dots_saveable),
        "Policy(recompute=...)",
    ),
    "compress(class)": (lambda: jaxact.compress(Plain), "decorate its `__call__`"),
    "compress(None)": (lambda: jaxact.compress(None), "or a function is required"),
    "compress([f])": (lambda: jaxact.compress([layer]), "or a function is required"),
    "activations=1.5": (
        lambda: jaxact.compress(layer, activations=1.5)(W, X),
        "activations='x'",
    ),
    "activations='y'": (
        lambda: jaxact.compress(layer, activations="y")(W, X),
        "whose arguments are ['w', 'x']",
    ),
    "static_argnums='act'": (
        lambda: jaxact.compress(layer, static_argnums="act")(W, X),
        "whose arguments are ['w', 'x']",
    ),
    "rounding_key=0": (
        lambda: jaxact.compress(layer)(W, X, rounding_key=0),
        "jax.random.key(0)",
    ),
    "rounding_key=keys": (
        lambda: jaxact.compress(layer)(
            W, X, rounding_key=jax.random.split(jax.random.key(0), 3)
        ),
        "one JAX PRNG key is required",
    ),
    "rounding_key=floats": (
        lambda: jaxact.compress(layer)(W, X, rounding_key=jnp.ones(2)),
        "one JAX PRNG key is required",
    ),
    "sensitivity(draws=0)": (
        lambda: jaxact.sensitivity(loss, W, draws=0),
        "a positive integer is required",
    ),
    "jvp": (
        lambda: jax.jvp(jaxact.compress(layer), (W, X), (W, X)),
        "use jax.vjp, jax.grad or jax.jacrev",
    ),
    "Policy(rules=Rule)": (
        lambda: Policy(rules=Rule(Exact())),
        "rules=(Rule(...),)",
    ),
    "Policy(bits=2.0)": (lambda: Policy(bits=2.0), "an integer from 1 to 8"),
    "Policy(default=4)": (lambda: Policy(default=4), "takes an action, not 4"),
    "Policy(recompute=Exact())": (
        lambda: Policy(recompute=Exact()),
        "jax.checkpoint_policies.dots_saveable",
    ),
    "Rule(4)": (lambda: Rule(4), "takes an action, not 4"),
    "Rule(Quantize)": (lambda: Rule(Quantize), "takes an action"),
    "Rule(name=3)": (lambda: Rule(Exact(), name=3), "name='mlp_*'"),
    "Rule(dtype='float33')": (lambda: Rule(Exact(), dtype="float33"), "jnp.bfloat16"),
    "min_bytes='1MB'": (lambda: Rule(Exact(), min_bytes="1MB"), "min_bytes=2**20"),
    "Cast('bf16')": (lambda: Cast("bf16"), "'bfloat16'"),
    "Quantize(stochastic='no')": (
        lambda: Quantize(2, stochastic="no"),
        "True (unbiased) or False (to nearest)",
    ),
    "PerSample(0.5)": (lambda: PerSample(0.5), "from 1 to 8"),
    "Offload(4)": (lambda: Offload(4), "Exact() or Quantize(4)"),
    "residuals(grad)": (
        lambda: jaxact.residuals(jax.grad(loss), W),
        "take the loss itself, not its gradient",
    ),
    "residuals(class)": (
        lambda: jaxact.residuals(Plain, X),
        "a function of arrays is required",
    ),
    "residuals(3)": (lambda: jaxact.residuals(3, X), "a function is required"),
    "sensitivity(no scalar)": (
        lambda: jaxact.sensitivity(lambda w: (loss(w), 1), W),
        "say has_aux=True",
    ),
    "telemetry(f)(w, x)": (
        lambda: jaxact.telemetry(loss)(W, X),
        "measured.probe(*args)",
    ),
    "allocate(residuals)": (
        lambda: jaxact.allocate(jaxact.residuals(loss, W), bits=2),
        "jaxact.sensitivity",
    ),
    "policy=allocation": (
        lambda: jaxact.compress(
            layer, policy=jaxact.allocate(jaxact.sensitivity(loss, W), bits=2)
        ),
        "policy=allocation.policy()",
    ),
    "memory(array)": (
        lambda: jaxact.memory(loss(W)),
        "such as jax.grad(loss)",
    ),
    "compare(step)": (
        lambda: jaxact.compare(jax.grad(loss), W),
        "{'uncompressed': step, 'jaxact': small_step}",
    ),
    "live(array)": (lambda: jaxact.live(loss(W)), "such as jax.grad(loss)"),
    "target='h1000'": (
        lambda: jaxact.memory(jax.grad(loss), W, target="h1000"),
        "a100, a10g, b200, h100",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_to_write(mistake):
    run, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        run()


def test_linen_modules_in_place_of_functions():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.gelu(nn.Dense(64)(x))

    with pytest.raises(TypeError, match="give its `apply`"):
        jaxact.residuals(Block(), X)
    with pytest.raises(TypeError, match="a function of arrays is required"):
        jaxact.residuals(Block, X)
    with pytest.raises(TypeError, match=r"compress\(Block\)\(...\)"):
        jaxact.compress(Block())


def test_the_second_result_is_left_out_of_a_table():
    with_aux = lambda w: (loss(w), jnp.sin(w))
    table = jaxact.residuals(with_aux, W, has_aux=True)
    assert table.to_dict() == jaxact.residuals(loss, W).to_dict()


def test_symbolic_sizes():
    """It was an InconclusiveDimensionOperation, about a comparison in jaxact."""
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)

    def exported(policy):
        small = jaxact.compress(layer, activations="x", policy=policy)
        step = jax.jit(jax.grad(lambda w, x: small(w, x).sum()))
        return jax.export.export(step)(W, x)

    with pytest.raises(ValueError, match="have to be numbers: export the step"):
        exported(Policy())
    wanted = jax.grad(lambda w: layer(w, X).sum())(W)
    exact = exported(Policy(default=Exact())).call(W, X)
    # Sums of 32 products in float32, in another order.
    assert jnp.abs(exact - wanted).max() <= 32 * 2**-23 * jnp.abs(wanted).max()

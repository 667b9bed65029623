"""What users write by mistake: one sentence says what is required, what to write."""

import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies

import jaxact
from jaxact import Cast, Exact, Offload, PerSample, Policy, Quantize, Rule, policies

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
    "Cast('f16')": (lambda: Cast("f16"), "'bfloat16'"),  # float128 to NumPy
    "Quantize(stochastic='no')": (
        lambda: Quantize(2, stochastic="no"),
        "True (unbiased) or False (to nearest)",
    ),
    "PerSample(0.5)": (lambda: PerSample(0.5), "from 1 to 8"),
    "Offload(4)": (lambda: Offload(4), "Exact() or Quantize(4)"),
    "residuals(grad)": (
        lambda: jaxact.residuals(jax.grad(loss), W),
        "take the loss, not its gradient",
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
    "sensitivity(shape)": (
        lambda: jaxact.sensitivity(loss, jax.ShapeDtypeStruct(W.shape, W.dtype)),
        "arrays are required, as the loss is evaluated",
    ),
    "telemetry(f)(w, x)": (
        lambda: jaxact.telemetry(loss)(W, X),
        "jax.grad(measured, argnums=(0, 1))(probe, params, batch)",
    ),
    "allocate(residuals)": (
        lambda: jaxact.allocate(jaxact.residuals(loss, W), bits=2),
        "jaxact.sensitivity",
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


STEP = jax.grad(loss)
COSTS = jaxact.Sensitivity((jaxact.Cost("a", 64, 4, 1.0, 1.0, 2),), signal=1.0)
ALLOCATED = jaxact.allocate(COSTS, bits=2)
BATCHES = [X, 2 * X]


def gradient(batch, key):
    return jax.grad(lambda w: jaxact.compress(layer)(w, batch, rounding_key=key).sum())(
        W
    )


def in_plan(**options):
    return jaxact.plan(STEP, W, **{"budget": "1GB", **options})


def in_max_batch(**options):
    step_of_batch = lambda n: (STEP, (W,))
    return jaxact.max_batch(step_of_batch, **{"budget": "1GB", **options})


# By the text of the call: the call with one value, wrong ones, a part of the message.
NO_NUMBERS = "2", None, True, float("nan"), [2], W
NO_COUNTS = 0, -1, 1.5, "2", None, True, [2]
WRONG = {
    "sensitivity(draws)": (
        lambda v: jaxact.sensitivity(loss, W, draws=v),
        NO_COUNTS,
        "a positive integer is required, such as 2",
    ),
    "sensitivity(key)": (
        lambda v: jaxact.sensitivity(loss, W, key=v),
        (0, "a", jnp.ones(2)),
        "JAX PRNG key is required, such as jax.random.key(0)",
    ),
    "sensitivity(argnums)": (
        lambda v: jaxact.sensitivity(loss, W, argnums=v),
        (1.5, "w", 5, [0.5]),
        "positions of arguments are required",
    ),
    "residuals(argnums)": (
        lambda v: jaxact.residuals(loss, W, argnums=v),
        (1.5, "w", 5),
        "positions of arguments are required",
    ),
    "residuals(has_aux)": (
        lambda v: jaxact.residuals(loss, W, has_aux=v),
        (True,),
        "(result, anything) is required",
    ),
    "sensitivity(has_aux)": (
        lambda v: jaxact.sensitivity(loss, W, has_aux=v),
        (True,),
        "(result, anything) is required",
    ),
    "text(width)": (
        lambda v: jaxact.residuals(loss, W).text(width=v),
        (0, -3, "80", 1.5),
        "such as 80, or None",
    ),
    "noise_share(draws)": (
        lambda v: jaxact.noise_share(gradient, BATCHES, draws=v),
        (1, *NO_COUNTS),
        "two or more is required, such as 2",
    ),
    "noise_share(limit)": (
        lambda v: jaxact.noise_share(gradient, BATCHES, limit=v),
        (-1, *NO_NUMBERS),
        "such as 0.1",
    ),
    "noise_share(key)": (
        lambda v: jaxact.noise_share(gradient, BATCHES, key=v),
        (0, "a"),
        "such as jax.random.key(0)",
    ),
    "noise_share(gradient)": (
        lambda v: jaxact.noise_share(v, BATCHES),
        (3, None),
        "noise_share(gradient, [first, second])",
    ),
    "noise_share(batches)": (
        lambda v: jaxact.noise_share(gradient, v),
        (3, None),
        "noise_share(gradient, [first, second])",
    ),
    "telemetry": (jaxact.telemetry, (3, None), "such as the loss: telemetry(loss)"),
    "actnn": (policies.actnn, (9, 1.0, *NO_NUMBERS), "3: 2 bits on average"),
    "gact": (policies.gact, (0, 9, *NO_NUMBERS), "such as 2.5"),
    "division": (policies.division, (0, 9, *NO_NUMBERS), "integer from 1 to 8"),
    "acgc": (policies.acgc, (0, -1, *NO_NUMBERS), "such as 0.1"),
    "stochastic_bits": (
        lambda v: policies.stochastic_bits(v, [], 1.0),
        (0, *NO_NUMBERS),
        "such as 0.1",
    ),
    "by_name": (policies.by_name, (3, [("a", "remat")]), "{'mlpwi': 'compress:2'}"),
    "by_name(word)": (
        lambda v: policies.by_name({"a": v}),
        (3, None, Quantize, "half"),
        "an action such as jaxact.Quantize(2), is required",
    ),
    "allocate(bits)": (
        lambda v: jaxact.allocate(COSTS, bits=v),
        (0, 33, "2", True, float("nan"), [2], W),
        "such as 2",
    ),
    "allocate(e2)": (
        lambda v: jaxact.allocate(COSTS, e2=v),
        (0, "2", True, float("nan"), [2], W),
        "such as 0.1",
    ),
    "allocate(ladder)": (
        lambda v: jaxact.allocate(COSTS, bits=2, ladder=v),
        (3, None, [], ["a"], [9], [True]),
        "such as ladder=(1, 2, 4, 8)",
    ),
    "reallocate(gain)": (
        lambda v: jaxact.reallocate(ALLOCATED, COSTS, bits=2, gain=v),
        (-1, 1, *NO_NUMBERS),
        "such as 0.25",
    ),
    "reallocate(current)": (
        lambda v: jaxact.reallocate(v, COSTS, bits=2),
        (3, COSTS),
        "reallocate(allocation, jaxact.sensitivity(loss, ...), bits=2)",
    ),
    "reallocate(measured)": (
        lambda v: jaxact.reallocate(ALLOCATED, v, bits=2),
        (3, ALLOCATED),
        "reallocate(allocation, jaxact.sensitivity(loss, ...), bits=2)",
    ),
    "merge": (lambda v: COSTS.merge(v, 0.5), (3, ALLOCATED), "a later Sensitivity"),
    "merge(momentum)": (
        lambda v: COSTS.merge(COSTS, v),
        (-1, 2, *NO_NUMBERS),
        "from 0 (later only) to 1",
    ),
    "allocation.policy": (ALLOCATED.policy, (3, ALLOCATED), "such as Policy(bits=2)"),
    "plan(slowdown)": (lambda v: in_plan(slowdown=v), (-1, *NO_NUMBERS), "such as"),
    "plan(noise)": (lambda v: in_plan(noise=v), (-1, *NO_NUMBERS), "such as noise=0.1"),
    "plan(budget)": (lambda v: in_plan(budget=v), (0, -1, 1.5, "x", None), "'12GB'"),
    "plan(actions)": (
        lambda v: in_plan(actions=v),
        (3, Quantize(2), [], [3]),
        "[jaxact.Quantize(4), jaxact.Quantize(2)]",
    ),
    "plan(measured)": (
        lambda v: in_plan(measured=v),
        (3, ALLOCATED),
        "the Sensitivity that jaxact.sensitivity measures is required",
    ),
    "plan(earlier)": (lambda v: in_plan(earlier=v), (3, Policy()), "the Plan of an"),
    "max_batch(multiple_of)": (
        lambda v: in_max_batch(multiple_of=v),
        NO_COUNTS,
        "such as multiple_of=2",
    ),
    "max_batch(degree)": (
        lambda v: in_max_batch(degree=v),
        NO_COUNTS,
        "such as degree=2",
    ),
    "max_batch(known)": (
        lambda v: in_max_batch(known=v),
        (3, {"the step": 3}, {"the step": {"8": 1}}),
        "{'2 bits': {8: 2**30}}",
    ),
    "memory(target)": (
        lambda v: jaxact.memory(STEP, W, target=v),
        (3, "", True, ["h100"]),
        "such as target='h100'",
    ),
    "compare(names)": (
        lambda v: jaxact.compare({v: STEP}, W),
        (3, None),
        "{'uncompressed': step, 'jaxact': small_step}",
    ),
    "Policy(recompute)": (
        lambda v: Policy(recompute=v),
        (3, jaxact.Checkpoint, checkpoint_policies.save_only_these_names),
        "or save_only_these_names('hidden'), or one or more jaxact.Checkpoint",
    ),
    "compress(policy)": (
        lambda v: jaxact.compress(layer, policy=v),
        (ALLOCATED, ALLOCATED.policy),
        "policy=allocation.policy()",
    ),
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_value_is_answered_with_one_that_is_right(option):
    """They were errors about `<` between types, attributes and iteration."""
    run, values, message = WRONG[option]
    for value in values:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            run(value)


def test_linen_modules_in_place_of_functions():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.gelu(nn.Dense(64)(x))

    for report in jaxact.residuals, jaxact.memory, jaxact.count_flops:
        with pytest.raises(TypeError, match="give its `apply`"):
            report(Block(), X)
        with pytest.raises(TypeError, match="a function of arrays is required"):
            report(Block, X)
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

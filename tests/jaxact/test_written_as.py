"""Arguments that do not fit are answered with which do, and a call that fits."""

import copy
import dataclasses
import inspect
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Cast, Checkpoint, Exact, Policy, Quantize, Rule

X = jnp.ones((4, 4))
COSTS = jaxact.Sensitivity((jaxact.Cost("a", 64, 4, 1.0, 1.0, 2),), signal=1.0)


def loss(w, x):
    return (w @ x).sum()


step = jax.grad(loss)
small = jaxact.compress(loss)

# By the text of the mistake: the call, and parts of the message.
MISTAKES = {
    "Rule('mlp', Exact())": (
        lambda: Rule("mlp", Exact()),
        "Rule(action, *, key, name, path, ",
        "Write Rule(Exact(), path='mlp').",
    ),
    "Rule(path='mlp')": (
        lambda: Rule(path="mlp"),
        "Rule(path='mlp'): missing a required argument: 'action'",
        "Write Rule(Exact(), path='mlp').",
    ),
    "Rule(Exact(), module='mlp')": (
        lambda: Rule(Exact(), module="mlp"),
        "unexpected keyword argument 'module'",
        "Write Rule(Exact(), path='mlp').",
    ),
    "Policy(4, [...])": (
        lambda: Policy(4, [Rule(Exact())]),
        "Policy(bits, *, rules, recompute, default) is required",
        "rules=(Rule(Exact(), path='mlp'),))",
    ),
    "replace(Policy(), bit=2)": (
        lambda: dataclasses.replace(Policy(), bit=2),
        "unexpected keyword argument 'bit'",
        "Write Policy(bits=4",
    ),
    "Quantize(bit=2)": (lambda: Quantize(bit=2), "Quantize(bits, group_size, "),
    "Policy(default=Quantize)": (
        lambda: Policy(default=Quantize),
        "Write Quantize(...), which makes one.",
    ),
    "Rule(4)": (lambda: Rule(4), "For bits write Quantize(4)."),
    "Policy(rules={...})": (
        lambda: Policy(rules={"mlp": Exact()}),
        "a tuple of rules is required",
    ),
    "activations={...}": (
        lambda: jaxact.compress(loss, activations={"x": True}),
        "such as activations='x'.",
    ),
    "activations=(1.0 for ...)": (
        lambda: jaxact.compress(loss, activations=(1.0 for _ in range(2))),
        "such as activations='x'.",
    ),
    "count_flops(step)": (
        lambda: jaxact.count_flops(step),
        "takes are required after it. Write count_flops(step, params, batch).",
    ),
    "Cast()": (lambda: Cast(), "Write Cast(jnp.bfloat16)."),
    "compress(bits=2)": (
        lambda: jaxact.compress(bits=2),
        "compress(target, *, policy, activations, static_argnums) is required",
        "Write compress(target, policy=Policy(bits=2)).",
    ),
    "allocate(measured, 2)": (
        lambda: jaxact.allocate(COSTS, 2),
        "allocate(<Sensitivity>, 2): too many positional arguments",
        "Write allocate(measured, bits=2).",
    ),
    "actnn(3, measured)": (
        lambda: jaxact.policies.actnn(3, COSTS),
        "Write policies.actnn(3, measured=measured).",
    ),
    "using(policy, step)": (
        lambda: jaxact.using(Policy(), step),
        "using(policy)(step)",
    ),
    "using(step)": (lambda: jaxact.using(step), "using(policy)(step)"),
    "using(policy)(step(w, x))": (
        lambda: jaxact.using(Policy())(step(X, X)),
        "write using(policy)(step)(params)",
    ),
    "plan without a budget": (
        lambda: jaxact.plan(step, X, X),
        "argument: 'budget'",
        "Write plan(step, params, batch, budget='12GB').",
    ),
    "plan(policies=...)": (
        lambda: jaxact.plan(step, X, X, budget="1GB", policies=Policy()),
        "unexpected keyword argument 'policies'",
        "options of plan: budget, target, of, policy, ",
    ),
    "memory(step)": (
        lambda: jaxact.memory(step),
        "the arguments that loss takes are required after it",
        "Write memory(step, params, batch).",
    ),
    "compare({'a': step})": (
        lambda: jaxact.compare({"a": step}, X),
        "missing a required argument: 'x'",
        "the arguments that loss takes are required after it",
    ),
    "residuals(loss)": (
        lambda: jaxact.residuals(small),
        "Write residuals(loss, params, batch).",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_a_call_that_fits(mistake):
    """They were Python's own words, or JAX's about the arguments of `grad`."""
    run, *parts = MISTAKES[mistake]
    with pytest.raises(TypeError) as raised:
        run()
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize(
    "activations",
    [iter(["x"]), np.int64(1), np.array([1]), {"x"}],
    ids=["iterator", "integer", "array", "set"],
)
def test_activations_from_an_iterator_or_numpy(activations):
    """The iterator was used up by its check, and named nothing."""
    sines = jaxact.compress(lambda w, x: jnp.sin(w @ x), activations=activations)
    table = jaxact.residuals(sines, jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert {row.key for row in table.rows} == {"x", "sin.derivative"}


def test_errors_inside_are_as_they_were():
    def fails(x):
        raise TypeError("my own")

    with pytest.raises(TypeError, match="^my own"):
        jaxact.memory(fails, X)
    with pytest.raises(TypeError, match=re.escape("Rule(name=3)")):
        Rule(Exact(), name=3)
    with pytest.raises(TypeError, match="an instance of the Linen module Dense"):
        jaxact.residuals(nn.Dense(4), {}, X)  # its call takes one argument


@pytest.mark.parametrize("options", [{"policy": Policy()}, {"bits": 2}, {}])
def test_options_at_the_call_are_pointed_to_compress(options):
    """The message is Python's, about the user's own function."""
    args = (X, X) if options else (X, X, jax.random.key(0))
    with pytest.raises(TypeError, match="loss") as raised:
        small(*args, **options)
    notes = "".join(raised.value.__notes__)
    assert "a rounding_key, by keyword" in notes and "compress(f, policy=" in notes
    with pytest.raises(TypeError) as raised:
        small(X, "x")
    assert "rounding_key" not in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    "value",
    [Policy(2, rules=(Rule(Exact(), path="mlp"),)), Checkpoint("mlp"), Cast("float16")],
    ids=lambda value: type(value).__name__,
)
def test_values_are_dataclasses_as_before(value):
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)
    names = [field.name for field in dataclasses.fields(value)]
    assert list(inspect.signature(type(value)).parameters) == names
    first = {names[0]: getattr(value, names[0])}
    assert dataclasses.replace(value, **first) == value


def test_functions_keep_their_signatures():
    parameters = inspect.signature(jaxact.allocate).parameters
    assert list(parameters) == ["measured", "bits", "e2", "ladder"]
    assert pickle.loads(pickle.dumps(jaxact.allocate)) is jaxact.allocate

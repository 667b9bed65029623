"""Wrong values in the place where others belong: short, with the line to write."""

import functools
import re

import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy, Quantize

X = jnp.ones((32, 64))
W = jnp.ones((64, 64))
ARRAYS = {"w": jnp.ones((256, 256)), "b": list(range(1000))}


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(w):
    return jaxact.compress(layer, activations="x")(w, X).sum()


def message_of(run):
    with pytest.raises((TypeError, ValueError)) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("given, write", [
    (Policy(2), "@compress(policy=Policy(bits=2))"),
    (Quantize(2), "@compress(policy=Policy(bits=2))"),
    (4, "@compress(policy=Policy(bits=2))"),
    ("x", "@compress(activations='x')"),
])  # fmt: skip
def test_an_option_in_the_place_of_the_target(given, write):
    assert f"Options are given by keyword: {write}" in message_of(
        lambda: jaxact.compress(given)(layer)
    )


@pytest.mark.parametrize("option", ["activations", "static_argnums"])
@pytest.mark.parametrize("given", [True, [False]])
def test_a_bool_is_no_position(option, given):
    text = message_of(lambda: jaxact.compress(layer, **{option: given}))
    assert f"such as {option}='x'" in text


WHOLE = {
    "policy": lambda: jaxact.compress(layer, policy=ARRAYS),
    "activations": lambda: jaxact.compress(layer, activations=jnp.ones(9999)),
    "another": lambda: jaxact.compress(layer, Policy(rules=())),
    "unknown": lambda: jaxact.compress(layer, bits=ARRAYS),
    "compare": lambda: jaxact.compare({"a": ARRAYS, "b": loss}, W),
    "compare an array": lambda: jaxact.compare(jnp.ones((99, 99)), W),
}


@pytest.mark.parametrize("case", WHOLE)
def test_values_are_not_printed_whole(case):
    text = message_of(WHOLE[case])
    assert text.count("\n") == 0 and len(text) < 250


def test_a_partial_of_a_module_is_named_by_its_class():
    nnx = pytest.importorskip("flax.nnx")
    made = functools.partial(nnx.Linear, 4, 4, rngs=nnx.Rngs(0))
    text = message_of(lambda: jaxact.compress(made))
    assert text.startswith("compress(functools.partial(Linear, ...)): it makes modules")
    assert len(text) < 250


def test_steps_that_are_no_functions_are_named_by_type():
    text = message_of(lambda: jaxact.compare({"a": W, "b": loss}, W))
    assert re.search("'a': Array.*'b': function", text.replace("ArrayImpl", "Array"))


@pytest.mark.parametrize("report", ["residuals", "sensitivity"])
def test_a_wrong_policy_is_named_by_the_call_that_was_given_it(report):
    text = message_of(lambda: getattr(jaxact, report)(layer, W, X, policy=2))
    assert text.startswith(f"jaxact.{report}(policy=2)")

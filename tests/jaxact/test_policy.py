"""Rules: first match wins, each condition narrows, bad requests say what to do."""

import dataclasses
import ntpath
import os
import re
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import (
    Adaptive,
    Bitmask,
    Cast,
    CompressionWarning,
    Dithered,
    DualPrecision,
    Exact,
    Offload,
    PerSample,
    Policy,
    Quantize,
    Recompute,
    Rotated,
    Rule,
)
from jaxact._codec.parts import Parts
from jaxact._residual import Residual

HIDDEN = Residual(
    (64, 256),
    np.dtype("float32"),
    primitive="dot_general",
    name="mlp_hidden",
    path="Net/block0/mlp/up",
)
SPECTRUM = Residual((64, 256), np.dtype("complex64"))
REPLAYED_SPECTRUM = dataclasses.replace(SPECTRUM, is_recomputed_from=True)


def decide(policy, residual=HIDDEN, small_size=512):
    return policy.decide(residual, small_size=small_size)


@pytest.mark.parametrize(
    "conditions, matches",
    [
        ({}, True),
        ({"name": "mlp_*"}, True),
        ({"name": "attention_*"}, False),
        ({"path": "mlp/up"}, True),
        ({"path": "block0/*"}, True),
        ({"path": "Net/block0/mlp/up"}, True),
        ({"path": "block1/*"}, False),
        ({"path": "lp/up"}, False),
        ({"primitive": "dot_general"}, True),
        ({"primitive": "tanh"}, False),
        ({"dtype": jnp.float32}, True),
        ({"dtype": "bfloat16"}, False),
        ({"min_bytes": 64 * 256 * 4}, True),
        ({"min_bytes": 64 * 256 * 4 + 1}, False),
        ({"where": lambda r: r.shape[-1] == 256}, True),
        ({"where": lambda r: r.shape[-1] == 64}, False),
        ({"name": "mlp_*", "primitive": "tanh"}, False),
    ],
)
def test_conditions(conditions, matches):
    decision = decide(Policy(bits=2, rules=(Rule(Exact(), **conditions),)))
    assert decision.action == (Exact() if matches else Quantize(2))
    assert decision.rule == (0 if matches else None)


def test_first_match_wins():
    rules = (Rule(Quantize(8), name="mlp_*"), Rule(Exact()))
    assert decide(Policy(rules=rules)).action == Quantize(8)


@pytest.mark.parametrize(
    "residual, action, why",
    [
        (HIDDEN, Quantize(4), "policy bits"),
        (Residual((64, 256), np.dtype(bool)), Bitmask(), "one bit is exact"),
        (Residual((64, 256), np.dtype("int32")), Exact(), "int32 stays exact"),
        (SPECTRUM, Parts(Quantize(4)), "policy bits"),
        (REPLAYED_SPECTRUM, Exact(), "complex64 stays exact"),
        (Residual((512,), np.dtype("float32")), Exact(), "small"),
        (Residual((513,), np.dtype("float32")), Quantize(4), "policy bits"),
    ],
)
def test_defaults(residual, action, why):
    decision = decide(Policy(), residual)
    assert (decision.action, decision.why) == (action, why)


def test_an_action_that_cannot_store_says_so():
    decision = decide(Policy(default=Quantize(2)), Residual((9,), np.dtype("int32")))
    assert decision.action == Exact()
    assert "not int32" in decision.why
    decision = decide(Policy(rules=(Rule(Cast(jnp.float32)),)))
    assert "no wider" in decision.why
    decision = decide(Policy(), Residual((1024, 4), np.dtype(bool)))
    assert decision.action == Exact()  # 4 bytes a row, as packed
    assert "would be no smaller" in decision.why
    offload = Policy(default=Offload())
    decision = decide(offload, Residual((1024, 4), np.dtype(bool)))
    assert decision.action == Offload()
    points = Residual((65536, 3), np.dtype("float32"))
    for action in (Quantize(4), PerSample(4), DualPrecision(4)):
        assert "would be no smaller" in decide(Policy(default=action), points).why


def test_policies_are_values():
    rule = Rule(Quantize(2), name="a")
    assert Policy(2, rules=(rule,)) == Policy(2, rules=[rule])
    assert hash(Policy(2, rules=(rule,))) == hash(Policy(2, rules=[rule]))
    assert "Quantize(bits=2" in repr(Policy(rules=(rule,)))
    with pytest.raises(AttributeError):
        Policy().bits = 2


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Quantize(9), ValueError, "1 to 8"),
        (lambda: Quantize(0), ValueError, "1 to 8"),
        (lambda: Quantize(True), ValueError, "1 to 8"),
        (lambda: Quantize(4, group_size=100), ValueError, "multiple of 32"),
        (lambda: Quantize(2.0), ValueError, r"Quantize\(bits=2.0\).*PerSample"),
        (lambda: Quantize(4, stochastic="no"), TypeError, "True .unbiased. or False"),
        (lambda: Policy(bits=16), ValueError, "Cast"),
        (lambda: Policy(bits=2.0), ValueError, r"Policy\(bits=2.0\).*PerSample"),
        (lambda: Policy(Quantize(2)), ValueError, r"as Policy\(default=...\)"),
        (lambda: Policy(bits=True), ValueError, "integer from 1 to 8"),
        (lambda: Policy(bits=np.bool_(True)), ValueError, "integer from 1 to 8"),
        (lambda: Policy(bits="2"), ValueError, "integer from 1 to 8"),
        (lambda: Policy(bits=jnp.float32(2)), ValueError, "integer from 1 to 8"),
        (lambda: Policy(rules=Rule(Exact())), TypeError, r"rules=\(Rule\(...\),\)"),
        (lambda: Policy(rules=None), TypeError, r"rules=\(Rule\(...\),\)"),
        (lambda: Policy(rules=(Quantize(2),)), TypeError, "Rule"),
        (lambda: Policy(default=4), TypeError, "Quantize"),
        (lambda: Policy(recompute="dots"), TypeError, "checkpoint_policies"),
        (lambda: Rule(4), TypeError, "Exact()"),
        (lambda: Rule(Exact(), where=3), TypeError, "Residual"),
        (lambda: Rule(Exact(), min_bytes="1MB"), ValueError, r"min_bytes=2\*\*20"),
        (lambda: Rule(Exact(), min_bytes=1e6), ValueError, "an integer"),
        (lambda: Rule(Exact(), min_bytes=-1), ValueError, "at least 0"),
        (lambda: Rule(Exact(), path=3), TypeError, "path=3.*a str is required"),
        (lambda: Rule(Exact(), name=3), TypeError, "name=3.*'mlp_"),
        (lambda: Rule(Exact(), key=3), TypeError, "key=3.*a str is required"),
        (lambda: Rule(Exact(), primitive=jnp.sin), TypeError, "'dot_general'"),
        (lambda: Rule(Exact(), dtype="bf16"), TypeError, "dtype='bf16'.*jnp.bfloat16"),
        (lambda: Rule(Exact(), dtype=3), TypeError, "dtype=3.*jnp.bfloat16"),
        (lambda: Cast(jnp.int8), ValueError, "float"),
        (lambda: Cast("bf16"), TypeError, r"Cast\('bf16'\).*jnp.bfloat16"),
        (lambda: Cast(None), TypeError, "a dtype is required"),
        (lambda: Offload(Recompute()), TypeError, "stores something"),
        (lambda: jaxact.compress(3), TypeError, "required"),
        (lambda: jaxact.compress(jnp.sin, policy=4), TypeError, "Policy"),
    ],
)
def test_bad_requests(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_integers_of_any_type_become_ints():
    policies = Policy(bits=np.int64(2)), Policy(bits=jnp.int32(2))
    for policy in policies:
        assert policy == Policy(bits=2) and type(policy.bits) is int
    assert repr(Rule(Exact(), min_bytes=np.uint8(8))) == "Rule(Exact(), min_bytes=8)"
    assert repr(Quantize(np.int8(3), np.int64(64))) == repr(Quantize(3, 64))


def mlp(p, x):
    hidden = jax.ad_checkpoint.checkpoint_name(x @ p, "hidden")
    return jnp.tanh(hidden) * hidden


P, X = jnp.ones((64, 64)) / 8, jax.random.normal(jax.random.key(0), (32, 64))


def gradient(f, *args):
    return jax.grad(lambda *args: f(*args).sum())(*args)


def test_a_rule_that_matches_nothing_is_reported():
    policy = Policy(rules=(Rule(Exact(), name="nothing"), Rule(Exact(), name="hidden")))
    small = jaxact.compress(mlp, policy=policy, activations="x")
    with pytest.warns(jaxact.CompressionWarning, match="name='nothing'.*matched no"):
        gradient(small, P, X)
    table = jaxact.residuals(small, P, X)  # no second warning
    assert Rule(Exact(), name="nothing") in table.unused_rules
    assert "decides nothing: Rule(Exact(), name='nothing')" in str(table)


def test_offered_actions_are_public():
    with pytest.raises(TypeError) as caught:
        Rule(4, path="*")
    offered = re.findall(r"(\w+)\(", str(caught.value).partition("Actions are ")[2])
    assert len(offered) > 9 and all(hasattr(jaxact, name) for name in offered)


def test_a_rule_behind_another_is_told_of_it():
    rules = Rule(Exact(), path="*"), Rule(Quantize(2), name="hidden")
    small = jaxact.compress(mlp, policy=Policy(rules=rules), activations="x")
    with pytest.warns(jaxact.CompressionWarning, match="earlier rule matches"):
        gradient(small, P, X)


def test_a_rule_that_leaves_nothing_to_store_is_used():
    rule = Rule(jaxact.Recompute(), path="*")
    small = jaxact.compress(mlp, policy=Policy(rules=(rule,)), activations="x")
    two = lambda p, x: small(p, small(p, x))
    table = jaxact.residuals(two, P, X)
    assert not table.unused_rules


@pytest.mark.parametrize("rule, offer", [
    (Rule(Exact(), name="hide"), "Did you mean name='hidden'?"),
    (Rule(Exact(), name="xyz"), "Here are name='hidden'."),
    (Rule(Exact(), primitive="cos"), "Here are primitive="),
])  # fmt: skip
def test_a_rule_that_matches_nothing_is_told_names(rule, offer):
    small = jaxact.compress(mlp, policy=Policy(rules=(rule,)), activations="x")
    with pytest.warns(jaxact.CompressionWarning) as record:
        gradient(small, P, X)
    assert offer in str(record[0].message)


def test_a_rule_for_a_name_where_nothing_has_one():
    policy = Policy(rules=(Rule(Exact(), name="mlp_*"),))
    small = jaxact.compress(lambda p, x: jnp.sin(x @ p), policy=policy)
    with pytest.warns(jaxact.CompressionWarning, match="has a checkpoint_name"):
        gradient(small, P, X)


def test_compressing_nothing_is_reported():
    small = jaxact.compress(lambda p, x: x @ p)
    with pytest.warns(jaxact.CompressionWarning, match="not named in activations"):
        gradient(small, P, X)
    table = jaxact.residuals(mlp, P, X)
    assert table.ratio == 1 and "nothing is compressed" in str(table)


def warned_line(record):
    """The text of the line in this file that a warning points at."""
    (warning,) = record
    assert warning.filename == __file__
    return Path(__file__).read_text().splitlines()[warning.lineno - 1]


def test_a_warning_points_at_the_call():
    small = jaxact.compress(lambda p, x: x @ p)

    def loss(p, x):
        return small(p, x).sum()  # called here

    with pytest.warns(jaxact.CompressionWarning) as record:
        jax.grad(loss)(P, X)
    assert warned_line(record).endswith("# called here")


def test_a_warning_points_at_the_derivative_of_a_jitted_call():
    small = jax.jit(jaxact.compress(lambda p, x: x @ p))
    loss = lambda p, x: small(p, x).sum()  # traced here, and differentiated
    with pytest.warns(jaxact.CompressionWarning) as record:
        jax.jit(jax.grad(loss))(P, X)
    assert warned_line(record).endswith("# traced here, and differentiated")


def test_a_warning_points_at_the_call_in_a_module():
    @jaxact.compress(policy=Policy(rules=(Rule(Exact(), name="nothing"),)))
    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", lambda _: P)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Linear()(x)  # called here

    net = Net()
    variables = net.init(jax.random.key(0), X)
    with pytest.warns(jaxact.CompressionWarning) as record:
        jax.grad(lambda v: net.apply(v, X).sum())(variables)
    assert warned_line(record).endswith("# called here")


def test_asking_for_nothing_is_not_reported():
    gradient(jaxact.compress(lambda p, x: x @ p, policy=Policy(default=Exact())), P, X)


@pytest.mark.parametrize(
    "action, ratio, error",
    [
        (Quantize(8, group_size=64), 3.5, 0.02),
        (Cast(jnp.bfloat16), 2, 0.01),
        (Cast(jnp.float8_e4m3fn), 4, 0.1),
        (Offload(Quantize(8, group_size=64)), 3.5, 0.02),
        (Offload(), 1, 0),
        (Quantize(8, stochastic=False), 3.75, 0.02),
    ],
)
def test_actions(action, ratio, error):
    small = jaxact.compress(mlp, policy=Policy(default=action), activations="x")
    table = jaxact.residuals(small, P, X)
    assert table.ratio == pytest.approx(ratio, rel=0.15)
    assert {row.action for row in table.rows} == {action}
    exact = gradient(mlp, P, X)
    difference = jax.jit(lambda: gradient(small, P, X))() - exact
    norm = jnp.linalg.norm
    assert norm(difference) <= (error + 1e-6) * norm(exact)


def test_recompute_keeps_only_its_sources():
    policy = Policy(
        bits=8,
        rules=(
            Rule(Exact(), where=lambda r: r.origin == "argument"),
            Rule(Recompute(), where=lambda r: r.origin == "computed"),
        ),
    )
    small = jaxact.compress(mlp, policy=policy, activations="x")
    table = jaxact.residuals(small, P, X)
    assert table.rows == ()
    jitted = lambda f: jax.jit(lambda: gradient(f, P, X))()
    assert jnp.allclose(jitted(small), jitted(mlp), rtol=1e-5, atol=1e-5)


def test_offloaded_residuals_live_in_host_memory():
    small = jaxact.compress(mlp, policy=Policy(default=Offload(Quantize(4))))
    vjp = jax.eval_shape(lambda: jax.vjp(small, P, X)[1])
    assert vjp is not None
    program = jax.make_jaxpr(lambda p, x: jax.tree.leaves(jax.vjp(small, p, x)[1]))(
        P, X
    )
    spaces = [v.aval.memory_space for v in program.jaxpr.outvars]
    assert jax.memory.Space.Host in spaces


@pytest.mark.parametrize("bits, stored", [(1, 2), (2, 3), (3, 4), (4, 4), (8, 8)])
def test_exponentials_get_one_bit_more_below_four(bits, stored):
    exponential = Residual((64, 256), np.dtype("float32"), primitive="exp")
    assert decide(Policy(bits), exponential).action == Quantize(stored)
    chosen = Policy(default=Quantize(bits))
    assert decide(chosen, exponential).action == Quantize(bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 3, 5, 8, 9, 16, 31])
@pytest.mark.parametrize(
    "action",
    [Quantize(2), Quantize(8), Dithered(4), Rotated(0.5), Adaptive(4)],
    ids=repr,
)
def test_no_array_is_larger_packed(action, width, dtype):
    """Rows along axis 0 have groups of their own: the coordinates of points."""
    x = jax.ShapeDtypeStruct((4096, width), dtype)
    f = lambda x: jnp.tanh(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressionWarning)  # nothing was packed
        table = jaxact.residuals(f, x, policy=Policy(default=action))
    (row,) = table.rows
    assert row.stored_bytes <= row.exact_bytes
    if row.stored_bytes == row.exact_bytes:
        assert "would be no smaller packed" in row.why


@pytest.mark.parametrize("columns", [255, 256])
def test_codes_as_wide_as_the_elements(columns):
    """Longer rows would not help."""
    reason = Quantize(8).declines((64, columns), jnp.dtype(jnp.float8_e4m3fn))
    assert "8 bits" in reason and "than float8_e4m3fn; take fewer bits" in reason
    assert Quantize(4).declines((64, columns), jnp.dtype(jnp.float8_e4m3fn)) is None


@pytest.mark.parametrize("name, is_matched", [("mlp_*", True), ("MLP_*", False)])
def test_names_match_alike_everywhere(monkeypatch, name, is_matched):
    """Windows compares the names of files without their case."""
    monkeypatch.setattr(os.path, "normcase", ntpath.normcase)
    residual = Residual((64, 256), np.dtype("float32"), name="mlp_hidden")
    decision = decide(Policy(2, rules=(Rule(Quantize(8), name=name),)), residual)
    assert (decision.action == Quantize(8)) == is_matched

"""Presets are values, and a small network is stored as each of them says."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import (
    Cast,
    Cost,
    DualPrecision,
    Exact,
    Offload,
    PerSample,
    Policy,
    Quantize,
    Rule,
    Sensitivity,
)
from jaxact.policies import acgc, actnn, by_name, division, gact

pytestmark = pytest.mark.unoptimized

PRESETS = {
    **{f"actnn({n})": (actnn, n) for n in range(6)},
    "gact(4)": (gact, 4),
    "division(2)": (division, 2),
    "acgc(0.1)": (acgc, 0.1),
}


def net(p, x):
    """Product, BatchNorm over rows, ReLU, product."""
    with jax.named_scope("first"):
        h = x @ p["first"]
    with jax.named_scope("norm"):
        mean = jnp.mean(h, 0, keepdims=True)
        variance = jnp.mean(jnp.square(h - mean), 0, keepdims=True)
        h = (h - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"]
    with jax.named_scope("last"):
        return jnp.maximum(h, 0) @ p["last"]


P = {
    "first": jax.random.normal(jax.random.key(1), (64, 128)) / 8,
    "scale": jnp.ones((1, 128)),
    "last": jax.random.normal(jax.random.key(2), (128, 64)) / 8,
}
X = jax.random.normal(jax.random.key(0), (256, 64))
# Its large float residuals: the input, and what BatchNorm normalizes.
KEYS = "x", "first/dot_general"


def stored(policy):
    small = jaxact.compress(net, policy=policy, activations="x")
    return jaxact.residuals(small, P, X)


def actions(policy):
    """Of the float residuals that are no statistics, by key."""
    rows = [row for row in stored(policy).rows if row.exact_bytes >= X.nbytes]
    return {row.key: row.action for row in rows if row.dtype != bool}


def measurement(costs, signal=1.0):
    rows = [Cost(key, 256 * 64, 4, float(c), signal, 2) for key, c in costs.items()]
    return Sensitivity(tuple(rows), signal)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_values(name):
    make, argument = PRESETS[name]
    policy = make(argument)
    assert isinstance(policy, Policy)
    assert policy == make(argument) and hash(policy) == hash(make(argument))
    assert " at 0x" not in repr(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.bits = 1


def test_no_preset_changes_another():
    before = actnn(3)
    actnn(1)
    assert actnn(3) == before
    assert len({actnn(level) for level in range(5)}) == 5 and actnn(5) == actnn(4)


def test_actnn_levels():
    assert actnn() == actnn(3)
    assert actnn(0) == Policy(default=Exact())
    assert actnn(2) == Policy(bits=4)
    assert dataclasses.replace(actnn(1), rules=()) == Policy(bits=4)
    assert [rule.action for rule in actnn(1).rules] == [Exact()]
    assert actnn(3) == Policy(default=PerSample(2.0))
    assert actnn(4) == Policy(default=Offload(PerSample(2.0)))


def test_uniform_bits():
    assert [gact(b).bits for b in (1, 2, 2.5, 3, 4, 5, 8)] == [1, 2, 3, 3, 4, 5, 8]
    assert [acgc(e2).bits for e2 in (1, 0.1, 0.01)] == [2, 4, 5]
    assert acgc(1e-5) == Policy(default=Cast(jnp.bfloat16))
    assert acgc(1e-9) == Policy(default=Exact())
    assert division(4, 16) == Policy(default=DualPrecision(4, 16))


@pytest.mark.parametrize("e2", [1, 0.3, 0.1, 0.03, 0.01, 0.001])
def test_acgc_keeps_its_bound_on_normal_inputs_and_no_bit_fewer_does(e2):
    """||dx||^2 / ||x||^2 of one draw: 2^17 values, known to 1 %."""
    x = jax.random.normal(jax.random.key(3), (512, 256))

    def error(bits):
        codec = Quantize(bits)
        there = codec.encode(x, jnp.uint32(7))
        back = codec.decode(there, x.shape, x.dtype)
        return float(jnp.square(back - x).sum() / jnp.square(x).sum())

    bits = acgc(e2).bits
    assert error(bits) <= 1.02 * e2 < error(bits - 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: actnn(6), "0: exact; 1: 4 bits.*5: as level 4"),
        (lambda: actnn("L3"), "a level is required"),
        (lambda: actnn(True), "a level is required"),
        (lambda: actnn([3]), "a level is required"),
        (lambda: actnn(2, measured=measurement({"a": 1})), "fixed bits"),
        (lambda: gact(0), "above 0"),
        (lambda: gact(9), "at most 8"),
        (lambda: gact(math.nan), "above 0"),
        (lambda: acgc(0), "positive"),
        (lambda: acgc(math.inf), "positive"),
        (lambda: gact(2, measured=Sensitivity((), 1.0)), "empty"),
    ],
)
def test_bad_requests(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "policy, action",
    [
        (actnn(2), Quantize(4)),
        (actnn(3), PerSample(2.0)),
        (actnn(4), Offload(PerSample(2.0))),
        (gact(3), Quantize(3)),
        (division(), DualPrecision(2, 8)),
        (acgc(1), Quantize(2)),
    ],
    ids=str,
)
def test_what_is_stored(policy, action):
    assert actions(policy) == dict.fromkeys(KEYS, action)
    large = [row for row in stored(policy).rows if row.action == action]
    assert sum(r.exact_bytes for r in large) > 6 * sum(r.stored_bytes for r in large)
    assert stored(policy).ratio > 6  # masks take a bit


def test_level_0_is_what_jax_keeps():
    assert stored(actnn(0)).ratio == 1


def test_level_1_keeps_what_batch_norm_normalizes():
    assert actions(actnn(1)) == dict(zip(KEYS, (Quantize(4), Exact()), strict=True))


def test_level_1_does_not_ask_for_batch_norm():
    policy = Policy(4, rules=actnn(1).rules)  # a policy warns once
    small = jaxact.compress(lambda w, x: jnp.tanh(x @ w), policy=policy)
    jax.grad(lambda w: small(w, X).sum())(P["first"])  # warnings are errors


def test_measured_bits_reach_the_residuals():
    measured = measurement(dict(zip(KEYS, (1.0, 1e3), strict=True)))
    for policy in (gact(4, measured=measured), acgc(0.1, measured=measured)):
        found = actions(policy)
        assert found[KEYS[0]].bits < found[KEYS[1]].bits
    found = actions(actnn(3, measured=measured))
    assert found == dict(zip(KEYS, (PerSample(1.0), PerSample(3.0)), strict=True))
    assert set(actions(actnn(4, measured=measured)).values()) >= {
        Offload(PerSample(1.0)),
        Offload(PerSample(3.0)),
    }


def test_measured_presets():
    measured = measurement({"a": 1.0, "b": 1.0, "c": 1e3, "d": 1.0})
    unmeasured = dataclasses.replace(measured, unmeasured=("e",))
    assert gact(2, measured=measured) == gact(2, measured=unmeasured)
    assert gact(2.5, measured=measured).bits == 3
    bits = [rule.action.bits for rule in gact(2.5, measured=measured).rules]
    assert sum(bits) <= 10 and max(bits) == bits[2]
    bits = [rule.action.codec.bits for rule in actnn(5, measured=measured).rules]
    assert bits == [1, 1, 5, 1]
    rows = dict(zip("abcd", [1.0, 1.0, math.nan, 1.0], strict=True))
    bound = acgc(1e-7, measured=measurement(rows)).rules
    assert bound[2] == Rule(Exact(), key="c")
    assert {rule.key for rule in bound} == set("abcd")


def test_exact_residuals_of_measured_levels():
    rows = {key: 1.0 for key in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"}
    measured = measurement(rows | {"a": math.inf})
    assert actnn(3, measured=measured).rules[0].action == Exact()
    assert actnn(4, measured=measured).rules[0].action == Offload(Exact())


def named(p, x):
    q = checkpoint_name(x @ p["first"], "q")
    k = checkpoint_name(jnp.sin(q) @ p["second"], "k")
    v = checkpoint_name(jnp.sin(k) @ p["first"], "v")
    return jnp.sin(checkpoint_name(jnp.sin(v) @ p["second"], "o")).sum()


def test_names_with_words_for_actions():
    words = {"q": "compress", "k": "compress:2", "v": "device", "o": "remat"}
    policy = by_name(words, bits=3)
    p = {n: jax.random.normal(jax.random.key(0), (64, 64)) for n in ("first", "second")}
    x = jax.random.normal(jax.random.key(1), (128, 64))
    small = jaxact.compress(named, policy=policy, activations="x")
    rows = {row.name: row for row in jaxact.residuals(small, p, x).rows if row.name}
    assert {name: row.action for name, row in rows.items()} == {
        "q": Quantize(3),
        "k": Quantize(2),
        "v": Exact(),
    }
    assert by_name({"q": Quantize(3)}).rules == by_name({"q": "compress:3"}).rules


def test_wrong_bits_name_the_value():
    for actions, bits in (({"q": "compress:12"}, 4), ({"q": "compress"}, 12)):
        with pytest.raises(ValueError, match="by_name: 'q': .*bits=12.*from 1 to 8"):
            by_name(actions, bits)


@pytest.mark.parametrize("word", ["zip", "compress:", "compress:x", "compress2", ""])
def test_another_word_is_refused(word):
    with pytest.raises(ValueError, match="'q' has .*device, offload, remat, compress"):
        by_name({"q": word})

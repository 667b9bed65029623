"""A rule reaches all that it says, and says so where it reaches nothing."""

import dataclasses
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxact
from jaxact import CompressionWarning, Exact, Policy, Quantize, Rule
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

WIDTH = 64
X = jax.random.normal(jax.random.key(0), (8, 16, WIDTH))


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(WIDTH, name=name)(x) for name in "qkv")
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + LinenAttention(name="attn")(nn.LayerNorm()(x))
        return x + nn.gelu(nn.Dense(WIDTH, name="up")(x))


class NNXAttention(nnx.Module):
    def __init__(self, rngs):
        self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in "qkv")

    def __call__(self, x):
        weights = jax.nn.softmax(self.q(x) @ self.k(x).swapaxes(-1, -2))
        return weights @ self.v(x)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = NNXAttention(rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + jax.nn.gelu(self.up(x))


def linen_loss(policy):
    net = jaxact.compress(LinenBlock, policy=policy)()
    variables = net.init(jax.random.key(0), X)
    return lambda v: net.apply(v, X).sum(), variables


def nnx_loss(policy):
    model = jaxact.compress(NNXBlock, policy=policy)(nnx.Rngs(0))
    return lambda m: m(X).sum(), model


@pytest.mark.parametrize("pattern", ["attn", "attn/*", "*/attn", "Block/attn"])
@pytest.mark.parametrize("make", [linen_loss, nnx_loss], ids=["linen", "nnx"])
def test_a_path_means_the_module_and_all_below(make, pattern):
    library = "Linen" if make is linen_loss else "NNX"
    pattern = pattern.replace("Block", f"{library}Block")
    fn, variables = make(Policy(rules=(Rule(Exact(), path=pattern),)))
    table = jaxact.residuals(fn, variables)
    (softmax,) = [row for row in table.rows if row.key.endswith("attn/exp")]
    below = [row for row in table.rows if "/attn" in row.path]
    rounded = [row for row in table.rows if row.bias is not jaxact.Bias.EXACT]
    assert softmax in below and len(below) == 4  # q, k, v
    assert {row.action for row in below} == {Exact()}
    assert rounded and not any("attn" in row.key for row in rounded)


@pytest.mark.parametrize(
    "pattern, path, is_within",
    [
        ("mlp", "Net/b0/mlp", True),
        ("mlp", "Net/b0/mlp/derivative", True),
        ("mlp/*", "Net/b0/mlp", True),
        ("mlp/up", "Net/b0/mlp/up", True),
        ("b?/mlp", "Net/b0/mlp/up", True),
        ("Net/*/up", "Net/b0/mlp/up", True),
        ("ml", "Net/b0/mlp", False),
        ("b1", "Net/b10/mlp", False),
        ("mlp/*/up", "Net/b0/mlp/up", False),
        ("MLP", "Net/b0/mlp", False),
        ("*", "", True),
    ],
)
def test_patterns(pattern, path, is_within):
    residual = jaxact.Residual((64, 64), np.dtype("float32"), path=path)
    assert Rule(Exact(), path=pattern).matches(residual) is is_within


@pytest.mark.parametrize(
    "conditions, said",
    [
        ({"path": r"layer_\d+/.*"}, "write path='layer_*/*'."),
        ({"path": r".*mlp.*"}, "write path='*mlp*'."),
        ({"path": "^block"}, "write path='block'."),
        ({"path": "(up|down)"}, "write one for each alternative."),
        ({"name": r"mlp_\w"}, "write name='mlp_?'."),
        ({"where": lambda residual: None}, "True or False is required."),
        ({"dtype": "bfloat16"}, "Here are dtype='float32'."),
        ({"key": "tanh*"}, "Here are key='tanh.derivative'."),
        ({"where": lambda residual: False}, None),
        ({"path": "block[0-9]"}, None),
    ],
)
def test_conditions_that_are_not_read_as_they_are_meant(conditions, said):
    """They were said to match nothing, and no more."""
    policy = Policy(rules=(Rule(Exact(), **conditions),))
    small = jaxact.compress(jnp.tanh, policy=policy)
    with pytest.warns(CompressionWarning, match="matched no residual") as caught:
        jax.grad(lambda x: small(x).sum())(X)
    text = str(caught[0].message)
    is_explained = "is a glob" in text or "is required" in text
    assert said in text if said else not is_explained


@jax.custom_vjp
def attend(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def attend_forward(q, k, v):
    out = jax.ad_checkpoint.checkpoint_name(attend(q, k, v), "out")
    return out, (q, k, v, out)


def attend_backward(kept, g):
    *inputs, out = kept
    _, vjp = jax.vjp(lambda *xs: jax.nn.softmax(xs[0] @ xs[1].T) @ xs[2], *inputs)
    return vjp(g + 0 * out)


attend.defvjp(attend_forward, attend_backward)


def flash(ws, x):
    with jax.named_scope("attn"):
        h = jnp.tanh(x @ ws[0])
        return attend(h @ ws[1], h @ ws[2], h @ ws[3])


def checkpointed(ws, x):
    with jax.named_scope("attn"):
        h = jnp.tanh(x @ ws[0])
        return jax.checkpoint(lambda h: jnp.sin(jnp.tanh(h @ ws[1]) @ ws[2]))(h @ ws[3])


WS = [jnp.eye(64) * 0.3] * 4
INPUT = jax.random.normal(jax.random.key(1), (128, 64))


@pytest.mark.parametrize("f", [flash, checkpointed])
@pytest.mark.parametrize(
    "condition",
    [{"path": "attn"}, {"recomputed_from": True}],
    ids=["path", "recomputed_from"],
)
@pytest.mark.parametrize("recompute", [None, jax.checkpoint_policies.dots_saveable])
def test_a_condition_matches_what_is_kept_for_recomputation(f, condition, recompute):
    def biased(*rules):
        policy = Policy(rules=rules, recompute=recompute)
        small = jaxact.compress(f, policy=policy, activations="x")
        rows = jaxact.residuals(small, WS, INPUT, argnums=0).rows
        return [r for r in rows if r.bias is jaxact.Bias.BIASED and r.key != "x"]

    assert biased()
    assert not biased(Rule(Exact(), **condition))


def test_a_name_matches_in_a_custom_rule():
    policy = Policy(rules=(Rule(Quantize(3), name="out"),))
    small = jaxact.compress(flash, policy=policy, activations="x")
    rows = jaxact.residuals(small, WS, INPUT, argnums=0).rows
    assert [r.key for r in rows if r.action == Quantize(3)] == ["attn/custom_vjp.out"]


@pytest.mark.parametrize("f", [flash, checkpointed])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(default=Quantize(4)),
        Policy(rules=(Rule(Quantize(4), path="attn"),)),
        Policy(rules=(Rule(Quantize(4), where=lambda r: r.size > 64),)),
    ],
    ids=["default", "path", "where"],
)
def test_too_few_bits_for_recomputation_are_told(f, policy):
    def differentiate(policy):
        small = jaxact.compress(f, policy=policy, activations="x")
        jax.make_jaxpr(jax.grad(lambda ws: small(ws, INPUT).sum()))(WS)

    with pytest.warns(CompressionWarning, match="8 bits: the gradient is biased"):
        differentiate(policy)
    meant = Rule(Quantize(4), recomputed_from=True)
    accepted = dataclasses.replace(policy, rules=(meant, *policy.rules))
    saved = dataclasses.replace(policy, recompute=jax.checkpoint_policies.dots_saveable)
    for quiet in (accepted, saved, Policy(bits=1)):
        differentiate(quiet)


def test_a_rule_about_a_carry_holds_outside_of_the_scan():
    def f(ws, x):
        return lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, ws)[0]

    policy = Policy(rules=(Rule(Exact(), path="carry"),))
    small = jaxact.compress(f, policy=policy, activations="x")
    table = jaxact.residuals(small, jnp.stack(WS), INPUT, argnums=0)
    actions = {row.key: row.action for row in table.rows}
    assert actions == {"carry@scan": Exact(), "tanh.derivative@scan": Quantize(4)}


def layer(w, x):
    return jnp.tanh(x @ w)


def network(policy):
    small = jaxact.compress(layer, policy=policy, activations="x")

    def loss(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                x = small(w, x)  # called here
        return x.sum()

    return loss


@pytest.mark.parametrize(
    "condition, offer",
    [
        ({"path": "layr3"}, "path='layer3'"),
        ({"path": "leyer1/*"}, "path='layer1'"),
        ({"key": "layer2/y"}, "key='layer2/x'"),
        ({"primitive": "tan"}, "primitive="),
        ({"path": "something else"}, "jaxact.residuals"),
        ({"min_bytes": 1 << 40}, "jaxact.residuals"),
        ({"recomputed_from": True}, "jaxact.residuals"),
    ],
    ids=str,
)
def test_a_rule_without_a_match_warns_once_with_the_nearest(condition, offer):
    rule = Rule(Exact(), **condition)
    loss = network(Policy(rules=(rule, Rule(Exact(), path="layer3"))))
    with pytest.warns(CompressionWarning) as record:
        jax.grad(loss)(WS, INPUT)
    (warning,) = record
    assert repr(rule) in str(warning.message) and offer in str(warning.message)
    lines = Path(__file__).read_text().splitlines()
    assert warning.filename == __file__
    assert lines[warning.lineno - 1].endswith("# called here")
    with warnings.catch_warnings():  # once for a policy, whatever the filters
        warnings.simplefilter("always")
        warnings.simplefilter("error", CompressionWarning)
        jax.grad(loss)(WS, INPUT)
        jax.jit(jax.grad(loss))(WS, INPUT[:64])


@pytest.mark.parametrize("condition", ["path", "key"])
def test_a_rule_for_calls_inside_asks_for_using(condition):
    """It was said to match nothing, though the table has such a row."""
    rule = Rule(Exact(), **{condition: "layer1/x"})
    policy, loss = Policy(rules=(rule,)), network(Policy())
    with pytest.warns(CompressionWarning, match=r"write with jaxact.using\(policy\)"):
        jaxact.residuals(loss, WS, INPUT, policy=policy)
    with jaxact.using(policy):
        assert not jaxact.residuals(loss, WS, INPUT).unused_rules


@thorough
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"]
)
def test_a_rule_for_the_last_layer_does_not_warn(transform):
    """Nor for a scan in a call: the first layers' calls end no program."""
    rules = Rule(Exact(), path="layer3"), Rule(Exact(), key="layer2/x")
    loss = network(Policy(rules=rules))
    jax.grad(transform(loss))(WS, INPUT)

    def steps(w, x):
        return lax.scan(lambda c, _: (layer(w, c), None), x, length=2)[0]

    small = jaxact.compress(steps, policy=Policy(rules=rules[:1]), activations="x")

    def scans(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                x = small(w, x)
        return x.sum()

    jax.grad(transform(scans))(WS, INPUT)


@pytest.mark.parametrize("make", [linen_loss, nnx_loss], ids=["linen", "nnx"])
def test_the_same_policy_object_serves_several_modules(make):
    policy = Policy(rules=(Rule(Exact(), path="atn"),))
    fn, variables = make(policy)
    with pytest.warns(CompressionWarning, match="Did you mean path='attn'"):
        jax.grad(fn)(variables)


class Heir(jaxact.compress(LinenBlock)):
    extra: int = 0


def test_an_inherited_compressed_linen_call_is_compressed_once():
    block = jaxact.compress(Heir, policy=Policy(bits=2))()
    variables = block.init(jax.random.key(0), X)
    own = LinenBlock().init(jax.random.key(0), X)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, variables, own))
    table = jaxact.residuals(lambda v: block.apply(v, X).sum(), variables)
    rounded = [r for r in table.rows if r.bias is not jaxact.Bias.EXACT]
    assert rounded and {r.action.bits for r in rounded} <= {2, 3}  # exponentials: 3


def test_a_compressed_instance_follows_its_module():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.scale = 1.0
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.scale * self.drop(self.up(x))

    net = Net(nnx.Rngs(0))
    small = jaxact.compress(net)
    net.eval()
    np.testing.assert_array_equal(small(X), net(X))
    net.scale, net.up = 2.0, nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(small(X), net(X))
    small.train()
    assert not np.array_equal(net(X), net(X))


README_FLOW = {"Linen": LinenBlock, "NNX": NNXBlock, "function": layer}


@pytest.mark.parametrize("kind", README_FLOW)
def test_allocated_bits_replace_the_first_policy(kind):
    """The flow that the README prints: compress, measure, allocate, compress again."""
    compressed = jaxact.compress(README_FLOW[kind])

    def arguments(c):
        if kind == "Linen":
            variables = LinenBlock().init(jax.random.key(0), X)
            return (lambda v: c().apply(v, X).sum(), variables)
        if kind == "NNX":
            return (lambda m: m(X).sum(), c(nnx.Rngs(0)))
        return (lambda w, x: c(w, x).sum(), WS[0], INPUT)

    measured = jaxact.sensitivity(*arguments(compressed), draws=1)
    allocation = jaxact.allocate(measured, bits=2)
    again = jaxact.compress(compressed, policy=allocation.policy())
    rows = {r.key: r for r in jaxact.residuals(*arguments(again)).rows}
    wanted = {key: bits for key, bits in allocation.bits if bits <= 8}
    assert wanted and {key: rows[key].action.bits for key in wanted} == wanted

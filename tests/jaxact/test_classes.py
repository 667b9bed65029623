"""What is stored once for several residuals, and what is not stored at all."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as save, lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Cast, Exact, Offload, Policy, Quantize, Recompute, Rule
from support import blocks

# Look-ups alone leave nothing to compress, and say so.
pytestmark = pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning")

T, D = 96, 64  # rows, their length
W = jax.random.normal(jax.random.key(1), (D, D)) / 8
P = dict.fromkeys("qkvw", W)
X = jax.random.normal(jax.random.key(0), (T, D))
CAUSAL = np.tril(np.ones((T, D), bool))
IDS = jnp.arange(T) % 8


def rows(f, p=P, x=X, policy=None):
    """The table of f(p, x), `x` the activation, without small statistics."""
    policy = Policy(bits=2) if policy is None else policy
    small = jaxact.compress(f, policy=policy, activations=1)
    return [r for r in jaxact.residuals(small, p, x).rows if np.prod(r.shape) > T]


def stored(f, p=P, x=X, **kwargs):
    """How often each shape is stored in several bits, and the number of masks."""
    found = rows(f, p, x, **kwargs)
    masks = [r for r in found if r.dtype == jnp.bool_]
    arrays = [r for r in found if r.dtype != jnp.bool_]
    assert not [r for r in arrays if isinstance(r.action, Exact)]
    return collections.Counter(r.shape for r in arrays), len(masks)


# Norms: their output is affine in the input.


def test_batch_norm_and_relu_between_convolutions():
    def f(p, x):
        y = blocks.conv(x, p["a"])
        y = blocks.normalize(y, (0, 1, 2)) * p["gain"] + p["bias"]
        return blocks.conv(jax.nn.relu(y), p["b"])

    kernel, row = jnp.ones((3, 3, 16, 16)), jnp.ones((1, 1, 1, 16))
    p = {"a": kernel, "b": kernel, "gain": row, "bias": row}
    shape = (4, 8, 8, 16)
    assert stored(f, p, jnp.ones(shape)) == ({shape: 2}, 1)  # x, the output of `a`


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_that_feeds_several_products_stores_its_input(norm):
    def f(p, x):
        gain = p["w"][0]
        layer = lambda x: blocks.normalize(x) * gain[None]
        y = layer(x) if norm == "layer" else blocks.rms_norm(x, gain)
        return [y @ p[name] for name in "qkv"]

    assert stored(f) == ({(T, D): 1}, 0)


def test_statistics_stay_exact_whatever_the_default():
    def f(p, x):
        y = jax.nn.softmax(blocks.normalize(x) @ p["q"]) @ p["v"]
        return y * y.mean(0)[None]

    small = jaxact.compress(f, policy=Policy(default=Quantize(2)), activations=1)
    table = jaxact.residuals(small, P, X)
    assert {r.bias for r in table.rows if np.prod(r.shape) <= T} == {"exact"}
    rounded = {r.bias for r in table.rows if np.prod(r.shape) > T}
    assert rounded == {"unbiased", "unbiased to first order"}  # once; twice


# Sums, parts and wholes.


def test_the_sum_of_two_stored_values_is_not_stored():
    def f(p, x):
        a, b = x @ p["q"], jnp.square(x @ p["k"])
        return a @ p["v"] + b @ p["v"] + (a + b) @ p["w"]

    # x, a, x @ k, its square b
    assert stored(f) == ({(T, D): 4}, 0)


def test_concatenations_store_each_part_once():
    def f(p, x):
        for w in p["new"]:
            x = jnp.concatenate([x, jax.nn.relu(x @ w)], -1)
        return x @ p["last"]

    width, new = D, 32
    shapes = [(width + k * new, new) for k in range(4)]
    p = {"new": [jnp.ones(s) for s in shapes], "last": jnp.ones((width + 4 * new, D))}
    assert stored(f, p) == ({(T, D): 1, (T, new): 4}, 4)


def test_the_parts_of_a_fused_product_have_groups_of_their_own():
    def f(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        return jax.nn.softmax(q @ k.T) @ v

    p = {"qkv": jnp.concatenate([W, W, W], -1)}
    # x, q, k, v, exp of the scores
    assert stored(f, p) == ({(T, D): 4, (T, T): 1}, 0)


def test_of_a_large_value_a_small_part_is_stored():
    def f(p, x):
        return jnp.square((x @ p["w"])[:, :8])

    assert stored(f) == ({(T, D): 1, (T, 8): 1}, 0)


# Look-ups.


def test_gathering_rows_stores_nodes_and_not_edges():
    edges = np.random.default_rng(0).integers(T, size=8 * T)
    f = lambda p, x: (x @ p["w"])[edges] @ p["v"]
    assert stored(f) == ({(T, D): 2}, 0)  # x, x @ w


@pytest.mark.parametrize("look_up", [lambda t, i: t[i], lambda t, i: jnp.take(t, i, 0)])
def test_an_embedding_stores_nothing(look_up):
    assert stored(lambda p, i: look_up(p["q"], i) @ p["w"], x=IDS) == ({}, 0)


def test_one_hot_of_integers_stores_nothing():
    assert stored(lambda p, i: jax.nn.one_hot(i, D) @ p["w"], x=IDS) == ({}, 0)
    f = lambda p, x: (jax.nn.one_hot(IDS, D) * x) @ p["w"]
    assert stored(f) == ({(T, D): 1}, 0)


def test_dropout_stores_a_bit():
    def dropout(p, x):
        keep = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)
        return jnp.where(keep, x / 0.9, 0.0)

    assert stored(dropout) == ({}, 1)
    # Its output is affine in x, by that bit.
    assert stored(lambda p, x: dropout(p, x) @ p["w"]) == ({(T, D): 1}, 1)


# Softmax: its derivative is a function of its output.


def by_hand(fill):
    def softmax(scores):
        scores = jnp.where(CAUSAL, scores, fill)
        largest = lax.stop_gradient(scores.max(-1, keepdims=True))
        e = jnp.exp(scores - largest)
        return e / e.sum(-1, keepdims=True)

    return softmax


SOFTMAX = {
    "-inf": by_hand(-jnp.inf),
    "-1e9": by_hand(-1e9),
    "jax": jax.nn.softmax,
    "where": lambda s: jax.nn.softmax(s, where=CAUSAL),
    "masked jax": lambda s: jax.nn.softmax(jnp.where(CAUSAL, s, -jnp.inf)),
}


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_softmax_stores_one_array(softmax):
    # x, and the softmax; the constant mask is referenced
    assert stored(lambda p, x: softmax(x @ p["w"]) @ p["v"])[0] == {(T, D): 2}


LOGARITHMS = {
    "log_softmax": jax.nn.log_softmax,
    "log_softmax where": lambda s: jax.nn.log_softmax(s, where=CAUSAL),
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1),
}


@pytest.mark.parametrize("f", LOGARITHMS.values(), ids=LOGARITHMS)
def test_logarithms_of_softmax_store_an_exponential(f):
    assert stored(lambda p, x: f(x)) == ({(T, D): 1}, 0)


@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_masks_leave_gradients_finite(softmax):
    f = lambda p, x: softmax(x @ p["w"]) @ p["v"]
    small = jaxact.compress(f, policy=Policy(bits=8), activations=1)
    gradient = lambda f: jax.jit(jax.grad(lambda p: (f(p, X) ** 2).sum()))(P)["w"]
    got, want = gradient(small), gradient(f)
    # 8 bits: three residuals, each off by at most range / 255 with other signs.
    assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


# Parameters.


def test_what_is_made_of_parameters_is_not_packed():
    def f(p, x):
        standard = blocks.normalize(p["w"], 0)
        half = p["v"].astype(jnp.bfloat16).astype(jnp.float32)
        return (x @ standard) @ (half * 2.0)

    assert stored(f) == ({(T, D): 2}, 0)  # x, x @ standard


# Rules.


def named(p, x):
    hidden = checkpoint_name(x @ p["w"], "hidden")
    return checkpoint_name(jax.nn.gelu(hidden), "act") @ p["v"]


def decided(f, *rules, bits=2):
    return rows(f, policy=Policy(bits=bits, rules=rules))


def test_a_rule_reaches_a_value_that_is_only_derived():
    def f(p, x):
        xhat = checkpoint_name(blocks.normalize(x @ p["v"]), "xhat")
        return xhat @ p["w"]

    found = decided(f, Rule(Exact(), name="xhat"))
    exact = [r for r in found if r.action == Exact()]
    assert [(r.primitive, r.why) for r in exact] == [("dot_general", "rule name=xhat")]


def test_a_rule_reaches_the_derivative_of_a_named_value():
    found = decided(named, Rule(Exact(), name="hidden"))
    exact = [r for r in found if r.action == Exact()]
    assert [(r.name, r.path) for r in exact] == [("hidden", "derivative")]
    assert len(found) == 3  # x, gelu, its derivative


def test_gelu_can_be_recomputed_from_its_stored_input():
    again = Rule(Recompute(), path="*derivative"), Rule(Recompute(), name="act")
    found = decided(named, *again)
    assert [(r.name, r.bias) for r in found] == [("", "unbiased"), ("hidden", "biased")]


def test_what_is_recomputed_leaves_its_sources_biased():
    def f(p, x):
        return checkpoint_name(jnp.sin(x @ p["w"]), "act") @ p["v"]

    found = decided(f, Rule(Recompute(), name="act"))
    bias = {r.primitive: r.bias for r in found}
    assert bias == {"": "unbiased", "dot_general": "biased", "cos": "unbiased"}


def test_an_argument_cannot_be_recomputed():
    everything = Rule(Recompute(), where=lambda r: r.origin == "argument")
    found = decided(lambda p, x: x @ p["w"], everything)
    assert not [r for r in found if isinstance(r.action, Recompute)]


# Labels.


@jax.custom_vjp
def waves(x):
    return jnp.sin(_harmonics(x))


def _harmonics(x):
    return x[..., None] * jnp.arange(1.0, 9.0)[None, None]


def _slopes(x, ct):
    """Eight times the elements of x: it is the smaller array to keep."""
    slopes = jnp.cos(_harmonics(x)) * jnp.arange(1.0, 9.0)[None, None]
    return ((ct * slopes).sum(-1),)


waves.defvjp(lambda x: (waves(x), x), _slopes)


def biases(f, **policy):
    """The label of the output of the first product, in f(x @ w) * v."""
    found = rows(lambda p, x: f(x @ p["w"]), policy=Policy(**policy))
    (bias,) = {r.bias for r in found if r.primitive == "dot_general"}
    return bias


def test_what_a_checkpoint_recomputes_from_is_biased():
    twice = jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y)))
    assert biases(twice) == "biased"


def test_what_a_custom_rule_gets_is_biased():
    assert biases(waves) == "biased"


ACTIONS = {
    "quantized": ({"bits": 4}, "unbiased"),
    "exact": ({"default": Offload(Exact())}, "exact"),
    "offloaded": ({"default": Offload(Quantize(4))}, "unbiased"),
    "cast": ({"default": Cast(jnp.bfloat16)}, "biased"),
    "nearest": ({"default": Quantize(4, stochastic=False)}, "biased"),
}


@pytest.mark.parametrize("policy, bias", ACTIONS.values(), ids=ACTIONS)
def test_labels_of_actions(policy, bias):
    assert biases(jnp.square, **policy) == bias


def test_recomputing_is_biased_where_it_is_nonlinear():
    """A square's slope, 2 y, is linear in the product y that the policy saves."""
    assert biases(jnp.sin, recompute=save.dots_saveable) == "biased"
    assert biases(jnp.square, recompute=save.dots_saveable) == "unbiased"


# Sums that scale, shift or divide nothing are activations.


ALONE = {
    "mean of heads": lambda x: jnp.sin(x.reshape(T, -1, 4).mean(-1)),
    "scores": lambda x: -jnp.exp((x[:, None] * x[None]).sum(-1) / 8),
    "distances": lambda x: -jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 64),
    "segments": lambda x: jnp.sin(jax.ops.segment_sum(x, IDS, 3)),
}


@pytest.mark.parametrize("f", ALONE.values(), ids=ALONE)
def test_a_sum_that_scales_nothing_is_rounded(f):
    """What shifts, scales or divides other values is exact: softmaxes, norms, cosines.

    The scores and distances were stored exactly, four bytes instead of 2 bits.
    """
    shapes, _ = stored(lambda w, x: f(x @ w), W)
    assert len(shapes) > 1  # x alone has what the product keeps


def test_a_maximum_of_features_is_known_by_its_mask():
    """And by the number of equal ones, which the gradient is divided by."""
    found = rows(lambda w, x: jnp.sin((x @ w).reshape(T, -1, 2).max(-1)), W)
    assert "reduce_max.eq" in (keys := {r.key for r in found})
    assert "reduce_max" not in keys


# Weights that a plain function takes apart are referenced, not stored.


def half(x):
    return x.astype(jnp.bfloat16)


SQUARE = (256, 256)
MOVED = {
    "slice": lambda w, x: x @ w[:, :128],
    "dynamic slice": lambda w, x: x @ lax.dynamic_slice_in_dim(w, 3, 128, 1),
    "transpose": lambda w, x: x @ w.T,
    "cast": lambda w, x: half(x) @ half(w),
    "reshape": lambda w, x: jnp.einsum("td,dhk->htk", x, w.reshape(256, 8, 32)),
    "split": lambda w, x: x @ jnp.split(w, 2, 1)[0],
    "iterated": lambda w, x: x @ [*w.reshape(len(w), 2, -1).swapaxes(0, 1)][0],
    "fused qkv": lambda w, x: (
        (x @ w[:, :64]) @ (x @ w[:, 64:128]).T @ (x @ w[:, 128:192])
    ),
}
PLAIN = {
    "chosen": Policy(bits=2),
    "everything": Policy(bits=2, recompute=save.everything_saveable),
}


@pytest.mark.parametrize("policy", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("f", MOVED.values(), ids=MOVED)
def test_weights_of_a_plain_function_are_not_rounded(f, policy):
    small = jaxact.compress(lambda w, x: jnp.tanh(f(w, x)), policy=policy)
    found = jaxact.residuals(small, jnp.ones(SQUARE), jnp.ones((T, 256))).rows
    rounded = {r.shape for r in found if r.bias.value != "exact"}
    # All that is made from x has its rows.
    assert rounded and not [shape for shape in rounded if T not in shape]

"""`Checkpoint`: calls computed again from packed inputs, as nested wrappers do it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Checkpoint, Exact, Policy, Quantize, Rule
from support.variants import thorough

SAVE = jax.checkpoint_policies
EIGHT = Rule(Quantize(8), recomputed_from=True)
W = jax.random.normal(jax.random.key(0), (3, 64, 64)) / 8
X = jax.random.normal(jax.random.key(1), (32, 64))


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w) + x


def network(layer):
    """Three layers by name, unrolled."""

    def loss(ws, x):
        for number in range(3):
            with jax.named_scope(f"layer{number}"):
                x = layer(ws[number], x)
        return (x**2).sum()

    return loss


def scanned(layer):
    def loss(ws, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)
        return (x**2).sum()

    return loss


def compressed(policy, f=layer):
    return jaxact.compress(f, policy=policy, activations="x" if f is layer else 1)


def products(loss):
    """Matrix products in a gradient's compiled program, with loops unrolled."""
    step = {"step": jax.jit(jax.grad(loss))}
    return jaxact.compare(step, W, X)["step"].products


@pytest.mark.parametrize("build", [network, scanned])
def test_stores_the_inputs_alone(build):
    loss = build(compressed(Policy(bits=2, recompute=Checkpoint())))
    rows = jaxact.residuals(loss, W, X).rows
    inside = [row for row in rows if not row.is_outside]
    assert {row.key.rpartition("/")[2] for row in inside} == {"x"}
    assert {row.action for row in inside} == {Quantize(8)}
    # A layer has two products and four in backward; unrolled, the first layer's input
    # needs no gradient.
    assert products(loss) == 3 * (2 + 2 + 4) - (build is network)


@pytest.mark.parametrize("build", [network, scanned])
def test_with_all_exact_the_gradient_is_that_without(build):
    policy = Policy(default=Exact(), recompute=Checkpoint())
    found = jax.jit(jax.grad(build(compressed(policy))))(W, X)
    expected = jax.jit(jax.grad(build(layer)))(W, X)
    # Sums in another order: some units in the last place of values up to 100.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@thorough
def test_the_error_is_that_of_nested_wrappers():
    """Both round x to 8 bits and inner residuals to 2, with other noise."""
    nested = compressed(
        Policy(bits=2), jax.checkpoint(compressed(Policy(bits=2, rules=(EIGHT,))))
    )
    value = compressed(Policy(bits=2, recompute=Checkpoint()))
    exact = jax.grad(network(layer))(W, X)
    errors = []
    for f in (nested, value):
        gradient = jax.jit(jax.grad(network(f)))(W, X)
        errors.append(float(jnp.linalg.norm(gradient - exact)))
    # Each is the norm of 12288 nearly independent errors: within some percent of its
    # mean. Two bits err by a tenth of the gradient, eight by a thousandth.
    assert 0.7 < errors[1] / errors[0] < 1.4
    assert errors[1] > 0.02 * float(jnp.linalg.norm(exact))


@thorough
def test_the_same_memory_as_nested_wrappers():
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def inside(w, x):
        return compressed(Policy(bits=2))(w, x)

    sizes = {}
    ws, x = jnp.zeros((8, 64, 64)), jnp.zeros((1024, 64))
    forms = {
        "plain": layer,
        "kept": compressed(Policy(bits=2)),
        "nested": compressed(Policy(bits=2), inside),
        "value": compressed(Policy(bits=2, recompute=Checkpoint())),
    }
    for name, form in forms.items():
        found = jaxact.memory(jax.grad(scanned(form)), ws, x)
        sizes[name] = found.temp_bytes
    assert sizes["value"] <= 1.02 * sizes["nested"]
    assert sizes["value"] < 0.5 * sizes["plain"]


def test_calls_by_path_and_by_key():
    by_path = Policy(bits=2, recompute=Checkpoint("layer1"))
    table = jaxact.residuals(network(compressed(by_path)), W, X)
    inside = [row for row in table.rows if not row.is_outside]
    kept = [row.path.partition("/")[0] for row in inside]
    assert kept.count("layer1") == 1
    assert kept.count("layer0") == kept.count("layer2") > 1

    def unnamed(layer):
        return lambda ws, x: layer(ws[1], layer(ws[0], x)).sum()

    by_key = Policy(bits=2, recompute=Checkpoint(key="@call#1"))
    every = jaxact.residuals(unnamed(compressed(Policy(bits=2))), W, X)
    table = jaxact.residuals(unnamed(compressed(by_key)), W, X)
    keys = [row.key for row in table.rows]
    assert [k for k in keys if k.endswith("@call#1")] == ["x@call#1"]
    first = [r.key for r in every.rows if not r.key.endswith("@call#1")]
    assert [k for k in keys if not k.endswith("@call#1")] == first


def test_other_policies_by_path():
    """The first that matches is for the call; the others are as without."""
    dots = Checkpoint("layer1", save=SAVE.dots_saveable)
    policy = Policy(bits=8, recompute=(dots, Checkpoint("layer*")))
    rows = jaxact.residuals(network(compressed(policy)), W, X).rows
    everywhere = Policy(bits=8, recompute=SAVE.dots_saveable)
    expected = jaxact.residuals(network(compressed(everywhere)), W, X).rows

    def of(rows, name):
        inside = [row for row in rows if not row.is_outside]
        return [r.key for r in inside if r.path.startswith(name)]

    assert of(rows, "layer1") == of(expected, "layer1")
    assert of(rows, "layer0") == ["layer0/x"]


def test_a_rule_is_for_inputs_and_for_residuals_inside():
    """One rule for a key that is kept, one for a key that the checkpoint makes."""
    rules = (Rule(Quantize(5), key="layer0/x"), Rule(Quantize(3), path="layer1"))
    policy = Policy(bits=2, rules=rules, recompute=Checkpoint("layer[01]"))
    rows = jaxact.residuals(network(compressed(policy)), W, X).rows
    found = {row.key: row.action.bits for row in rows if not row.is_outside}
    assert found["layer0/x"] == 5
    assert found["layer1/x"] == 3


@thorough
def test_scans_inside_a_call():
    """The body of the scan is a call of its own path."""
    policy = Policy(bits=2, recompute=Checkpoint("again"))

    def stack(ws, x):
        def body(x, w):
            with jax.named_scope("again"):
                return layer(w, x), None

        with jax.named_scope("again"):
            return jax.lax.scan(body, x, ws)[0].sum()

    whole = jaxact.compress(stack, policy=policy, activations=1)
    rows = jaxact.residuals(whole, W, X).rows
    inside = [row for row in rows if not row.is_outside]
    # Each step computed again needs its number, for the noise that it had.
    (number,) = (row for row in inside if row.dtype == np.uint32)
    assert number.shape == (len(W),)
    assert {row.action.label for row in inside if row is not number} == {"8 bits"}
    exact = Policy(default=Exact(), recompute=Checkpoint("again"))
    same = jaxact.compress(stack, policy=exact, activations=1)
    np.testing.assert_allclose(
        jax.grad(same)(W, X), jax.grad(stack)(W, X), rtol=1e-5, atol=1e-4
    )


@thorough
def test_modules_in_every_library():
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))

    policy = Policy(bits=2, recompute=Checkpoint("Block"))
    net = jaxact.compress(Block, policy=policy)()
    params = net.init(jax.random.key(0), X)
    rows = jaxact.residuals(net.apply, params, X).rows
    assert [row.key for row in rows] == ["Block/x"]

    class Layer(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.tanh(self.dense(nnx.tanh(self.dense(x))))

    module = jaxact.compress(Layer, policy=Policy(bits=2, recompute=Checkpoint()))()
    rows = jaxact.residuals(lambda m, x: m(x).sum(), module, X).rows
    assert [row.key for row in rows if not row.is_outside] == ["Layer/x"]


def test_is_saved():
    policy = Policy(recompute=(Checkpoint("a", save=SAVE.dots_saveable), Checkpoint()))
    text = json.dumps(policy.to_dict())
    assert Policy.from_dict(json.loads(text)) == policy
    assert hash(policy) == hash(Policy.from_dict(json.loads(text)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Policy(recompute="layer*"),
        lambda: Policy(recompute=""),
        lambda: Policy(recompute=(Checkpoint(), "layer*")),
        lambda: Checkpoint(3),
        lambda: Checkpoint(save="dots_saveable"),
    ],
)
def test_mistakes(make):
    with pytest.raises(TypeError, match="required, such as"):
        make()


def test_a_checkpoint_that_matches_no_call_is_told():
    policy = Policy(bits=2, recompute=(Checkpoint("layer1"), Checkpoint("Layer3")))
    with pytest.warns(jaxact.CompressionWarning) as told:
        jax.grad(network(compressed(policy)))(W, X)
    (message,) = [str(w.message) for w in told if "matched no call" in str(w.message)]
    assert "Checkpoint(path='Layer3'" in message
    assert "Did you mean path='layer2'" in message


def test_checkpoints_that_match_are_not_told(recwarn):
    several = (Checkpoint(key="layer0"), Checkpoint("layer1"), Checkpoint("layer2"))
    jax.grad(network(compressed(Policy(recompute=several))))(W, X)
    jax.grad(scanned(compressed(Policy(recompute=Checkpoint()))))(W, X)
    assert not [w for w in recwarn if "matched no" in str(w.message)]


def test_a_policy_like_one_before_is_not_told_about_what_is_computed_again(recwarn):
    """A saved plan's: the calls' own residuals were decided about in another trace."""
    calls = Checkpoint(key="layer0"), Checkpoint(key="layer1")
    keys = "layer0/tanh", "layer1/tanh", "layer0/x", "layer2/tanh"
    for _ in range(2):
        rules = tuple(Rule(Exact(), key=key) for key in keys)
        policy = Policy(rules=(*rules, Rule(Exact(), key="layer9")), recompute=calls)
        with jaxact.using(policy):
            loss = network(compressed(None))
            jax.jit(jax.grad(lambda w, x, loss=loss: loss(w, x)))(W, X)
    told = [str(w.message) for w in recwarn if "matched no residual" in str(w.message)]
    assert told and all("key='layer9'" in message for message in told)


def test_a_scan_over_keys():
    def layers(x, keys):
        step = lambda x, key: (jnp.tanh(x) * jax.random.uniform(key, x.shape), 0)
        return jax.lax.scan(step, x, keys)[0]

    keys = jax.random.split(jax.random.key(0), 3)
    small = compressed(Policy(recompute=SAVE.nothing_saveable), layers)
    table = jaxact.residuals(lambda x: small(x, keys).sum(), X)
    assert table.stored_bytes < table.exact_bytes

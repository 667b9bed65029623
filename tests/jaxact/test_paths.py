"""Every residual has a path and a key of its own, in every library and every trace."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Policy
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

WIDTH, LENGTH, BATCH, LAYERS = 64, 16, 8, 4
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
TWO_BITS = Policy(bits=2)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
        return self.out(jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs)
        self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


def gpt(block):
    class GPT(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            x = self.stem(x)
            for number in range(LAYERS):
                x = self.blocks[number](x)
            return self.head(x)

    return GPT


Small = jaxact.compress(Block, policy=TWO_BITS)
GPT = gpt(Small)
MODEL = GPT(nnx.Rngs(0))
# Of the residuals that are rounded: masks and statistics are exact.
KEYS_OF_ONE_LAYER = [
    "x",
    "attn/split[1]",
    "attn/split[0]",
    "attn/split[2]",
    "attn/exp",
    "attn/dot_general#1",
    "add",
    "mlp/mul#3",
    "mlp/derivative/mul#3",
]
KEYS = [f"GPT/blocks/{i}/{key}" for i in range(LAYERS) for key in KEYS_OF_ONE_LAYER]


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def rounded(fn, *args, **options):
    """The keys of the residuals that compressed calls round, in order."""
    rows = jaxact.residuals(fn, *args, **options).rows
    return [row.key for row in rows if row.bias is not jaxact.Bias.EXACT]


def test_a_module_has_its_attribute_path():
    assert rounded(loss, MODEL, X) == KEYS


@pytest.mark.parametrize(
    "transformed",
    [
        nnx.jit(loss),
        lambda model, x: jax.jit(loss)(model, x),
        lambda model, x: loss(nnx.merge(*nnx.split(model)), x),
    ],
    ids=["nnx.jit", "jax.jit", "split and merged"],
)
def test_keys_are_those_of_the_plain_program(transformed):
    assert rounded(transformed, MODEL, X) == KEYS


@thorough
def test_keys_are_the_same_in_a_checkpoint_and_for_each_micro_batch():
    checkpointed = nnx.remat(loss)
    both = lambda model, x: sum(checkpointed(model, part) for part in (x[:4], x[4:]))
    found = jaxact.sensitivity(both, MODEL, X, draws=1)
    assert [row.key for row in found.rows] == KEYS


@pytest.mark.parametrize("argnums", [0, (0, 1), 1])
def test_keys_do_not_depend_on_the_differentiated_arguments(argnums):
    """Where only x is differentiated, what the weights' gradients need is not kept."""
    keys = rounded(loss, MODEL, X, argnums=argnums)
    assert keys == (KEYS if argnums != 1 else [k for k in KEYS if k in keys])
    assert len(keys) > len(KEYS) / 2


def test_a_first_layer_has_the_keys_of_the_others():
    """Its input needs no gradient; its own operations are numbered alike."""
    twice = lambda model, x: loss(lambda x: model.blocks[1](model.blocks[0](x)), x)
    keys = rounded(twice, MODEL, X, argnums=0)
    first, second = (
        [k.split("/", 3)[3] for k in keys if f"/blocks/{i}/" in k] for i in range(2)
    )
    assert first == second == KEYS_OF_ONE_LAYER


def test_keys_do_not_depend_on_the_batch():
    shape = jax.ShapeDtypeStruct((3, 64, WIDTH), X.dtype)
    assert rounded(loss, MODEL, shape) == KEYS


@thorough
def test_allocation_tells_layers_apart():
    """And its prediction is the variance of the compressed model's gradient.

    The mean squared error of 8 gradients is known to about sqrt(2 / (8 n)), n being the
    number of independent errors in a gradient, at least one for each row: 7 % for 36
    rows, and as much for the prediction. The rest of the factor 1.5 is for what an
    allocation assumes: that variances add up.
    """
    measured = jaxact.sensitivity(loss, MODEL, X, draws=8)
    assert [row.key for row in measured.rows] == KEYS
    allocation = jaxact.allocate(measured, bits=3)
    bits = dict(allocation.bits)
    count = len(KEYS_OF_ONE_LAYER)
    layers = [tuple(bits[key] for key in KEYS[i::count]) for i in range(count)]
    assert any(len(set(layer)) > 1 for layer in layers), layers

    def gradients(policy, draws):
        rngs = nnx.Rngs(0, jaxact=1)  # its noise is another in every call
        model = gpt(jaxact.compress(Block, policy=policy))(rngs)
        gradient = nnx.jit(nnx.grad(loss))
        trees = [jax.tree.leaves(gradient(model, X)) for _ in range(draws)]
        return [np.concatenate([np.ravel(leaf) for leaf in tree]) for tree in trees]

    (exact,) = gradients(Policy(default=jaxact.Exact()), 1)
    rounded = gradients(allocation.policy(), 8)
    variance = np.mean([np.sum((g - exact) ** 2) for g in rounded])
    assert allocation.error / 1.5 < variance < allocation.error * 1.5


@pytest.mark.parametrize(
    "compress_inner, compress_outer",
    [(jaxact.compress, lambda c: c), (lambda c: c, jaxact.compress)]
    + [(jaxact.compress, jaxact.compress)],
    ids=["blocks", "model", "both"],
)
def test_the_compressed_class_does_not_change_paths(compress_inner, compress_outer):
    model = compress_outer(gpt(compress_inner(Block)))(nnx.Rngs(0))
    paths = {row.path for row in jaxact.residuals(loss, model, X).rows}
    assert {f"GPT/blocks/{i}/mlp/derivative" for i in range(LAYERS)} <= paths
    assert {f"GPT/blocks/{i}/attn" for i in range(LAYERS)} <= paths


def test_modules_without_a_known_holder_are_numbered():
    first, second = Small(nnx.Rngs(0)), Small(nnx.Rngs(1))
    keys = rounded(lambda a, b, x: jnp.sum(b(a(x))), first, second, X)
    names = collections.Counter(key.split("/")[0] for key in keys)
    assert names == dict.fromkeys(("Block", "Block_1"), len(KEYS_OF_ONE_LAYER))


class Layers(nnx.Module):
    """The containers of NNX, and one layer at two places."""

    def __init__(self, rngs):
        layer = lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.stem = nnx.Sequential(layer(), jnp.tanh, layer())
        self.table = nnx.Dict(a=layer())
        self.shared = layer()
        self.again = self.shared

    def __call__(self, x):
        x = self.table["a"](jnp.tanh(self.stem(x)))
        return jnp.tanh(self.again(jnp.tanh(self.shared(jnp.tanh(x)))))


def test_containers_and_shared_modules():
    table = jaxact.residuals(
        lambda m, x: m(x).sum(), jaxact.compress(Layers)(nnx.Rngs(0)), X
    )
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys)
    assert "Layers/stem/tanh" in keys


def on_two_lines(block, x):
    x = block(x)
    return block(x)


@pytest.mark.parametrize("twice", [on_two_lines, lambda block, x: block(block(x))])
def test_a_shared_block_has_one_path_and_a_key_for_each_call(twice):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.block = Small(rngs)

        def __call__(self, x):
            return twice(self.block, x)

    table = jaxact.residuals(loss, Tied(nnx.Rngs(0)), X)
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys)
    assert {"Tied/block/x", "Tied/block/x@call#1"} <= set(keys)
    assert {p.path for p in table.rows if p.key.endswith("@call#1")} <= {
        p.path for p in table.rows if "@" not in p.key
    }


def apply(layer, x):
    return layer(x)


def stacked(transform):
    class Stack(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(MLP, in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=LAYERS)(lambda r: make(r))(rngs)

        def __call__(self, x):
            return transform(self.layers, x)

    return Stack


@pytest.mark.parametrize(
    ("transform", "suffix"),
    [
        (nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry), "@scan"),
        (nnx.vmap(apply, in_axes=(0, None)), ""),
    ],
    ids=["scan", "vmap"],
)
def test_scanned_and_mapped_layers(transform, suffix):
    keys = rounded(loss, jaxact.compress(stacked(transform))(nnx.Rngs(0)), X)
    assert len(set(keys)) == len(keys)
    own = {f"Stack/layers/{key}{suffix}" for key in ("mul#3", "derivative/mul#3")}
    assert own <= set(keys)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.gelu(nn.Dense(WIDTH, name="up")(x))


class DecoratedBlock(nn.Module):
    @jaxact.compress
    @nn.compact
    def __call__(self, x):
        return x + nn.gelu(nn.Dense(WIDTH, name="up")(x))


@pytest.mark.parametrize("small", [jaxact.compress(LinenBlock), DecoratedBlock])
@pytest.mark.parametrize("wrap", [lambda c: c, nn.remat], ids=["plain", "remat"])
def test_linen_paths_are_whole_where_jax_traces_a_block_apart(wrap, small):
    block = wrap(small)

    class Stage(nn.Module):
        @nn.compact
        def __call__(self, x):
            return block(name="block")(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Stage(name="s1")(Stage(name="s0")(x))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    measured = jaxact.sensitivity(lambda v: net.apply(v, X).sum(), variables, draws=1)
    keys = [row.key.removeprefix("Net/") for row in measured.rows]
    own = ("x", "derivative/mul#3")
    assert keys == [f"s{i}/block/{key}" for i in range(2) for key in own]


@jax.tree_util.register_pytree_node_class
class Module:
    """A module as Equinox has them: a pytree with a method."""

    def __init__(self, weight):
        self.weight = weight

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    @jaxact.compress(activations="x")
    def __call__(self, x):
        return jnp.tanh(x @ self.weight)


WEIGHTS = [jnp.eye(WIDTH)] * 2


def chain(layers, x):
    for layer in layers:
        x = layer(x)
    return x.sum()


def test_methods_have_their_class_and_a_number():
    keys = rounded(chain, [Module(w) for w in WEIGHTS], X, argnums=0)
    assert keys == [
        f"{path}/{key}"
        for path in ("Module", "Module_1")
        for key in ("x", "tanh.derivative")
    ]


def test_functions_have_a_number_or_a_scope():
    layer = jaxact.compress(lambda x, w: jnp.tanh(x @ w), activations="x")

    def named(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                x = layer(x, w)
        return x.sum()

    plain = lambda ws, x: chain([lambda x, w=w: layer(x, w) for w in ws], x)
    own = ("x", "tanh.derivative")
    assert rounded(plain, WEIGHTS, X, argnums=0) == [
        key + call for call in ("", "@call#1") for key in own
    ]
    assert rounded(named, WEIGHTS, X, argnums=0) == [
        f"layer{i}/{key}" for i in range(2) for key in own
    ]


def test_values_of_one_kind_are_told_apart():
    @jaxact.compress(activations="x")
    def f(w, x):
        a, b, c = jnp.split(x @ w, 3, axis=-1)
        named = [checkpoint_name(jnp.sin(v), "sine") for v in (a, b)]
        inside = lambda carry, _: (jnp.tanh(carry @ w[:, :WIDTH]), None)
        for _ in range(2):
            c, _ = jax.lax.scan(inside, c, length=3)
        return (named[0] @ w).sum() + (named[1] @ w).sum() + c.sum()

    keys = rounded(f, jnp.ones((WIDTH, 3 * WIDTH)), X, argnums=0)
    assert len(set(keys)) == len(keys), keys
    assert {"sine", "sine#1"} <= set(keys)
    assert any(key.endswith("@scan#1") for key in keys)


def test_labels_are_not_seen():
    """They are for jaxact: no path, no message and no table shows one."""
    table = jaxact.residuals(loss, MODEL, X)
    assert not any("#" in row.path for row in table.rows)
    assert "/#" not in str(table) and "/#" not in str(table.by_path())


@thorough
def test_the_gradient_is_the_same():
    """Scopes and labels compute nothing."""
    model = gpt(jaxact.compress(Block, policy=Policy(default=jaxact.Exact())))
    plain, compressed = gpt(Block)(nnx.Rngs(0)), model(nnx.Rngs(0))
    wanted, found = (nnx.grad(loss)(m, X) for m in (plain, compressed))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

"""The residual table: provenance, bytes, and no residual lost."""

import io
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact import Exact, Policy, Quantize, Rule
from support.programs import PROGRAMS, each_program, kept_bytes


def mlp(p, x):
    hidden = checkpoint_name(jax.jit(jnp.matmul)(x, p["up"]), "hidden")
    with jax.named_scope("act"):
        hidden = jnp.tanh(hidden)
    return hidden @ p["down"]


P = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
X = jnp.ones((32, 64))


def test_provenance():
    small = jaxact.compress(mlp, policy=Policy(bits=2), activations="x")
    rows = jaxact.residuals(small, P, X).rows
    argument = next(row for row in rows if row.primitive == "")
    assert argument.path == "x"
    tanh = next(row for row in rows if row.path == "act")
    assert tanh.source.startswith("test_report.py:") and "(mlp)" in tanh.source
    assert (tanh.shape, tanh.exact_bytes) == ((32, 256), 32 * 256 * 4)
    assert tanh.stored_bytes == 32 * (256 // 4 + 4)
    assert (tanh.action, tanh.why) == (Quantize(2), "factor")
    assert (argument.action, argument.why) == (Quantize(2), "input")


@pytest.mark.parametrize("f", [jnp.tanh, jnp.sin, jax.nn.sigmoid, jax.nn.gelu])
def test_derivatives_are_where_their_function_is(f):
    def scoped(w, x):
        with jax.named_scope("Net/act"):
            return f(x @ w) @ w

    policy = Policy(bits=2)
    rows = jaxact.residuals(scoped, jnp.ones((64, 64)), X, policy=policy).rows
    computed = [row.path for row in rows if row.primitive]
    assert len(computed) == 2
    assert set(computed) <= {"Net/act", "Net/act/derivative"}


def test_names_are_found_through_calls():
    save = jax.checkpoint_policies.save_only_these_names("hidden")
    policy = Policy(bits=2, recompute=save)
    rows = jaxact.residuals(jaxact.compress(mlp, policy=policy), P, X).rows
    assert [row.name for row in rows] == ["hidden"]
    assert rows[0].primitive == "dot_general"


@each_program
def test_sizes_are_those_of_jax(program):
    args = program.arguments()
    for f in (program.f, jaxact.compress(program.f, activations="x")):
        table = jaxact.residuals(f, *args)
        assert table.stored_bytes == kept_bytes(f, *args)


EXACT_ARGUMENTS = Policy(rules=(Rule(Exact(), primitive=""),))
EXACT_FLOATS = Policy(rules=(Rule(Exact(), dtype="float32"),))


def scanned(f, params, x):
    """`f` as the body of a scan: the parameters stacked, `x` the carry."""

    def step(x, p):
        outputs = jax.tree.leaves(f(p, x))
        same = [y for y in outputs if y.shape == x.shape and y.dtype == x.dtype]
        return x + (same[0] if same else outputs[0].sum()), outputs[0].sum()

    return lax.scan(step, x, params)


@pytest.mark.filterwarnings("ignore:jaxact")  # a program without such a residual
@each_program
@pytest.mark.parametrize("policy", [EXACT_ARGUMENTS, EXACT_FLOATS, Policy()])
@pytest.mark.parametrize("activations", [None, "x"])
def test_sizes_under_scan_are_those_of_jax(program, policy, activations):
    p, x = program.arguments()
    layers = jax.tree.map(lambda a: jnp.stack([a] * 3), p)
    block = jaxact.compress(program.f, policy=policy, activations=activations)
    network = jax.jit(lambda p, x: scanned(block, p, x))
    table = jaxact.residuals(network, layers, x)
    assert table.stored_bytes == kept_bytes(network, layers, x)


def test_a_carry_kept_exactly_is_listed_as_an_argument():
    layers = jax.tree.map(lambda a: jnp.stack([a] * 3), P)
    block = jaxact.compress(mlp, policy=EXACT_ARGUMENTS, activations="x")
    network = jax.jit(lambda p, x: scanned(block, p, x))
    rows = jaxact.residuals(network, layers, X).rows
    (carry,) = [row for row in rows if row.primitive == ""]
    assert (carry.path, carry.shape) == ("carry", (3, *X.shape))
    assert carry.stored_bytes == carry.exact_bytes == 3 * X.nbytes
    assert carry.why == "a scan's carry, kept exactly for each step"


@pytest.mark.parametrize("action", [Quantize(4), Exact()], ids=["packed", "exact"])
def test_keys_tell_a_step_of_a_scan_from_what_is_around_it(action):
    """Both multiply an argument called x, and take a tanh, under no path."""
    policy = Policy(bits=4, rules=(Rule(action, path="carry"),))

    @jaxact.compress(policy=policy, activations=("x", "xs"))
    def f(w, x, xs):
        step = lambda c, x: (jnp.tanh(c @ w) + jnp.tanh(x @ w), None)
        c, _ = lax.scan(step, jnp.tanh(x @ w), xs)
        return lax.scan(step, c, jnp.sin(xs))[0].sum()

    table = jaxact.residuals(f, jnp.ones((64, 64)), X, jnp.stack([X] * 3), argnums=0)
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys), keys
    wanted = {"x", "x@scan", "carry@scan", "carry@scan#1", "tanh.derivative"}
    assert wanted <= set(keys), keys


def test_a_table_explains_unbiased_to_first_order():
    twice = lambda w, x: jax.nn.softmax((x @ w) @ (x @ w).T) @ x
    once = lambda w, x: jnp.tanh(x @ w)
    explained = "depends on the network, and nothing bounds it"
    for f, expected in ((twice, True), (once, False)):
        table = jaxact.residuals(f, jnp.ones((64, 64)), X, policy=Policy(bits=2))
        biases = {row.bias for row in table.rows}
        assert ("unbiased to first order" in biases) == expected
        text, page = " ".join(str(table).split()), table._repr_html_()
        assert (explained in text) == (explained in page) == expected


def test_scan_multiplies():
    layers = jax.tree.map(lambda a: jnp.stack([a] * 3), P)
    block = jaxact.compress(mlp, activations="x")
    network = lambda p, x: lax.scan(lambda x, p: (block(p, x), None), x, p)[0]
    one, three = jaxact.residuals(block, P, X), jaxact.residuals(network, layers, X)
    assert three.exact_bytes == 3 * one.exact_bytes
    assert three.stored_bytes == 3 * one.stored_bytes
    assert {row.shape[0] for row in three.rows} == {3}


def test_a_body_shared_by_several_calls_counts_each_time():
    block = jax.jit(jaxact.compress(mlp, activations="x"))
    network = lambda p, x: block(p, block(p, x))
    one, two = jaxact.residuals(block, P, X), jaxact.residuals(network, P, X)
    assert two.stored_bytes == 2 * one.stored_bytes
    jaxact.residuals(network, P, X)  # again, from JAX's caches
    assert jaxact.residuals(network, P, X).stored_bytes == two.stored_bytes


def test_vmap():
    small = jaxact.compress(mlp, activations="x")
    examples = jnp.stack([X, X])
    one = jaxact.residuals(small, P, X)
    batch = jaxact.residuals(jax.vmap(small, (None, 0)), P, examples)
    assert one.stored_bytes < batch.stored_bytes <= 2 * one.stored_bytes
    inner = jaxact.residuals(jax.vmap(jax.jit(small), (None, 0)), P, examples)
    has_rule = jax.__version_info__ >= (0, 12)  # for maps behind a jit
    expected = batch.stored_bytes if has_rule else 2 * one.stored_bytes
    assert inner.stored_bytes == expected


def test_linen_paths():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(256, name="up")(x)))

    class Net(nn.Module):
        block: type

        @nn.compact
        def __call__(self, x):
            return self.block(name="second")(self.block(name="first")(x))

    rule = Rule(Exact(), path="second/*")
    policy = Policy(bits=2, rules=(rule,))
    net = Net(jaxact.compress(Block, policy=policy))
    variables = net.init(jax.random.key(0), X)
    table = jaxact.residuals(lambda v, x: net.apply(v, x).sum(), variables, X)
    actions = {row.key: row.action for row in table.rows}
    sums = [key for key in actions if key.startswith("Net/first/add#")]
    assert [actions.pop(key) for key in sums] == [Exact()]  # the second's argument
    in_first = {a for key, a in actions.items() if "first" in key}
    in_second = {a for key, a in actions.items() if "second" in key}
    assert (in_first, in_second) == ({Quantize(2)}, {Exact()})
    at_up = [row.action for row in table.rows if row.path == "Net/second/up"]
    assert set(at_up) <= {Exact()}


def test_nnx_paths():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 256, rngs=rngs)

        def __call__(self, x):
            return nnx.gelu(self.up(x))

    block = jaxact.compress(Block)(nnx.Rngs(0))
    table = jaxact.residuals(lambda m, x: m(x).sum(), block, X)
    assert table == jaxact.residuals(lambda x, *, m: m(x).sum(), X, m=block)
    assert {row.path for row in table.rows if row.primitive} == {"Block/derivative"}


W = jnp.ones((64, 16))


def squares(w, x, step=None):
    return ((x @ w) ** 2).sum()


@pytest.mark.parametrize(
    "argnums, active",
    [(0, [0]), (1, [1]), (-2, [1]), ((0, -2), [0, 1]), (2, []), (None, [0, 1])],
)
def test_arguments_to_differentiate(argnums, active):
    """The oracle: what jax.vjp of the function of those arguments alone keeps."""
    args = (W, X, jnp.int32(7))

    def of_active(*values):
        full = list(args)
        for place, value in zip(active, values, strict=True):
            full[place] = value
        return squares(*full)

    table = jaxact.residuals(squares, *args, argnums=argnums)
    assert table.stored_bytes == kept_bytes(of_active, *(args[i] for i in active))
    # The gradient of a factor reads the other.
    assert table.referenced_bytes == sum(args[1 - i].nbytes for i in active)


def test_what_is_closed_over_is_differentiated_only_by_default():
    of_x = lambda x: squares(W, x)
    assert jaxact.residuals(of_x, X).referenced_bytes == W.nbytes + X.nbytes
    assert jaxact.residuals(of_x, X, argnums=0).referenced_bytes == W.nbytes


def test_what_a_custom_rule_closes_over_is_not_differentiated():
    """JAX refuses to, as the rule is for arguments."""
    rule = jax.custom_vjp(lambda x: x @ W)
    rule.defvjp(lambda x: (rule(x), None), lambda _, ct: (ct @ W.T,))
    table = jaxact.residuals(lambda x: jnp.square(rule(x)), X)
    assert table.stored_bytes == X.shape[0] * W.shape[1] * 4


def test_keyword_arguments_are_differentiated_only_by_default():
    of_x = lambda x, *, w: squares(w, x)
    assert jaxact.residuals(of_x, X, w=W).referenced_bytes == W.nbytes + X.nbytes
    assert jaxact.residuals(of_x, X, w=W, argnums=0).referenced_bytes == W.nbytes


def test_arguments_beside_nnx_modules():
    first, second = (nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(2))
    f = lambda x, a, b: b(a(x)).sum()
    read = [
        jaxact.residuals(f, X, first, second, argnums=n).referenced_bytes
        for n in range(3)
    ]
    kernel = 64 * 64 * 4
    # x is reached through both kernels; a's through b's, and with x; b's with a(x).
    assert read == [2 * kernel, kernel + X.nbytes, 0]


@pytest.mark.parametrize("argnums", [2, -3, (0, 2), "w"])
def test_arguments_that_there_are_not(argnums):
    with pytest.raises(ValueError, match="has 2 positional ones"):
        jaxact.residuals(squares, W, X, argnums=argnums)


def test_policy_argument_and_shapes_instead_of_arrays():
    shapes = jax.eval_shape(lambda: (P, X))
    table = jaxact.residuals(mlp, *shapes, policy=Policy(bits=2))
    assert table.stored_bytes < table.exact_bytes / 10
    assert jaxact.residuals(mlp, *shapes).ratio == 1


def test_forms():
    table = jaxact.residuals(jaxact.compress(mlp, activations="x"), P, X)
    text, page = table.text(full=True), table.html(full=True)
    for row in table.rows:
        assert row.source in text
    assert page.count("<tr>") == len(table.rows) + 1
    data = json.loads(json.dumps(table.to_dict()))
    assert (
        data["stored_bytes"]
        == table.stored_bytes
        == sum(row["stored_bytes"] for row in data["rows"])
    )
    assert data["rows"][0]["action"]["class"] == "Quantize"
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=io.StringIO())
    console.print(table)
    assert console.file.getvalue().split() == table.text(width=200).split()
    assert "Quantize" in text


def test_uncompressed_functions_are_listed_too():
    program = PROGRAMS[0]
    table = jaxact.residuals(program.f, *program.arguments())
    assert {row.why for row in table.rows} == {"not in a compressed call"}


def layered(ws, x):
    for number, w in enumerate(ws):
        with jax.named_scope(f"a_rather_long_name_of_a_network/layer{number}"):
            x = jnp.tanh(x @ w)
    return x + jnp.sin(x[:4]).sum() * jnp.cos(x[:2]).sum()


@pytest.mark.parametrize("width", [80, 100, 60])
def test_a_table_fits_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    ws, x = jnp.ones((4, 256, 256)), jnp.ones((512, 256))
    table = jaxact.residuals(layered, ws, x, policy=Policy(bits=2))
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == "key shape bits exact stored why".split()
    keys = {row.key for row in table.rows if row.shape == x.shape}
    # A key that is broken into lines can still be put together.
    parts = "".join(re.split("  +", line)[0] for line in lines[1:])
    assert len(keys) == 7 and all(key in parts for key in keys)
    assert [row.why for row in table.rows].count("local derivative") == 4


def test_rows_below_one_percent_share_a_line():
    ws, x = jnp.ones((4, 256, 256)), jnp.ones((512, 256))
    table = jaxact.residuals(layered, ws, x)
    large = [row for row in table.rows if row.exact_bytes >= 0.01 * table.exact_bytes]
    small = [row for row in table.rows if row not in large]
    assert len(small) > 1 and large
    text = table.text(width=200).splitlines()
    assert len(text) == 1 + len(large) + 1 + len(table.summary().splitlines())
    assert text[1 + len(large)].startswith(f"{len(small)} smaller ")
    full = table.text(full=True).splitlines()
    assert len(full) == 1 + len(table.rows) + len(table.summary().splitlines())


def test_offloaded_bytes_have_a_column():
    offload = Policy(rules=(Rule(jaxact.Offload(Quantize(4)), path="act"),))
    table = jaxact.residuals(
        jaxact.compress(mlp, policy=offload, activations="x"), P, X
    )
    on_host = [row for row in table.rows if row.path == "act"]
    size = 32 * 256 // 2 + 32 * 4  # codes, and two numbers for each group
    for row in on_host:
        assert (row.host_bytes, row.stored_bytes, row.device_bytes) == (size, size, 0)
        assert row.why == "rule path=act"
    stored = len(on_host) * size
    assert table.host_bytes == stored > 0
    titles = str(table).splitlines()[0].split()
    assert titles == "key shape bits exact stored host why".split()
    assert f"{stored / 1024:.4g} KiB on the host" in table.summary()
    without = jaxact.residuals(jaxact.compress(mlp, activations="x"), P, X)
    assert without.host_bytes == 0 and " host " not in str(without)


def test_bars_by_path():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ws, x = jnp.ones((4, 256, 256)), jnp.ones((512, 256))
    table = jaxact.residuals(layered, ws, x, policy=Policy(bits=2))
    axis = table.plot()
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert {f"a_rather_long_name_of_a_network/layer{i}" for i in range(3)} <= set(
        labels
    )
    stored = [bar.get_width() for bar in axis.containers[1] if bar.get_width()]
    large = stored[:-1] if "smaller" in labels[-1] else stored
    assert large == sorted(large, reverse=True)
    assert sum(stored) * 2**20 == pytest.approx(table.stored_bytes)
    axis.figure.canvas.draw()
    left = min(label.get_window_extent().x0 for label in axis.get_yticklabels())
    assert left >= 0, "a label is cut"

"""Versions of a step side by side: the numbers are those of JAX and of the tables."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxact
from jaxact import Policy
from jaxact._memory import Memory
from jaxact._report.step import count_products, step_program, step_residuals
from support.gpu_target import needs_target
from support.programs import each_program, kept_bytes
from support.variants import thorough

LAYERS, TOKENS, WIDTH, HIDDEN = 6, 512, 64, 256


def layer(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss_of(layer):
    def loss(ps, x):
        y, _ = lax.scan(lambda x, p: (layer(p, x), None), x, ps)
        return (y**2).mean()

    return loss


def step_of(layer, **options):
    def step(ps, x):
        value, grads = jax.value_and_grad(loss_of(layer))(ps, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads), value

    return jax.jit(step, **options)


SMALL = jaxact.compress(layer, activations="x")
NARROW = jaxact.compress(layer, activations="x", policy=Policy(bits=2))
VERSIONS = {
    "uncompressed": layer,
    "checkpoint": jax.checkpoint(layer),
    "4 bits": SMALL,
    "2 bits in a checkpoint": jax.checkpoint(NARROW),
}
P = {
    "up": jnp.ones((LAYERS, WIDTH, HIDDEN)),
    "down": jnp.ones((LAYERS, HIDDEN, WIDTH)),
}
X = jnp.ones((TOKENS, WIDTH))


@pytest.fixture(scope="module")
def found():
    return jaxact.compare({name: step_of(f) for name, f in VERSIONS.items()}, P, X)


@pytest.mark.parametrize("name", VERSIONS)
def test_residuals_of_a_step_are_those_of_its_loss(found, name):
    table = jaxact.residuals(loss_of(VERSIONS[name]), P, X)
    assert found[name].stored_bytes == table.stored_bytes
    assert found[name].residual_bytes == table.exact_bytes


@pytest.mark.parametrize("name", VERSIONS)
def test_memory_is_that_of_the_compiled_step(found, name):
    assert found[name].memory == jaxact.memory(step_of(VERSIONS[name]), P, X)


def test_products(found):
    """Forward, and two for each in backward; a checkpoint computes the first again."""
    products = {row.name: row.products for row in found.rows}
    assert products["uncompressed"] == products["4 bits"] == 6 * LAYERS
    assert products["checkpoint"] == 7 * LAYERS  # the second's result is not needed
    assert products["2 bits in a checkpoint"] > products["checkpoint"]


def test_products_in_branches_and_loops():
    def f(x):
        one = lambda x: x @ x
        x = lax.cond(x[0, 0] > 0, lambda x: one(one(x)), one, x)
        unused = x @ x.T  # noqa: F841
        x = lax.fori_loop(0, 5, lambda _, x: one(x), x)
        return lax.while_loop(lambda x: x[0, 0] > 0, one, jax.jit(one)(x))

    traced = jax.jit(f).trace(jnp.ones((8, 8)))
    assert count_products(step_program(traced.jaxpr)) == 2 + 5 + 1 + 1


@each_program
def test_stored_bytes_are_those_of_jax(program):
    args = program.arguments()
    scalar = lambda *args: sum(
        leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(program.f(*args))
    )
    traced = jax.jit(jax.grad(scalar, argnums=(0, 1))).trace(*args)
    table = step_residuals(step_program(traced.jaxpr))
    # JAX lists zeros too, which a program makes where it needs them.
    _, backward = jax.vjp(scalar, *args)
    zeros = [leaf for leaf in jax.tree.leaves(backward) if not np.any(leaf)]
    spared = sum({id(leaf): leaf.nbytes for leaf in zeros}.values())
    assert kept_bytes(scalar, *args) - spared <= table.stored_bytes
    assert table.stored_bytes <= kept_bytes(scalar, *args)


def test_gradients_inside_of_jit_and_of_microbatches():
    inner = jax.jit(jax.grad(loss_of(layer)))
    each = step_residuals(step_program(jax.jit(inner).trace(P, X).jaxpr))
    table = jaxact.residuals(loss_of(layer), P, X)
    assert each.stored_bytes == table.stored_bytes

    def accumulated(ps, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, inner(ps, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, ps), xs)[0]

    traced = jax.jit(accumulated).trace(P, jnp.stack([X] * 4))
    found = step_residuals(step_program(traced.jaxpr))
    assert found.stored_bytes == table.stored_bytes


def test_arguments_that_are_not_donated():
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(P))
    steps = {"kept": step_of(SMALL), "donated": step_of(SMALL, donate_argnums=0)}
    found = jaxact.compare(steps, P, X)
    assert found["kept"].donatable_bytes == weights
    assert found["donated"].donatable_bytes == 0
    aliases = [row.memory.alias_bytes for row in found.rows]
    assert aliases == [0, weights]
    alone = jaxact.compare({"kept": steps["kept"]}, P, X)
    text = " ".join(str(alone).split())
    assert f"{weights >> 10} KiB of arguments are not donated" in text
    assert "not donated" not in str(found)  # the last step is described


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit, lambda step: step])
def test_steps_of_nnx_modules(jit):
    model = nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0))
    loss = lambda model, x: (model(x) ** 2).mean()
    step = jit(lambda model, x: nnx.value_and_grad(loss)(model, x))
    (row,) = jaxact.compare({"step": step}, model, X).rows
    assert row.products == 2  # forward, and the kernel's gradient
    assert row.stored_bytes == jaxact.residuals(loss, model, X, argnums=0).stored_bytes


def test_gradients_at_the_peak():
    """The norm of a gradient needs all of it before the first update."""

    def step(ps, x):
        grads = jax.grad(loss_of(layer))(ps, x)
        norm = sum((g**2).sum() for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda p, g: p - g / norm, ps, grads)

    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(P))
    few = X[:2]  # so that little else lives
    (row,) = jaxact.compare({"step": jax.jit(step, donate_argnums=0)}, P, few).rows
    assert weights <= row.gradient_bytes < 1.5 * weights


def test_cotangents_are_no_gradients():
    """Of a network whose input has its own arrays' type."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**3).sum()

    x, ws = jnp.ones((4 * WIDTH, WIDTH)), [jnp.eye(WIDTH)] * 4
    found = jaxact.compare({"step": jax.grad(loss)}, ws, x)
    assert found.rows[0].gradient_bytes == 0
    assert "of gradients" not in str(found)


def test_the_largest_array_is_named():
    words = 4096

    def loss(p, x):
        with jax.named_scope("head"):
            return -jax.nn.log_softmax(x @ p)[:, 0].mean()

    found = jaxact.compare({"step": jax.grad(loss)}, jnp.ones((WIDTH, words)), X)
    text = " ".join(str(found).split())
    assert f"the largest array is f32[{TOKENS},{words}], 8 MiB: head/" in text
    assert "test_compare.py:" in text


def test_with_a_predicted_time_names_stay_whole_in_80_columns(found):
    rows = (dataclasses.replace(row, predicted_seconds=1e-3) for row in found.rows)
    timed = jaxact.Comparison(tuple(rows))
    brief, full = timed.text(width=80), timed.text(full=True)
    assert all(len(line) <= 80 for line in brief.splitlines())
    assert "\nuncompressed " in brief and "predicted" in brief
    assert "compile" not in brief.splitlines()[0] and "compile" in full.splitlines()[0]


def test_steps_that_store_less_and_take_no_less():
    def row(name, stored, temp):
        memory = Memory(temp, 0, 0, 0, "somewhere")
        return jaxact.ComparedStep(name, 100, stored, 1, 0.0, 0, memory, ())

    rows = row("plain", 100, 50), row("good", 20, 30), row("bad", 20, 50)
    table = jaxact.Comparison(rows)
    (message,) = table.warnings()
    assert message.startswith("'bad' stores 20 B of residuals where 'plain' stores")
    assert message in table.summary()


def test_it_warns():
    """Residuals that the forward pass holds anyway save nothing: the output is kept."""
    f = lambda x: (jnp.sin(x).sum(), jnp.cos(x))
    small = jaxact.compress(f)
    step = lambda f: lambda x: jax.value_and_grad(f, has_aux=True)(x)
    steps = {"plain": step(f), "small": step(small)}
    with pytest.warns(jaxact.CompressionWarning, match="'small' stores .* no less"):
        jaxact.compare(steps, jnp.ones((256, 256)))


def test_forms(found, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(found).splitlines()
    titles = "step residuals stored temp peak products compile"
    assert lines[0].split() == titles.split()
    assert max(map(len, lines)) <= 80
    data = json.loads(json.dumps(found.to_dict()))
    assert jaxact.Comparison.from_dict(data) == found
    with pytest.raises(KeyError):
        found["another"]


@thorough
@needs_target
def test_for_a_target():
    found = jaxact.compare(
        {"plain": step_of(layer), "4 bits": step_of(SMALL)}, P, X, target="RTX 4090"
    )
    assert {row.memory.device for row in found.rows} == {"NVIDIA GeForce RTX 4090"}
    assert found["4 bits"].memory.temp_bytes < found["plain"].memory.temp_bytes / 2
    # The products of all layers, forward and twice backward, at the peak of TF32.
    least = 3 * LAYERS * 2 * (2 * TOKENS * WIDTH * HIDDEN) / 82.6e12
    assert all(row.predicted_seconds > least for row in found.rows)
    assert "predicted" in str(found)


@pytest.mark.parametrize("steps", [layer, [layer], {"a": 3}, {}])
def test_steps_that_are_none(steps):
    with pytest.raises(TypeError, match="jaxact.compare.*required"):
        jaxact.compare(steps, P, X)

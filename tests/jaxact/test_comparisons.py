"""Masks are packed from a value that is in memory, and say what they said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Bitmask, Exact, Policy, Rule
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target
from support.programs import assert_same_bits, relative_error

ROWS, WIDTH = 64, 128
FINITE = np.array([0.0, -0.0, 2e-5, -2e-5, 0.5, -1])
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, *FINITE])
pytestmark = [
    pytest.mark.unoptimized,
    # Some programs have no residuals but masks, for which the rule is none.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

# Each reads a ReLU's output, or its input, in another way.
PROGRAMS = {
    "a product reads the output": lambda x, w: jax.nn.relu(x * 2) @ w,
    "the output is the result": lambda x, w: jax.nn.relu(x * 2),
    "a later residual join reads it": lambda x, w: (
        jax.nn.relu(x * 2) + (jax.nn.relu(x * 3) @ w)
    ),
    "a product reads the input": lambda x, w: jax.nn.relu(x @ w) @ w + x @ w,
    "nothing has it in memory": lambda x, w: jax.nn.relu(x * 2).sum(0),
    "another number": lambda x, w: jnp.where(x @ w > 1.5, x @ w, 0) @ w,
    "a mask for another ReLU": lambda x, w: (
        jnp.where(x * 2 > 0.5, jnp.maximum(x * 2, 0), 1) @ w
    ),
    "a number on the left": lambda x, w: jnp.where(0 < x @ w, x @ w, 0) @ w,
    "less": lambda x, w: jnp.where(x @ w < 0, x @ w, 0) @ w,
    "in a scan": lambda x, w: jax.lax.scan(
        lambda c, _: (jax.nn.relu(c @ w) * 0.1, None), x, None, 3
    )[0],
}
each_program = pytest.mark.parametrize("name", PROGRAMS)


def arguments(dtype=jnp.float32, values=FINITE):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(n) for n in ((ROWS, WIDTH), (WIDTH, WIDTH)))
    x[:, : len(values)] = values
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def gradients(f, x, w, policy=None):
    f = jaxact.compress(f, policy=policy, activations="x") if policy else f
    out = jax.eval_shape(f, x, w)
    ct = jnp.ones(out.shape, out.dtype)
    return jax.jit(lambda *args: jax.vjp(f, *args)[1](ct))(x, w)


def floats_exact():
    return Policy(rules=(Rule(Exact(), where=lambda r: r.dtype != bool),))


@each_program
def test_gradients_are_those_without_packing(name):
    f = lambda x, w: PROGRAMS[name](x, w)
    x, w = arguments()
    pairs = zip(gradients(f, x, w, floats_exact()), gradients(f, x, w), strict=True)
    # Sums over at most 128 products, in another order; one wrong bit of a mask is a
    # hundredth of a gradient.
    assert all(
        relative_error(a, b) < 1e-5 if b.any() else not a.any() for a, b in pairs
    )


@each_program
def test_masks_are_packed(name):
    f = lambda x, w: PROGRAMS[name](x, w)
    small = jaxact.compress(f, policy=floats_exact(), activations="x")
    rows = jaxact.residuals(small, *arguments()).rows
    assert any(isinstance(row.action, Bitmask) for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_number_and_infinities(dtype):
    f = lambda x, w: jax.nn.relu(x * 2) + w[:1].sum()
    x, w = arguments(jnp.dtype(dtype), SPECIAL)
    assert_same_bits(gradients(f, x, w, floats_exact()), gradients(f, x, w))
    (of_x, _) = gradients(f, x, w, floats_exact())
    assert of_x[0, : len(SPECIAL)].tolist() == [0, 0, 2, 0, 0, 0, 2, 0, 2, 0]


# JAX 0.10 asks in these two for a derivative of packing, which says that it has none.
PACKED_TWICE = {"in a scan", "a later residual join reads it"}


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in PACKED_TWICE])
def test_second_derivatives(name):
    f = lambda x, w: jnp.sin(PROGRAMS[name](x, w)).sum()
    x, w = arguments(values=FINITE[2:])  # at zero a ReLU has none
    small = jaxact.compress(f, policy=floats_exact(), activations="x")
    along = lambda f: jax.jvp(jax.grad(lambda x: f(x, w)), (x,), (x,))
    of_gradient = lambda f: jax.grad(lambda x: jax.grad(f)(x, w).sum())(x)
    for second in along, of_gradient:
        assert relative_error(second(small), second(f)) < 1e-4  # large angles of a sine


def test_examples_of_a_batch_have_their_own():
    f = lambda x, w: jax.nn.relu(x * 2) @ w
    x, w = arguments()
    xs = jnp.stack([x, -x, 2 * x])
    small = jaxact.compress(f, policy=floats_exact(), activations="x")
    each = lambda f: jax.vmap(lambda x: jax.grad(lambda x: f(x, w).sum())(x))
    assert_same_bits(jax.jit(each(small))(xs), jax.jit(each(f))(xs))


@needs_target
def test_a_gpu_reads_the_output_and_writes_no_booleans():
    def network(p, x):
        for w in p:
            x = jax.nn.relu(x @ w[1:] + w[:1])
        return x

    def step(p, x):
        small = jaxact.compress(network, activations=1)
        return jax.grad(lambda p, x: small(p, x).astype(jnp.float32).sum())(p, x)

    p = [jax.ShapeDtypeStruct((513, 512), jnp.bfloat16)] * 3
    x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
    text = compile_step(step, (p, x), {}, "h100").as_text()
    entry = text[text.index("\nENTRY ") :]
    assert entry.count("/mask_encode/pallas_call") >= 3
    assert "pred[8192,512]" not in entry

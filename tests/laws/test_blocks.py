"""What holds for the blocks of the networks that people train."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize, Rule
from support.blocks import BLOCKS, each_block
from support.programs import assert_same_bits, relative_error
from support.variants import thorough

# A node's stored value is both what is mixed and what the weights are computed from, so
# its rounding is squared: see the last test.
USED_TWICE = {"graph_attention"}


def compressed(block, policy):
    return jaxact.compress(block.f, policy=policy, activations=1)


LEVEL0 = {"xla_backend_optimization_level": 0}
BY_NAME = {block.name: block for block in BLOCKS}


def table(block):
    return table_of(block.name)


@functools.cache
def table_of(name):
    block = BY_NAME[name]
    args = jax.eval_shape(block.arguments)
    return jaxact.residuals(compressed(block, Policy(bits=2)), *args)


def elements(rows, action):
    return sum(math.prod(r.shape) for r in rows if isinstance(r.action, action))


@each_block
def test_stores_few_arrays(block):
    assert elements(table(block).rows, Quantize) <= block.most_stored


@each_block
def test_the_rest_is_bits_and_statistics(block):
    rows = [r for r in table(block).rows if not isinstance(r.action, Quantize)]
    kinds = {type(r.action).__name__ for r in rows}
    assert kinds <= {"Bitmask", "Bitfield", "Exact"}
    bits = [r for r in rows if r.dtype.kind in "bu"]  # a max-pool's index is unsigned
    statistics = [r for r in rows if r.dtype.kind not in "bu"]
    # Two masks of a bit an element; rows too short to be packed are a byte an element.
    assert sum(r.stored_bytes for r in bits) <= 2 * block.most_stored / 8
    # Rows of statistics are 32 times smaller than the largest array, and few.
    assert sum(r.stored_bytes for r in statistics) <= block.most_stored / 4


@each_block
def test_every_row_says_what_it_does_to_gradients(block):
    said = {type(r.action): set() for r in table(block).rows}
    for row in table(block).rows:
        said[type(row.action)].add(row.bias)
    # Used once; or twice on one path, as by a softmax or a norm.
    assert said.pop(Quantize) <= {"unbiased", "unbiased to first order"}
    assert all(biases == {"exact"} for biases in said.values())


def test_a_gelu_can_be_recomputed_from_its_input():
    block = BY_NAME["transformer"]
    tokens, width, hidden = 2 * 64, 128, 512
    is_hidden = lambda r: r.shape[-1] == hidden and r.primitive != "dot_general"
    policy = Policy(bits=2, rules=(Rule(jaxact.Recompute(), where=is_hidden),))
    args = jax.eval_shape(block.arguments)
    rows = jaxact.residuals(compressed(block, policy), *args).rows
    weights = 4 * 64
    assert elements(rows, Quantize) <= tokens * (10 * width + weights)
    source = [r for r in rows if r.shape[-1] == hidden]
    assert [(r.primitive, r.bias) for r in source] == [("dot_general", "biased")]


def normal(seed, shape):
    """By NumPy: a generator in each program would take longer to compile than it."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weighted(f, out):
    """A scalar that is linear in the output: its gradient reads no output."""
    weights = jnp.asarray(normal(5, out.shape), out.dtype)
    return lambda *args, **kwargs: (f(*args, **kwargs) * weights).sum()


@each_block
def test_outputs_keep_their_bits_and_exact_gradients_their_value(block):
    args = block.arguments()
    out = jax.eval_shape(block.f, *args)
    exact = Rule(Exact(), where=lambda r: True)
    forward = lambda f: lambda args: jax.vjp(f, *args)[0]
    gradient = lambda f: lambda args: jax.grad(weighted(f, out), (0, 1))(*args)

    def outputs(args):
        packed = compressed(block, Policy(bits=2))
        return forward(block.f)(args), forward(packed)(args)

    def gradients(args):
        kept = compressed(block, Policy(bits=2, rules=(exact,)))
        return gradient(kept)(args), gradient(block.f)(args)

    # Fusions may contract a * b + c; without them every operation is the same one. Each
    # in its own program: beside its gradient a U-Net has other bits, compressed or not.
    assert_same_bits(*jax.jit(outputs, compiler_options=LEVEL0)(args))
    # A cell multiplies slopes in another order than JAX: some roundings for each of up
    # to twenty equations, in sums over thousands of elements; of 2**-8 in bfloat16.
    bound = 2.0**-6 if block.name == "norms_in_float32" else 1e-5
    found = jax.jit(gradients, compiler_options=LEVEL0)(args)
    assert relative_error(*found) < bound


def draw(block, bits, draws):
    """Two projections of each gradient for many rounding keys, and the true ones."""
    args = block.arguments()
    loss = functools.partial(weighted, out=jax.eval_shape(block.f, *args))
    small = compressed(block, Policy(bits=bits))
    directions = jax.tree.map(
        lambda leaf: normal(9 + leaf.size, (2, *leaf.shape)), args
    )

    # Convolutions alone run longer unoptimized than optimizing takes.
    options = {} if len(block.x_shape) == 4 else LEVEL0

    # Arguments are passed: XLA would evaluate what depends on constants alone.
    @functools.partial(jax.jit, compiler_options=options)
    def run(keys, args, directions):
        def project(f, **kwargs):
            gradient = jax.grad(lambda args: loss(f)(*args, **kwargs))(args)
            along = jax.vmap(lambda y, x: (x * y).sum(), (0, None))
            return jnp.stack(jax.tree.leaves(jax.tree.map(along, directions, gradient)))

        drawn = jax.lax.map(lambda key: project(small, rounding_key=key), keys)
        return drawn, project(block.f)

    keys = jax.random.split(jax.random.key(1), draws)
    return map(np.asarray, run(keys, args, directions))


# Of what a width changes, the exponentials' extra bit and the size of a step, three
# blocks have all.
ALL_KINDS = {"transformer", "unet", "lstm"}
WIDTHS = {1: ALL_KINDS, 2: BY_NAME, 4: ALL_KINDS}


@thorough
@pytest.mark.parametrize(
    "block, bits",
    [
        pytest.param(
            block,
            bits,
            marks=() if bits == 2 else pytest.mark.slow,
            id=f"{block.name}-{bits}",
        )
        for bits, names in WIDTHS.items()
        for block in BLOCKS
        if block.name in names and block.name not in USED_TWICE
    ],
)
def test_gradients_are_unbiased(block, bits):
    """z-tests of random projections of the whole gradient over 256 rounding keys."""
    draws = 256
    drawn, truth = draw(block, bits, draws)
    error = drawn.std(0, ddof=1) / draws**0.5
    # |z| > 5.5 has probability 4e-8 for a normal mean: with 500 projections over all
    # blocks and widths a false alarm has probability below 1e-4. Projections that no
    # rounding reaches agree to the float32 rounding of their sums.
    slack = 1e-5 * abs(truth).max()
    assert (abs(drawn.mean(0) - truth) <= 5.5 * error + slack).all()


@thorough
@pytest.mark.parametrize("name", sorted(USED_TWICE))
def test_what_is_used_twice_has_less_bias_than_a_tenth_of_its_noise(name):
    """At the default bits; the mean of 2048 draws is known to 5.5 / sqrt(2048)."""
    draws = 2048
    drawn, truth = draw(BY_NAME[name], 4, draws)
    limit = (0.1 + 5.5 / draws**0.5) * drawn.std(0, ddof=1)
    slack = 1e-5 * abs(truth).max()
    assert (abs(drawn.mean(0) - truth) <= limit + slack).all()

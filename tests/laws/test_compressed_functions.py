"""What holds for every compressed function, whatever it computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as save

import jaxact
from jaxact import Exact, Offload, Policy, Quantize, Rule
from support.programs import (
    PROGRAMS,
    assert_same_bits,
    each_program,
    relative_error,
    same_bits,
    scalar,
)
from support.variants import thorough

POLICIES = {
    "8 bits": Policy(bits=8),
    "nothing saved": Policy(bits=4, recompute=save.nothing_saveable),
    "dots saved": Policy(bits=8, recompute=save.dots_saveable),
    "offload": Policy(default=Offload(Quantize(8))),
    "exact": Policy(default=Exact()),
}
BY_NAME = {program.name: program for program in PROGRAMS}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


# "nothing saved" leaves some of these programs with nothing to compress, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning")


def op_by_op(f, args):
    """`f` as its primitives: eagerly, JAX fuses those of some jnp functions."""
    flat, tree = jax.tree.flatten(args)
    on_arrays = lambda *flat: f(*jax.tree.unflatten(tree, flat))
    closed, out = jax.make_jaxpr(on_arrays, return_shape=True)(*flat)

    def run(*args):
        values = jax.core.eval_jaxpr(
            closed.jaxpr, closed.consts, *jax.tree.leaves(args)
        )
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return run


def forward(f, args):
    """What `f` returns, and what it returns on the way to a gradient."""
    run = jax.jit(f), jax.jit(lambda *args: jax.vjp(f, *args)[0])
    return [g(*args) for g in run]


@functools.cache
def plain_forward(name):
    program = BY_NAME[name]
    return forward(program.f, program.arguments())


@each_policy
@each_program
def test_forward_is_bit_identical(program, policy):
    small = jaxact.compress(program.f, policy=policy, activations="x")
    got, of_vjp = forward(small, program.arguments())
    wanted, of_plain_vjp = plain_forward(program.name)
    assert_same_bits(got, wanted)
    if policy.recompute is None:
        assert_same_bits(of_vjp, of_plain_vjp)
    else:
        # What a checkpoint keeps bounds XLA's fusions, which contract a * b + c: the
        # program is the same, op by op, and a fused sum may differ in its last bits.
        assert relative_error(of_vjp, of_plain_vjp) < 1e-6


@each_program
def test_eager_forward_is_bit_identical(program):
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(bits=2), activations="x")
    assert_same_bits(small(*args), program.f(*args))
    plain = op_by_op(program.f, args)
    assert_same_bits(jax.vjp(small, *args)[0], jax.vjp(plain, *args)[0])


@pytest.mark.parametrize("activation", [jax.nn.squareplus, jax.nn.mish, jax.nn.gelu])
def test_eager_forward_of_jitted_functions_is_bit_identical(activation):
    # Each is one jitted function, which eager JAX compiles as a whole: its operations
    # one by one round some elements of squareplus otherwise.
    f = lambda w, x: activation(x @ w)
    keys = jax.random.split(jax.random.key(3))
    args = jax.random.normal(keys[0], (64, 64)), jax.random.normal(keys[1], (64, 64))
    small = jaxact.compress(f, activations="x")
    assert_same_bits(jax.vjp(small, *args)[0], f(*args))


def in_step(f, args):
    """What `f` returns beside its gradient in one jitted program."""

    def loss(*args):
        out = f(*args)
        return jnp.sin(out).sum(), out

    (_, out), _ = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)
    return out


def grouped_norm_of_rms_norm(scales, x):
    rms = jax.lax.rsqrt((x**2).mean(1, keepdims=True) + 1e-6)
    groups = (x * (rms * scales[0])).reshape(len(x), 8, -1)
    mean = groups.mean(2, keepdims=True)
    variance = jnp.maximum(0, (groups**2).mean(2, keepdims=True) - mean**2)
    of_channels = lambda v: jnp.broadcast_to(v, groups.shape).reshape(x.shape)
    centered = groups.reshape(x.shape) - of_channels(mean)
    return centered * (jax.lax.rsqrt(of_channels(variance) + 1e-6) * scales[1])


@pytest.mark.parametrize("shape", [(12, 64), (4, 192), (6, 128)])
def test_forward_of_two_norms_is_bit_identical(shape):
    # A program that returns the groups' sums, not their means, changes half the bits.
    keys = jax.random.split(jax.random.key(5))
    scales = 1 + jax.random.normal(keys[0], (2, 1, shape[1])) / 8
    args = scales, jax.random.normal(keys[1], shape)
    small = jaxact.compress(grouped_norm_of_rms_norm, activations="x")
    assert_same_bits(in_step(small, args), jax.jit(grouped_norm_of_rms_norm)(*args))


def product(x):
    return jnp.cos(x) * x


RUN_ONCE = {
    "cond": lambda x: jax.lax.cond(True, product, jnp.sin, x),
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, product, jnp.tanh], x),
    "index of a jit": lambda x: jax.jit(
        lambda i: jax.lax.switch(i, [jnp.sin, product], x)
    )(1),
    "condition of a jit": lambda x: jax.jit(
        lambda b: jax.lax.cond(b, product, jnp.sin, x)
    )(True),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 1, lambda _, x: product(x), x),
    "map": lambda x: jax.lax.map(product, x[None])[0],
}


@pytest.mark.parametrize("run", RUN_ONCE.values(), ids=RUN_ONCE)
def test_forward_of_what_runs_once_is_bit_identical(run):
    # XLA contracts its last product with the sum, unless that is packed with the rest.
    keys = jax.random.split(jax.random.key(6))
    x = jax.random.normal(keys[1], (64, 64))
    args = jax.random.normal(keys[0], (64, 64)) / 8, x
    with_sum = lambda h: run(h) + 0.1 * h[::-1]
    f = lambda w, x: with_sum(x @ w)
    small = jaxact.compress(f, activations="x")
    assert_same_bits(in_step(small, args), jax.jit(f)(*args))
    assert "@" not in str(jaxact.residuals(small, *args))


@each_program
def test_exact_gradients_are_bit_identical(program):
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(default=Exact()), activations="x")
    gradient = lambda f: jax.grad(scalar(f), (0, 1))
    assert_same_bits(
        jax.jit(gradient(small))(*args), jax.jit(gradient(program.f))(*args)
    )
    plain = op_by_op(program.f, args)
    assert_same_bits(gradient(small)(*args), gradient(plain)(*args))


@pytest.mark.unoptimized
@each_program
def test_eight_bit_gradients_are_close(program):
    # 8 bits: noise of one residual is at most range / 255 / 2, a few per mille of its
    # norm; chains of up to six residuals stay within a few percent.
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(bits=8), activations="x")
    gradient = lambda f: jax.jit(jax.grad(scalar(f), (0, 1)))(*args)
    assert relative_error(gradient(small), gradient(program.f)) < 0.05


@pytest.mark.unoptimized
@each_program
def test_gradients_repeat_to_the_bit(program):
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(bits=2), activations="x")
    step = jax.jit(jax.grad(scalar(small)))
    assert_same_bits(step(*args), step(*args))
    key = jax.random.key(3)
    keyed = jax.jit(jax.grad(lambda p, x: scalar(small)(p, x, rounding_key=key)))
    assert_same_bits(keyed(*args), keyed(*args))
    assert not same_bits(step(*args), keyed(*args))


@pytest.mark.unoptimized
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.is_linear_in_residuals], ids=lambda p: p.name
)
def test_unbiased(program, bits):
    """z-test of random projections of the gradient over rounding keys."""
    draws, projections = 256, 4
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(bits=bits), activations="x")
    weights = program.arguments(seed=1)[0]
    out = jax.eval_shape(program.f, *args)
    leaves = [y for y in jax.tree.leaves(out) if y.dtype == jnp.float32]
    signs = [
        jnp.sign(jax.random.normal(jax.random.key(i), y.shape))
        for i, y in enumerate(leaves)
    ]

    def linear_loss(f, **kwargs):  # a smooth loss would reuse the exact output
        def loss(p):
            ys = jax.tree.leaves(f(p, args[1], **kwargs))
            floats = [y for y in ys if y.dtype == jnp.float32]
            return sum((y * s).sum() for y, s in zip(floats, signs, strict=True))

        return jax.grad(loss)(args[0])

    def project(gradient):
        products = jax.tree.map(lambda g, w: g * w, gradient, weights)
        flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(products)])
        return (
            flat[: flat.size // projections * projections]
            .reshape(projections, -1)
            .sum(1)
        )

    keys = jax.random.split(jax.random.key(11), draws)
    sample = lambda key: project(linear_loss(small, rounding_key=key))
    drawn = np.asarray(jax.jit(lambda keys: jax.lax.map(sample, keys))(keys))
    truth = np.asarray(jax.jit(lambda: project(linear_loss(program.f)))())
    error = drawn.std(0, ddof=1) / draws**0.5
    z = (drawn.mean(0) - truth) / np.where(error > 0, error, 1.0)
    # |z| > 5.5 has probability 4e-8 for a normal mean; about 100 projections are
    # tested, so a false alarm has probability below 1e-5. The float32 sums are exact
    # to 1e-6 of their largest value.
    slack = 1e-5 * abs(truth).max() / np.where(error > 0, error, 1.0)
    assert (abs(z) < 5.5 + slack).all(), z


@pytest.mark.unoptimized
@each_program
def test_residuals_shrink(program):
    args = program.arguments()
    small = jaxact.compress(program.f, policy=Policy(bits=2), activations="x")
    table = jaxact.residuals(small, *args)
    if program.name == "branches":
        assert table.stored_bytes < table.exact_bytes
    else:
        assert table.ratio > 3


@thorough
@pytest.mark.unoptimized
def test_rules_reach_every_program():
    for_all = Rule(Exact(), where=lambda residual: True)
    for program in PROGRAMS:
        args = program.arguments()
        policy = Policy(bits=2, rules=(for_all,))
        small = jaxact.compress(program.f, policy=policy, activations="x")
        gradient = lambda f, args=args: jax.jit(jax.grad(scalar(f)))(*args)
        # Cells multiply slopes in another order than JAX: a few roundings each.
        bound = 2.0**-6 if program.name == "bfloat16" else 1e-5
        assert relative_error(gradient(small), gradient(program.f)) < bound, program

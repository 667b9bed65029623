"""Compressed functions under the transformations of JAX."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import checkpoint_policies as save, lax

import jaxact
from jaxact import Policy, Quantize, Rule
from support.programs import (
    PROGRAMS,
    assert_same_bits,
    kept_bytes,
    relative_error,
    scalar,
)

pytestmark = pytest.mark.unoptimized

BY_NAME = {program.name: program for program in PROGRAMS}
MLP = BY_NAME["gelu_mlp"]
compress = functools.partial(jaxact.compress, policy=Policy(bits=8), activations="x")
CLOSE = 0.05  # relative error of 8-bit gradients; see test_compressed_functions


@pytest.fixture
def args():
    return MLP.arguments()


@pytest.mark.parametrize("name", ["dense", "gelu_mlp", "conv_relu", "recurrent"])
def test_vmap_of_gradient_is_a_loop(name):
    program = BY_NAME[name]
    p, x = program.arguments()
    xs = jnp.stack([x, 2 * x, x - 1])
    gradient = jax.jit(jax.grad(scalar(compress(program.f))))
    mapped = jax.jit(jax.vmap(gradient, (None, 0)))(p, xs)
    loop = [gradient(p, x) for x in xs]
    looped = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop)
    # The same noise, except where a batched matmul's last bit changes the metadata of
    # a group and with it the group's noise; all other noise would give 1e-2.
    assert relative_error(mapped, looped) < 2e-3


def test_gradient_of_vmap(args):
    p, x = args
    xs = jnp.stack([x, 2 * x])

    def loss(f):
        return lambda p: jax.vmap(scalar(f), (None, 0))(p, xs).sum()

    small, exact = jax.grad(loss(compress(MLP.f)))(p), jax.grad(loss(MLP.f))(p)
    assert relative_error(small, exact) < CLOSE


@pytest.mark.parametrize("activations", [1, None, "x"])
def test_vmap_with_an_output_that_ignores_the_mapped_argument(activations):
    def f(w, x):
        return jnp.tanh(x @ w), (w**2).sum()

    w = jnp.full((64, 64), 0.1)
    xs = jax.random.normal(jax.random.key(0), (4, 8, 64))

    def loss(f):
        def total(w):
            y, penalty = jax.vmap(f, (None, 0), (0, None))(w, xs)
            return (y**2).sum() + penalty

        return jax.grad(total)(w)

    small = jaxact.compress(f, policy=Policy(bits=8), activations=activations)
    assert relative_error(loss(small), loss(f)) < CLOSE


@pytest.mark.parametrize("whole", [False, True], ids=["in the body", "around the scan"])
def test_scan_stacks_packed_residuals(args, whole):
    p, x = args
    layers = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a, 0.8 * a]), p)

    def network(block):
        return lambda p, x: lax.scan(lambda x, p: (block(p, x), None), x, p)[0]

    plain = network(MLP.f)
    small = compress(plain) if whole else network(compress(MLP.f))
    gradient = lambda f: jax.jit(jax.grad(scalar(f)))(layers, x)
    assert relative_error(gradient(small), gradient(plain)) < CLOSE
    vjp = jax.eval_shape(lambda *a: jax.vjp(small, *a)[1], layers, x)
    floats = [r for r in jax.tree.leaves(vjp) if r.dtype == jnp.float32]
    stacks = {r.shape for r in floats if r.shape[:1] == (3,) and r.size > 64 * 3}
    assert stacks == {a.shape for a in jax.tree.leaves(layers)}, "parameters alone"


BUILT_IN = {
    "everything": save.everything_saveable,
    "nothing": save.nothing_saveable,
    "dots": save.dots_saveable,
    "dots without batch": save.dots_with_no_batch_dims_saveable,
    "names": save.save_only_these_names("hidden"),
    "all but names": save.save_anything_except_these_names("hidden"),
    "any but names": save.save_any_names_but_these("other"),
    "both": save.save_from_both_policies(
        save.dots_saveable, save.save_only_these_names("hidden")
    ),
    "packed": jaxact.policies.save_packed,
}


@pytest.mark.parametrize("policy", BUILT_IN.values(), ids=BUILT_IN)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_checkpoint(args, policy, inside):
    if inside:
        small = compress(MLP.f, policy=Policy(bits=8, recompute=policy))
    else:
        small = jax.checkpoint(compress(MLP.f), policy=policy)
    gradient = lambda f: jax.jit(jax.grad(scalar(f), (0, 1)))(*args)
    assert relative_error(gradient(small), gradient(MLP.f)) < CLOSE


OFFLOADING = {
    "dots": save.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "names": save.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@pytest.mark.parametrize("policy", OFFLOADING.values(), ids=OFFLOADING)
def test_offloading_checkpoint_policies_are_left_to_jax(args, policy):
    small = compress(MLP.f, policy=Policy(bits=8, recompute=policy))
    rows = jaxact.residuals(small, *args).rows
    assert any("offloaded by a checkpoint's policy" in row.why for row in rows)


@pytest.mark.parametrize("policy", OFFLOADING.values(), ids=OFFLOADING)
@pytest.mark.parametrize("has_rule", [False, True], ids=["default", "rule"])
def test_what_a_checkpoint_inside_offloads_stays_there(args, policy, has_rule):
    """A codec, which computes on the device, ended in JAX's error about memories."""
    plain = jax.checkpoint(MLP.f, policy=policy)
    rules = (Rule(Quantize(8), path="*"),) if has_rule else ()
    small = compress(plain, policy=Policy(bits=8, rules=rules))
    gradient = lambda f: jax.jit(jax.grad(scalar(f), (0, 1)))(*args)
    assert relative_error(gradient(small), gradient(plain)) < CLOSE
    rows = [row for row in jaxact.residuals(small, *args).rows if row.host_bytes]
    assert rows
    assert {row.why for row in rows} == {"offloaded by a checkpoint's policy"}
    assert all(row.host_bytes == row.exact_bytes for row in rows)


def test_outer_checkpoint_keeps_what_is_packed(args):
    small = compress(MLP.f, policy=Policy(bits=2))
    inner = kept_bytes(small, *args)
    packed = jax.checkpoint(small, policy=jaxact.policies.save_packed)
    nothing = jax.checkpoint(small)
    assert kept_bytes(packed, *args) == inner
    assert kept_bytes(nothing, *args) == 0


def test_recompute_stores_only_what_the_policy_saves(args):
    policy = Policy(bits=2, recompute=save.save_only_these_names("hidden"))
    table = jaxact.residuals(compress(MLP.f, policy=policy), *args)
    assert [row.name for row in table.rows if row.primitive] == ["hidden"]


def test_nested(args):
    def outer(p, x):
        return jnp.tanh(compress(MLP.f)(p, x)) * x

    plain = lambda p, x: jnp.tanh(MLP.f(p, x)) * x
    gradient = lambda f: jax.jit(jax.grad(scalar(f)))(*args)
    assert relative_error(gradient(compress(outer)), gradient(plain)) < CLOSE
    table = jaxact.residuals(compress(outer), *args)
    packed = jaxact.residuals(compress(MLP.f), *args)
    # What the inner call stored is stored once, as it is.
    assert table.stored_bytes < packed.stored_bytes + table.exact_bytes / 2


def test_closures_over_tracers_and_keys(args):
    p, x = args

    def loss(f, p, x):
        def closed(x):
            keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
            return jnp.where(keep, f(p, x), 0.0)

        step = lambda x, _: (jaxact.compress(closed, policy=Policy(bits=8))(x), None)
        plain = lambda x, _: (closed(x), None)
        return [lax.scan(body, x, length=2)[0].sum() for body in (step, plain)]

    small = jax.jit(jax.grad(lambda p: loss(MLP.f, p, x)[0]))(p)
    exact = jax.jit(jax.grad(lambda p: loss(MLP.f, p, x)[1]))(p)
    assert relative_error(small, exact) < CLOSE


def test_only_differentiated_arguments_keep_residuals(args):
    p, x = args
    linear = compress(lambda p, x: x @ p["up"])
    vjp = jax.eval_shape(lambda x: jax.vjp(lambda x: linear(p, x), x)[1], x)
    assert {r.shape for r in jax.tree.leaves(vjp)} == {p["up"].shape}


def test_while_and_cond(args):
    p, x = args
    small = compress(MLP.f)
    loop = lambda f: lax.fori_loop(0, 3, lambda _, x: f(p, x), x)
    assert_same_bits(jax.jit(lambda: loop(small))(), jax.jit(lambda: loop(MLP.f))())
    chosen = lambda f: lambda x: lax.cond(x.sum() > 0, lambda x: f(p, x), jnp.sin, x)
    gradient = lambda f: jax.jit(jax.grad(scalar(chosen(f))))(x)
    assert relative_error(gradient(small), gradient(MLP.f)) < CLOSE


def test_training_step_with_donation_and_accumulation(args):
    p, x = args
    y = jnp.sin(x)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(
            optax.adamw(1e-2), every_k_schedule=2
        ).gradient_transformation(),
    )

    def train(f):
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(p, state, x):
            loss = lambda p: ((f(p, x) - y) ** 2).mean()
            value, gradient = jax.value_and_grad(loss)(p)
            updates, state = optimizer.update(gradient, state, p)
            return optax.apply_updates(p, updates), state, value

        params = jax.tree.map(jnp.copy, p)
        state = optimizer.init(params)
        for _ in range(20):
            with jax.numpy_dtype_promotion("standard"):  # optax counts in int32
                params, state, value = step(params, state, x)
        return float(value)

    start = float(((MLP.f(p, x) - y) ** 2).mean())
    small, exact = train(compress(MLP.f)), train(MLP.f)
    assert exact < 0.8 * start
    assert abs(small - exact) < 0.05 * start


def test_mixed_precision_keeps_no_copy_of_parameters():
    program = BY_NAME["bfloat16"]
    args = program.arguments()
    table = jaxact.residuals(compress(program.f), *args)
    assert (64, 64) not in {row.shape for row in table.rows}
    vjp = jax.eval_shape(lambda *a: jax.vjp(compress(program.f), *a)[1], *args)
    copies = [r for r in jax.tree.leaves(vjp) if r.shape == (64, 64)]
    assert [r.dtype for r in copies] == [jnp.float32], "the parameter, referenced"


@pytest.mark.thorough
def test_float64():
    with jax.enable_x64(True):
        p, x = jax.tree.map(lambda a: a.astype(jnp.float64), MLP.arguments())
        gradient = lambda f: jax.grad(scalar(f))(p, x)
        small = gradient(compress(MLP.f))
        assert small["up"].dtype == jnp.float64
        assert relative_error(small, gradient(MLP.f)) < CLOSE


def test_weak_types_survive():
    f = jaxact.compress(lambda x: (x, jnp.asarray(1.0) * 2.0, 3.0))
    out, plain = (
        jax.jit(f)(jnp.ones(3)),
        jax.jit(lambda x: (x, jnp.asarray(1.0) * 2.0, 3.0))(jnp.ones(3)),
    )
    assert [o.aval.weak_type for o in out] == [o.aval.weak_type for o in plain]


def test_eval_shape_and_side_effects(args, capfd):
    def f(p, x):
        jax.debug.print("called")
        return MLP.f(p, x)

    assert jax.eval_shape(compress(f), *args).shape == args[1].shape
    jax.jit(jax.grad(scalar(compress(f))))(*args)["up"].block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("called") == 1


def test_export(args):
    step = jax.jit(jax.grad(scalar(compress(MLP.f))))
    exported = jax.export.export(step)(*args)
    assert relative_error(exported.call(*args), step(*args)) < 1e-6
    # For a GPU that is elsewhere, whose programs have layouts when they are not kept.
    assert jax.export.export(step, platforms=["cuda"])(*args).platforms == ("cuda",)


def test_devices_share_the_work_without_new_collectives():
    """Run in a process of its own: the number of devices is fixed at start."""
    import subprocess
    import sys
    from pathlib import Path

    here = Path(__file__).parents[1] / "support" / "sharded_step.py"
    done = subprocess.run([sys.executable, here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

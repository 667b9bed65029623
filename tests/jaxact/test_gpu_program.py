"""What XLA makes of a compressed step for a GPU, against what it makes of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Adaptive, Dithered, Policy, Quantize
from jaxact._engine.shared import TABLE, _or_zero
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target
from support.variants import thorough

D, HEADS = 512, 8
P = {name: jax.ShapeDtypeStruct((D, D), jnp.bfloat16) for name in "qkvo"}
X = jax.ShapeDtypeStruct((4, 256, D), jnp.bfloat16)


def block(p, x):
    heads = lambda name: (x @ p[name]).reshape(*x.shape[:2], HEADS, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), heads("k"))
    weights = jax.nn.softmax(scores / 8)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads("v")).reshape(x.shape)
    return x + mixed @ p["o"]


@functools.cache
def program(is_small):
    f = jaxact.compress(block, policy=Policy(bits=4)) if is_small else block
    step = jax.grad(lambda p, x: f(p, f(p, x)).astype(jnp.float32).sum())
    return compile_step(step, (P, X), {}, "h100").as_text()


@thorough
@needs_target
def test_products_that_kernels_pack_are_not_merged():
    # Queries, keys and values; of their gradients the products may be merged.
    merged = f" = bf16[{4 * 256},{3 * D}]{{1,0}} fusion("
    assert merged in program(is_small=False)
    assert merged not in program(is_small=True)


@thorough
@needs_target
def test_metadata_of_residuals_that_are_stored_alike_take_one_kernel():
    lines = program(is_small=True).splitlines()
    kernels = [x for x in lines if " fusion(" in x and "decode)/metadata/" in x]
    # One a call, for the softmax; those that decode x, q, k, v and the mixed values
    # compute what they need of a group.
    assert len(kernels) == 2
    assert all(x.split(" fusion(")[0].count("f32[4,8,256,1]") >= 3 for x in kernels)
    line = f"f32[4,256,{D // 256}]"
    assert not [x for x in lines if " fusion(" in x and line in x.split(" fusion(")[0]]


def normalized(p, x):
    y = (x @ p["q"]).astype(jnp.float32)
    mean = y.mean((0, 1), keepdims=True)
    variance = jnp.square(y).mean((0, 1), keepdims=True) - jnp.square(mean)
    values = (y - mean) * jax.lax.rsqrt(variance + 1e-5)
    return jax.nn.relu(values.astype(x.dtype)) @ p["k"]


@functools.cache
def calls(codec):
    """Kernels in a step of two norms, by lines of its text."""
    f = jaxact.compress(normalized, policy=Policy(default=codec))
    step = jax.grad(lambda p, x: f(p, f(p, x)).astype(jnp.float32).sum())
    text = compile_step(step, (P, X), {}, "h100").as_text()
    return [x for x in text.splitlines() if "pallas_call" in x and "custom-c" in x]


@needs_target
@pytest.mark.parametrize(
    "codec",
    [Quantize(4), pytest.param(Adaptive(4), marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_kernel_packs_the_input_of_a_batch_norm(codec):
    """It reads the product as it is, beside the mean and the factor of each column."""
    kernels = [x for x in calls(codec) if "_encode" in x]
    by_channel = [x for x in kernels if x.count(f"f32[{D}]{{0}}") == 2]
    assert len(by_channel) == 2  # one a call
    assert all(f"bf16[{4 * 256 * D // 256},256]" in x for x in by_channel)


@needs_target
def test_values_that_a_kernel_normalized_are_decoded_as_narrow_as_they_were():
    """Where decoding is not fused with its readers, as with dither."""
    decoded = f"= bf16[{4 * 256 * D // 256},256]"
    kernels = [x for x in calls(Dithered(4)) if "_decode" in x]
    assert kernels and all(decoded in x for x in kernels)
    assert not [x for x in calls(Quantize(4)) if "_decode" in x]


def test_the_shared_operand_is_a_zero():
    metadata = np.arange(12, dtype=np.uint32).reshape(3, 4) << 28
    np.testing.assert_array_equal(jax.jit(_or_zero)(metadata, TABLE), metadata)


@pytest.mark.parametrize("axes", [(None, 0), (0, 0), (0, None)])
def test_it_lowers_for_a_gpu_under_vmap(axes):
    f = jaxact.compress(block, policy=Policy(bits=4))
    gradient = jax.grad(lambda p, x: f(p, x).astype(jnp.float32).sum())
    stack = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    pairs = zip((P, X), axes, strict=True)
    args = [x if axis is None else jax.tree.map(stack, x) for x, axis in pairs]
    traced = jax.jit(jax.vmap(gradient, in_axes=axes)).trace(*args)
    assert "jaxact" in traced.lower(lowering_platforms=("cuda",)).as_text(
        debug_info=True
    )

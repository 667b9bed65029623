"""Sums over few rows take two steps in a backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact import Policy
from jaxact._engine.sums import is_in_steps
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target

pytestmark = pytest.mark.unoptimized

ROWS, C = (64, 7, 7), 512
P = {name: jax.ShapeDtypeStruct((C, C), jnp.bfloat16) for name in "ab"}
X = jax.ShapeDtypeStruct((*ROWS, C), jnp.bfloat16)


@pytest.mark.parametrize(
    "shape, axes, dtype, expected",
    [
        ((64, 7, 7, 512), (0, 1, 2), "float32", True),
        ((16, 197, 768), (0, 1), "float32", True),
        ((64, 8, 8, 512), (0, 1, 2), "float32", True),
        ((64, 14, 14, 512), (0, 1, 2), "float32", False),  # XLA cuts it
        ((2, 1024, 768), (0, 1), "float32", False),  # two samples are few parts
        ((3136, 512), (0,), "float32", False),  # one axis of rows
        ((64, 7, 7, 64), (0, 1, 2), "float32", False),  # small
        ((64, 7, 7, 512), (0, 1, 2), "bfloat16", False),  # samples' sums would round
        ((64, 7, 7, 512), (1, 2), "float32", False),
        ((64, 7, 7, 512), (0, 1, 2, 3), "float32", False),
    ],
)
def test_which_sums_take_two_steps(shape, axes, dtype, expected):
    x = jax.ShapeDtypeStruct(shape, dtype)
    sums = functools.partial(lax.reduce_sum, axes=axes)
    [eqn] = open_jaxpr(jax.make_jaxpr(sums)(x))[0].eqns
    assert is_in_steps(eqn) is expected


def test_a_bias_has_its_gradient():
    """It is exact but for the rounding of sums, and reads no rounded residual."""
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(size=(2, 16, 8, 8, C)).astype(np.float32)  # the fewest
    w, b = rng.normal(size=(2, 1, 1, 1, C)).astype(np.float32)
    layer = jaxact.compress(lambda w, b, x: jnp.sin(x) * w + b, activations="x")
    gradients = jax.grad(lambda w, b: jnp.vdot(layer(w, b, x), cotangent), (0, 1))
    _, got = jax.jit(gradients)(w, b)
    terms = cotangent.astype(np.float64).reshape(-1, C)
    # n - 1 additions in any order (Higham 2002, Accuracy and Stability, eq. 4.4).
    bound = len(terms) * 2.0**-24 * abs(terms).sum(0)
    assert (abs(got.reshape(C) - terms.sum(0)) <= bound).all()
    text = str(jax.make_jaxpr(gradients)(w, b))
    assert f"f32[16,{C}] = reduce_sum[axes=(1, 2)" in text


def normalized(p, x):
    y = (x @ p["a"]).astype(jnp.float32)
    mean = y.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(y).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
    values = (y - mean) * lax.rsqrt(variance + 1e-5)
    return jax.nn.relu(values.astype(x.dtype)) @ p["b"]


@needs_target
def test_a_batch_norm_of_few_rows_writes_no_terms():
    f = jaxact.compress(normalized, policy=Policy(bits=4))
    step = jax.grad(lambda p, x: f(p, f(p, x)).astype(jnp.float32).sum())
    lines = compile_step(step, (P, X), {}, "h100").as_text().splitlines()
    kernels = [x.split(" fusion(")[0] for x in lines if " fusion(" in x]
    wide = f"f32[{','.join(map(str, X.shape))}]"
    assert kernels and not [x for x in kernels if wide in x]

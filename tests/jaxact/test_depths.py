"""A residual that kernels read at three depths, one after another, is decoded twice."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Dithered, Policy, Quantize
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target
from support.programs import relative_error

pytestmark = pytest.mark.unoptimized

BATCH = jax.ShapeDtypeStruct((64, 28, 28, 512), jnp.bfloat16)


class Excited(nn.Module):
    """Channels with weights by their means, after a batch norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, x.shape[-1], (1, 1), dtype=self.dtype)
        h = conv(use_bias=False)(x)
        h = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(h)
        gate = nn.sigmoid(conv()(h.mean((1, 2), keepdims=True)))
        return nn.relu(x + h * gate)


class Net(nn.Module):
    block: Any
    dtype: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = self.block(self.dtype)(x)
        return x


def gradient_and_variables(policy, x):
    """The gradient of a network of blocks, compressed with a policy or not."""
    block = jaxact.compress(Excited, policy=policy) if policy else Excited

    def loss(variables, x):
        y, _ = Net(block, x.dtype).apply(variables, x, mutable=["batch_stats"])
        return jnp.square(y.astype(jnp.float32)).sum()

    init = functools.partial(Net(Excited, x.dtype).init, jax.random.key(0))
    return jax.grad(loss), init


@needs_target
@jax.numpy_dtype_promotion("standard")
def test_no_decoded_array_is_kept_between_them():
    """XLA had it in memory in float32: 0.80 times the uncompressed bytes."""

    def temp_bytes(policy):
        gradient, init = gradient_and_variables(policy, BATCH)
        variables = jax.eval_shape(init, BATCH)
        return jaxact.memory(gradient, variables, BATCH, target="h100").temp_bytes

    assert temp_bytes(Policy(4)) < 0.65 * temp_bytes(None)


@needs_target
@jax.numpy_dtype_promotion("standard")
def test_a_kernel_decodes_once():
    gradient, init = gradient_and_variables(Policy(default=Dithered(4)), BATCH)
    args = jax.eval_shape(init, BATCH), BATCH
    text = compile_step(gradient, args, {}, "h100").as_text()
    calls = [line for line in text.splitlines() if " custom-call(" in line]
    packed = [line for line in calls if "affine_encode" in line]
    assert len([line for line in calls if "affine_decode" in line]) == len(packed) > 0


@pytest.mark.parametrize("codec", [Quantize(8), Dithered(8)], ids=str)
def test_gradients(codec):
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 32))
    gradient, init = gradient_and_variables(Policy(default=codec), x)
    plain, _ = gradient_and_variables(None, x)
    variables = init(x)
    got, want = (jax.jit(f)(variables, x)["params"] for f in (gradient, plain))
    # A step is 1 / 255 of a range of about 6 deviations: 0.7 % of a value, at random.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < 0.02

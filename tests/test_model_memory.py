"""What compression saves in networks as they are trained, in bytes an H100 needs.

ResNet-50 and GPT-2 medium in bfloat16, compiled without a GPU. The bars are upper
limits for `Policy(bits)`, which says nothing about what to keep.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxact
from examples.models import gpt
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target

pytest.importorskip("flax")

pytestmark = [pytest.mark.slow, needs_target]

MIB = 2**20


def compiled(loss, *args):
    """The value and gradient, compiled for an H100; arguments are shapes."""
    return compile_step(jax.value_and_grad(loss), args, {}, "h100")


def temp_bytes(program):
    found = program.memory_analysis().temp_size_in_bytes
    print(f"temp {found / MIB:.0f} MiB")
    return found


def convolutions(program):
    return len(re.findall(r"\bconvolution\(|__cudnn\$conv", program.as_text()))


@jax.numpy_dtype_promotion("standard")  # as Flax's bfloat16 norms ask
def classify(net, batch=64):
    """The compiled gradient of a Linen network."""
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    init = functools.partial(net.init, train=True)
    variables = jax.eval_shape(init, jax.random.key(0), images)

    def loss(params, stats, images, labels):
        logits, _ = net.apply(
            {"params": params, "batch_stats": stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        chosen = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    return compiled(loss, variables["params"], variables["batch_stats"], images, labels)


def test_resnet50(load):
    resnet = load("models.resnet")
    plain = classify(resnet.ResNet50(1000))
    assert temp_bytes(plain) >= 2400 * MIB
    pack = functools.partial(jaxact.compress, policy=jaxact.Policy(2))
    blocks = {"block": pack(resnet.Bottleneck), "stem": pack(resnet.Stem)}
    packed = classify(resnet.ResNet50(1000, **blocks))
    assert temp_bytes(packed) <= 480 * MIB
    assert convolutions(packed) == convolutions(plain) > 0


def complete(net, block, batch=8):
    """The compiled gradient of a GPT with this block."""
    tokens = jax.ShapeDtypeStruct((batch, net.length + 1), jnp.int32)
    return compiled(functools.partial(net.loss, block=block), net.shapes, tokens)


def test_gpt2_medium():
    net = dataclasses.replace(gpt.MEDIUM, scanned=True, recompute_attention=True)
    assert temp_bytes(complete(net, net.block)) >= 9000 * MIB
    packed = jaxact.compress(net.block, policy=jaxact.Policy(2), activations="x")
    assert temp_bytes(complete(net, packed)) <= 2100 * MIB

"""One equation serves every platform: what it costs, and what it lowers to."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import affine, index, mask, rotated
from jaxact_kernels.device import Device, lowering_for
from support.subjects import Affine, sample
from support.variants import thorough

SHAPE = (8, 1024)
X = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
SEED = jax.ShapeDtypeStruct((), jnp.uint32)
TRITON = "__gpu$xla.gpu.triton"


def round_trip(x, seed):
    stored = affine.encode(x, seed, bits=2)
    return affine.decode(stored, shape=x.shape, dtype=x.dtype, bits=2)


def lowered(f, *args, platforms, device="NVIDIA H100 80GB HBM3"):
    with lowering_for(Device(device)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()


def test_the_trace_holds_no_kernel():
    text = str(jax.make_jaxpr(round_trip)(X, SEED))
    assert text.count("packed_operation[") == 2
    assert "pallas" not in text


@pytest.mark.parametrize(
    "platforms, kernels", [(("cpu",), 0), (("cuda",), 2), (("cpu", "cuda"), 2)]
)
def test_the_platform_decides(platforms, kernels):
    text = lowered(round_trip, X, SEED, platforms=platforms)
    assert text.count(TRITON) == kernels


def test_a_gpu_too_old_runs_the_definition():
    text = lowered(round_trip, X, SEED, platforms=("cuda",), device="Tesla T4")
    assert TRITON not in text


@pytest.mark.parametrize("platform, anchored", [("cpu", 0), ("cuda", 3)])
def test_on_a_gpu_the_definition_keeps_rows_contiguous(platform, anchored):
    def fused(x, seed):
        stored = affine.encode(x, seed, bits=2, is_fused=True)
        like = {"shape": x.shape, "dtype": x.dtype}
        return affine.decode(stored, **like, bits=2, is_fused=True)

    text = lowered(fused, X, SEED, platforms=(platform,))
    assert TRITON not in text
    constraints = [line for line in text.splitlines() if "@LayoutConstraint" in line]
    assert len(constraints) == anchored  # words, metadata, values
    assert all("operand_layouts" in line for line in constraints)
    for line in constraints:
        (layout,) = re.findall(r"result_layouts = \[dense<\[?([\d, ]+)", line)
        axes = [int(n) for n in layout.split(",")]
        assert axes == sorted(axes, reverse=True)  # innermost first


def test_on_a_cpu_operations_stay_calls():
    """Also behind optimizations: inlined they are fused, and compiled slowly."""

    def calls(f, *args):
        return jax.jit(f).lower(*args).compile().as_text().count(" call(")

    like = {"shape": X.shape, "dtype": X.dtype, "bits": 2}
    encode = lambda x, seed: affine.encode(x, seed, bits=2, is_fused=True)
    assert calls(encode, X, SEED) == 1
    stored = jax.eval_shape(encode, X, SEED)
    # Fused with what reads it, so that there is no array in float32.
    assert calls(lambda s: affine.decode(s, **like, is_fused=True), stored) == 0
    rotate = lambda x, seed: rotated.encode(x, seed, bits=2)
    assert calls(rotate, X, SEED) == 1
    stored = jax.eval_shape(rotate, X, SEED)
    assert calls(lambda s: rotated.decode(s, **like), stored) == 1
    assert calls(lambda x: mask.encode(x > 0), X) == 1
    words = jax.eval_shape(lambda x: mask.encode(x > 0), X)
    assert calls(lambda w: mask.decode(w, shape=SHAPE), words) == 1


def test_every_format_has_a_kernel():
    def all_formats(x, winner):
        return (
            mask.decode(mask.encode(x > np.zeros((), x.dtype)), shape=x.shape),
            mask.encode(x, above=0),
            index.decode(
                index.encode(winner, bits=3),
                shape=winner.shape,
                dtype=winner.dtype,
                bits=3,
            ),
        )

    winner = jax.ShapeDtypeStruct(SHAPE, jnp.int8)
    text = lowered(all_formats, X, winner, platforms=("cuda",))
    assert text.count(TRITON) == 5


def test_equal_calls_are_lowered_once():
    def layers(x, seed):
        seeds = (seed + np.uint32(layer) for layer in range(1, 5))
        return [affine.encode(x, seed, bits=2) for seed in seeds]

    assert lowered(layers, X, SEED, platforms=("cuda",)).count(TRITON) == 1


def test_vmap_is_one_call():
    def lanes(x, seeds):
        return jax.vmap(jax.vmap(round_trip), in_axes=(1, None))(x, seeds)

    x = jax.ShapeDtypeStruct((3, 5, 8, 256), jnp.float32)
    seeds = jax.ShapeDtypeStruct((3,), jnp.uint32)
    assert lowered(lanes, x, seeds, platforms=("cuda",)).count(TRITON) == 2


def test_vmapped_rows_are_short_for_a_kernel_as_they_are_without_vmap():
    encode = lambda x: rotated.encode(x, np.uint32(3), bits=2)
    rows = jax.ShapeDtypeStruct((8, 96), jnp.float32)
    assert lowered(encode, rows, platforms=("cuda",)).count(TRITON) == 0
    mapped = jax.ShapeDtypeStruct((4, 8, 96), jnp.float32)
    assert lowered(jax.vmap(encode), mapped, platforms=("cuda",)).count(TRITON) == 0


@thorough
def test_it_runs_without_jit():
    x = sample(Affine(2), (4, 64))
    wanted = affine.encode(x, np.uint32(3), bits=2)
    with jax.disable_jit():
        got = affine.encode(x, np.uint32(3), bits=2)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)

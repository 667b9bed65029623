"""Compiled memory: what the numbers hold, here and for GPUs that are not attached."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from jaxact import Memory, compress, memory
from jaxact._memory import compiling
from jaxact._memory.memory import measure
from jaxact._memory.targets import TARGETS, gpu_of
from support.gpu_target import needs_target

SIDE = 512
SQUARE = SIDE * SIDE * 4  # bytes of one float32 array


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def chain(x):
    """Two products in a row: the first one must live until the second has run."""
    return (x @ x) @ x


@pytest.mark.parametrize("target", [None, pytest.param("h100", marks=needs_target)])
def test_every_byte_of_a_known_program(target):
    found = memory(chain, shape(SIDE, SIDE), target=target)
    assert found.argument_bytes == SQUARE
    assert found.output_bytes == SQUARE
    assert found.alias_bytes == 0
    # One intermediate, plus the scratch space of a matmul: on a GPU, cuBLAS's 32 MiB.
    assert SQUARE <= found.temp_bytes <= SQUARE + 33 * 2**20
    assert found.peak_bytes == 2 * SQUARE + found.temp_bytes


def test_scanned_residuals_are_temporary():
    """The backward pass of a scan keeps one residual a step; it shows as temp."""

    def loss(x, length):
        step = lambda x, _: (jnp.sin(x), None)
        return jax.lax.scan(step, x, length=length)[0].sum()

    step = jax.jit(jax.grad(loss), static_argnums=1)
    x = shape(SIDE, SIDE)
    short, long = (memory(step, x, length).temp_bytes for length in (8, 24))
    assert long - short == 16 * SQUARE


def test_donated_and_static_arguments_of_a_jitted_step_count():
    def step(state, x, kind):
        return state + getattr(jnp, kind)(x), None

    jitted = jax.jit(step, donate_argnums=0, static_argnames="kind")
    x = jnp.ones((SIDE, SIDE))
    found = memory(jitted, x, x, kind="sin")
    assert found.alias_bytes == SQUARE
    assert found.peak_bytes == 2 * SQUARE + found.temp_bytes
    assert not x.is_deleted()


def test_arrays_shapes_numbers_and_pytrees_are_the_same_argument():
    def step(tree, scale):
        return jax.tree.map(lambda x: x * scale, tree)

    as_shapes = memory(step, {"a": shape(8, 8), "b": None}, 2.0)
    assert as_shapes == memory(step, {"a": jnp.ones((8, 8)), "b": None}, 2.0)
    as_numpy = {"a": np.ones((8, 8), np.float32), "b": None}
    assert as_shapes == memory(step, as_numpy, 2.0)


def test_it_prints_in_mebibytes():
    text = str(Memory(3 * 2**20, 2**20, 2**20, 0, "somewhere"))
    assert text == (
        "temp 3.0, argument 1.0, output 1.0, alias 0.0, peak 5.0 MiB on somewhere"
    )


@pytest.mark.parametrize("target", TARGETS)
@needs_target
def test_targets_compile_after_the_local_backend_was_used(target):
    assert jax.jit(jnp.sin)(0.0) == 0
    closed_over = jnp.ones((SIDE, SIDE))

    @functools.partial(jax.jit, static_argnums=3, donate_argnums=1)
    def step(key, x, scale, negate):
        noise = jax.random.normal(key, x.shape)
        return jnp.tanh((-x if negate else x) @ closed_over) * scale + noise

    x = np.ones((SIDE, SIDE))  # float64, which JAX will read as float32
    found = memory(step, jax.random.key(0), x, 2.0, True, target=target)
    assert found.device == TARGETS[target].name
    assert found.alias_bytes == found.output_bytes == SQUARE
    assert jax.jit(jnp.cos)(0.0) == 1


@needs_target
@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"t4"}))
def test_pallas_kernels_compile_for_a_target(target):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    call = pl.pallas_call(
        double, shape(128, 128), compiler_params=triton.CompilerParams(num_warps=4)
    )
    found = memory(call, shape(128, 128), target=target)
    assert found.output_bytes == 128 * 128 * 4


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(ValueError, match="'h300'.*a100, a10g, b200, h100, h200"):
        memory(chain, shape(8, 8), target="h300")


@pytest.mark.parametrize("spelled, name", [
    (" H100 ", "h100"), ("NVIDIA H100", "h100"), ("RTX 4090", "rtx4090"),
    ("rtx-4090", "rtx4090"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("Tesla T4", "t4"), ("A10G", "a10g"),
])  # fmt: skip
def test_targets_however_they_are_spelled(spelled, name):
    assert gpu_of(spelled) == TARGETS[name]
    assert gpu_of(TARGETS[name].name) == TARGETS[name]


def test_compute_capabilities():
    """The oracle: NVIDIA's table, developer.nvidia.com/cuda-gpus."""
    assert {name: gpu.compute_capability for name, gpu in TARGETS.items()} == {
        **{"t4": "7.5", "a100": "8.0", "a10g": "8.6", "l4": "8.9"},
        **{"rtx4090": "8.9", "h100": "9.0", "h200": "9.0", "b200": "10.0"},
    }


# Data sheets, TFLOP/s in dense float16 products and of all lanes in float32, and GB/s
# to the host in both directions.
SHEETS = {
    "t4": (65, 8.1, 32),
    "a10g": (70, 35, 64),
    "l4": (121, 30.3, 64),
    "rtx4090": (165.2, 82.6, 64),
    "a100": (312, 19.5, 64),
    "h100": (989.4, 66.9, 128),
    "h200": (989.4, 66.9, 128),
    "b200": (2250, 75, 128),
}


@pytest.mark.parametrize("name", TARGETS)
def test_peak_rates_of_targets(name):
    half, single, link = SHEETS[name]
    gpu = TARGETS[name]
    assert gpu.peak_flops["float16"] == half * 1e12
    assert gpu.host_bytes_per_second == link / 2 * 1e9
    # Data sheets round to three digits and know other clocks; 1 % covers both.
    assert gpu.alu_flops == pytest.approx(single * 1e12, rel=0.01)
    is_old = name == "t4"
    assert gpu.peak_flops["bfloat16"] == (gpu.alu_flops if is_old else half * 1e12)
    assert gpu.peak_flops["float32"] == (gpu.alu_flops if is_old else half / 2 * 1e12)


@needs_target
def test_cudnn_attention_says_what_to_write():
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    q = shape(2, 256, 8, 64, dtype=jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match="attention.mha.*implementation='xla'"
    ):
        memory(attention, q, q, q, target="h100")


NO_STATISTICS = types.SimpleNamespace(
    temp_size_in_bytes=0,
    argument_size_in_bytes=0,
    output_size_in_bytes=0,
    alias_size_in_bytes=0,
)


@pytest.mark.parametrize("statistics", [None, NO_STATISTICS], ids=["none", "zeros"])
def test_a_backend_without_statistics_is_named(statistics):
    compiled = jax.jit(chain).lower(shape(8, 8)).compile()
    assert measure(compiled).output_bytes == 8 * 8 * 4
    silent = types.SimpleNamespace(
        memory_analysis=lambda: statistics,
        input_shardings=compiled.input_shardings,
        output_shardings=compiled.output_shardings,
        out_info=compiled.out_info,
    )
    with pytest.raises(ValueError, match="backend of cpu reports no memory.*target="):
        measure(silent)


def test_a_step_that_returns_nothing_takes_nothing():
    assert memory(lambda x: None, shape(8, 8)).output_bytes == 0


def test_missing_compiler_names_the_command(monkeypatch):
    def nothing_registered(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", nothing_registered)
    no_plugins = types.ModuleType("jax_plugins")
    monkeypatch.setitem(sys.modules, "jax_plugins", no_plugins)
    monkeypatch.delitem(sys.modules, "jax_plugins.xla_cuda13", raising=False)
    compiling.device_of.cache_clear()
    with pytest.raises(ImportError) as caught:
        memory(chain, shape(8, 8), target="h100")
    text = str(caught.value)
    assert 'pip install "jaxact[targets]"' in text
    assert f"jax-cuda13-plugin=={jax.__version__}" in text
    assert f"jax-cuda13-pjrt=={jax.__version__}" in text


@pytest.mark.parametrize(
    "found", ["libdevice not found", "no suitable ptxas", "ptxas too old"]
)
def test_missing_assembler_names_the_command(found):
    with pytest.raises(ImportError, match="nvidia-cuda-nvcc"):
        with compiling.complete_toolchain("h100"):
            raise jax.errors.JaxRuntimeError(f"INTERNAL: {found}")


def test_other_compiler_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        with compiling.complete_toolchain("h100"):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_an_argument_on_several_devices_is_refused_for_a_target():
    class Spread(np.ndarray):
        sharding = types.SimpleNamespace(device_set={0, 1})

    spread = np.ones((8, 8)).view(Spread)
    with pytest.raises(ValueError, match="sharded over 2 devices"):
        compiling.abstract_on(jax.devices()[0])(spread)


def test_only_arrays_are_replaced():
    abstract = compiling.abstract_on(jax.devices()[0])
    for value in (3, 2.5, "name", len, np.float32):
        assert abstract(value) is value


@needs_target
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_compressed_steps_compile_for_a_target(target):
    """With kernels, or without: Triton has none for a T4."""
    small = compress(lambda x, w: jax.nn.gelu(x @ w), activations="x")
    step = jax.grad(lambda w, x: small(x, w).sum())
    found = memory(step, shape(256, 256), shape(512, 256), target=target)
    assert found.output_bytes == 256 * 256 * 4


def test_a_compiled_step_is_refused():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(TypeError, match="type Compiled; a step is required"):
        memory(compiled)

"""The Triton kernels as machine code: one kernel, nothing spilled, few registers.

A multiprocessor has 65536 registers: at 128 a thread it holds four programs of 128
threads, which keep enough loads in flight to hide the memory's latency.
"""

import re

import jax
import numpy as np
import pytest

from benchmarks.assembler import assemble
from jaxact_kernels import noise
from jaxact_kernels.affine import Stored, triton
from jaxact_kernels.layout import layout_of
from support.gpu_target import needs_target
from support.machine_code import takes_a_number_for_nan

pytestmark = needs_target

MOST_REGISTERS = 65536 // (4 * 128)
GROUP_SIZE = 256
SHAPE = (512, 1024)
CASES = [
    *(("h100", bits, "bfloat16") for bits in (1, 2, 3, 4, 8)),
    *(("h100", bits, "float32") for bits in (1, 2, 3, 4, 8)),
    ("h100", 2, "float16"),
    ("a100", 2, "bfloat16"),
    ("b200", 2, "bfloat16"),
]
SLOW = {(1, "float32"), (3, "float32"), (8, "float32"), (4, "float32")}
cases = pytest.mark.parametrize(
    ("target", "bits", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[1:] in SLOW else ())
        for case in CASES
    ],
)


def encode(shape, dtype, bits, target):
    options = {"bits": bits, "group_size": GROUP_SIZE, "stochastic": True}
    return assemble(
        lambda x, seed: triton.encode(x, seed, **options),
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((), np.uint32),
        target=target,
    )


def decode(shape, dtype, bits, target):
    layout = layout_of(shape, GROUP_SIZE)
    groups = (*layout.lead, layout.num_groups)
    stored = Stored(
        jax.ShapeDtypeStruct((*groups, layout.group * bits // 32), np.uint32),
        jax.ShapeDtypeStruct(groups, np.uint32),
    )
    options = {"shape": shape, "dtype": np.dtype(dtype), "bits": bits}
    return assemble(
        lambda stored: triton.decode(stored, group_size=GROUP_SIZE, **options),
        stored,
        target=target,
    )


def decode_dithered(shape, dtype, bits, target):
    layout = layout_of(shape, GROUP_SIZE)
    groups = (*layout.lead, layout.num_groups)
    stored = Stored(
        jax.ShapeDtypeStruct((*groups, layout.group * bits // 32), np.uint32),
        jax.ShapeDtypeStruct(groups, np.uint32),
    )
    options = {"shape": shape, "dtype": np.dtype(dtype), "bits": bits}
    options |= {"group_size": GROUP_SIZE}
    return assemble(
        lambda stored, seed: triton.decode(stored, draw=noise.Draw(seed), **options),
        stored,
        jax.ShapeDtypeStruct((), np.uint32),
        target=target,
    )


both = pytest.mark.parametrize("build", [encode, decode])


def check(program):
    (kernel,) = program.kernels
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
    assert kernel.registers <= MOST_REGISTERS, kernel
    text = program.compiled.as_text()
    assert text.count(" custom-call(") == 1
    assert not re.findall(r" (?:copy|pad|transpose|fusion)\(", text)
    # A contracted product and sum would round once where the definition rounds twice.
    assert not re.findall(r"\bfma\.", kernel.ptx)
    return kernel


@both
@cases
def test_one_kernel_that_spills_nothing(build, target, bits, dtype):
    check(build(SHAPE, dtype, bits, target))


@pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_dithered_decoding_is_one_kernel_too(bits):
    kernel = check(decode_dithered(SHAPE, "bfloat16", bits, "h100"))
    assert not takes_a_number_for_nan(kernel.ptx)


@both
@pytest.mark.parametrize("shape", [(64, 1000), (3, 5, 40)], ids=str)
def test_rows_that_need_padding_are_padded_in_registers(build, shape):
    check(build(shape, "bfloat16", 2, "h100"))


@both
def test_offsets_up_to_32_bits_are_unsigned(build):
    kernel = check(build((2**16, 2**16), "bfloat16", 2, "h100"))
    assert "mul.wide.u32" in kernel.ptx
    assert "mul.wide.s32" not in kernel.ptx


@both
def test_offsets_above_32_bits_are_64_bits_wide(build):
    kernel = check(build((2**17, 2**16), "bfloat16", 2, "h100"))
    # The group's number goes to its offset in bytes, 256 * 2 each, in one product.
    assert re.search(r"mul\.wide\.u32\s+%rd\d+, %r\d+, 512;", kernel.ptx)
    assert "mul.wide.s32" not in kernel.ptx

"""The rotated format's Triton kernels as machine code: nothing spilled.

A thread holds 128 elements, half a group, and may have 255 registers; two programs of
64 threads with 128 loads in flight each hide the memory's latency.
"""

import functools

import jax
import numpy as np
import pytest

from benchmarks.assembler import assemble
from jaxact_kernels.rotated import reference, triton
from jaxact_kernels.rotated.reference import Stored
from support.gpu_target import needs_target
from support.machine_code import takes_a_number_for_nan

pytestmark = [needs_target, pytest.mark.slow]

SHAPE = (512, 1024)


def check(function, *arguments):
    (kernel,) = assemble(function, *arguments, target="h100").kernels
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, kernel
    # A contracted product and sum would round once where the definition rounds twice.
    assert "fma.rn.f32" not in kernel.ptx
    assert "mma.sync" in kernel.ptx  # tensor cores transform the tiles
    return kernel


@pytest.mark.parametrize(
    "bits, is_adaptive",
    [(0.5, False), (2, False), (2, True), (4, False), (4, True)],
)
def test_kernels_spill_nothing(bits, is_adaptive):
    options = {"bits": bits, "group_size": 256, "is_adaptive": is_adaptive}
    x = jax.ShapeDtypeStruct(SHAPE, "bfloat16")
    seed = jax.ShapeDtypeStruct((), np.uint32)
    # At 4 bits an encoder spills: 128 elements have 8 levels each. The adaptive one at
    # 2 bits is compiled by test_benchmark.py.
    if bits <= 2 and not is_adaptive:
        check(functools.partial(triton.encode, **options), x, seed)
    stored = jax.eval_shape(functools.partial(reference.encode, **options), x, seed)
    options |= {"shape": SHAPE, "dtype": x.dtype}
    decode = lambda words, metadata, seed: triton.decode(
        Stored(words, metadata, seed), **options
    )
    kernel = check(decode, *stored, seed)
    assert not takes_a_number_for_nan(kernel.ptx)

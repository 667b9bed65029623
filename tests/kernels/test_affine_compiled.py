"""The definition's encoder as XLA compiles it for a GPU, where it is fused."""

import functools
import re

import jax
import numpy as np
import pytest

from benchmarks.assembler import assemble
from jaxact_kernels.affine import reference
from support.gpu_target import needs_target

pytestmark = needs_target


@pytest.mark.parametrize("bits", [2, 4])
def test_an_encoding_has_no_converters_and_loads_vectors(bits):
    """Between floats and integers: they have an eighth of the lanes of others.

    With them XLA loaded elements one by one, for 27 instructions each, not 19.
    """
    options = {"bits": bits, "group_size": 256, "stochastic": True}
    x = jax.ShapeDtypeStruct((512, 1024), "bfloat16")
    seed = jax.ShapeDtypeStruct((), np.uint32)
    encode = functools.partial(reference.encode, **options)
    code = "\n".join(k.ptx for k in assemble(encode, x, seed, target="h100").kernels)
    assert not re.search(r"\bcvt\.r[nz]i", code)
    assert re.search(r"\bld\.global[.\w]*\.v4", code)

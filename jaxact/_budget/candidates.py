"""The actions that a plan chooses from: bytes, error, and time of each.

Errors are medians of the squared error over the squared distance from the mean, for
residuals of four networks (`quantizers.py` in the benchmarks). From 5 bits on each bit
divides by four. Times count the bytes that an encoder and a decoder move, and the
operations that they take, whichever is slower.
"""

import functools
import math

import jax
import numpy as np

from jaxact._bits.cost import NORMAL_GROUP, levels_variance
from jaxact._codec import (
    Action,
    Adaptive,
    Codec,
    Dithered,
    Exact,
    Quantize,
    Rotated,
)
from jaxact._memory.targets import Gpu
from jaxact._residual import Residual

# The formats whose words are those of `Quantize`, in groups of 256; the others keep a
# seed beside them.
FORMATS = (Quantize, Dithered, Rotated, Adaptive)
_SEED_BYTES = 4
_ERRORS: dict[type[Action], tuple[float, ...]] = {
    Quantize: (6.34, 0.548, 0.100, 0.0218),
    Dithered: (2.50, 0.278, 0.0510, 0.0111),
    Rotated: (0.564, 0.131, 0.0349, 0.00931),
    Adaptive: (0.554, 0.127, 0.0337, 0.00893),
}
# Operations for an element, both ways: random bits and packing; a rotation of 256
# elements adds 8 additions each way, and trying the ways of `Adaptive` all of them.
_OPERATIONS: dict[type[Action], int] = {
    Quantize: 20,
    Dithered: 30,
    Rotated: 50,
    Adaptive: 80,
}
EVERY: tuple[Action, ...] = (
    Exact(),
    *(kind(bits) for bits in range(1, 9) for kind in FORMATS),
)


def relative_error(action: Action) -> float:
    """The squared error over the squared distance from the mean."""
    if action.is_lossless or action.bits is None:
        return 0.0
    errors = _ERRORS.get(type(action))
    if errors is None:  # as `Quantize` at these bits, which need not be whole
        return NORMAL_GROUP * (2.0**action.bits - 1) ** -2
    bits = round(action.bits)
    return errors[min(bits, 4) - 1] * 4.0 ** min(0, 4 - bits)


def times_measured(action: Action) -> float:
    """The error over that of `Quantize(1)`, by which a measured variance is S(1)."""
    return relative_error(action) / (NORMAL_GROUP * levels_variance(1))


def stored_bytes(action: Action, residual: Residual, copies: int) -> int:
    """Bytes of all copies, as stored."""
    shape, dtype = residual.shape, residual.dtype
    if isinstance(action, Exact):
        return copies * math.prod(shape) * dtype.itemsize
    if type(action) in FORMATS and getattr(action, "group_size", 0) == 256:
        first, second = (_encoded(Quantize(b), shape, dtype) for b in (1, 2))
        bits = round(action.bits or 0)
        seed = 0 if isinstance(action, Quantize) else _SEED_BYTES
        return copies * (first + (bits - 1) * (second - first) + seed)
    return copies * _encoded(action, shape, dtype)


@functools.lru_cache(maxsize=4096)
def _encoded(action: Action, shape: tuple[int, ...], dtype: np.dtype) -> int:
    assert isinstance(action, Codec), f"{action} stores nothing"
    x = jax.ShapeDtypeStruct(shape, dtype)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    stored = jax.eval_shape(action.encode, x, seed)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(stored))


def seconds(action: Action, residual: Residual, copies: int, gpu: Gpu) -> float:
    """Seconds that packing and unpacking add."""
    if isinstance(action, Exact):
        return 0.0
    exact = stored_bytes(Exact(), residual, copies)
    moved = 2 * (exact + stored_bytes(action, residual, copies))
    operations = _OPERATIONS.get(type(action), _OPERATIONS[Quantize])
    elements = copies * math.prod(residual.shape)
    return max(moved / gpu.bytes_per_second, elements * operations / gpu.alu_flops)

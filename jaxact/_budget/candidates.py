"""The actions that a plan chooses from: bytes, error, and time of each.

Errors are medians of the squared error over the squared distance from the mean, for
residuals of four networks (`quantizers.py` in the benchmarks): of values, which are
near normal; of a softmax's exponentials, and of local derivatives, which have bounds,
those of a GPT. From 5 bits on each bit divides by four. Times count the bytes that an
encoder and a decoder move, and the operations that they take, whichever is slower.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from jaxact._bits.cost import NORMAL_GROUP, Cost, relative
from jaxact._bits.widths import FORMATS, action_of
from jaxact._codec import (
    Action,
    Adaptive,
    Codec,
    Dithered,
    Exact,
    Offload,
    Quantize,
    Rotated,
    bytes_of,
)
from jaxact._jaxpr.labels import DERIVATIVE
from jaxact._memory.targets import Gpu
from jaxact._residual import Residual
from jaxact_kernels.rotated.group import HALF_BIT, NORMAL_ERROR

# Those that read and write whole arrays; XLA fuses `Quantize` with the operations near.
# The backward pass of ResNet-50's first block needs 280 MiB more with `Dithered`, a
# network of its first blocks 290 MiB more with `Rotated`, than with `Quantize`: as much
# as a block's residuals.
_WHOLE = (Dithered, Rotated, Adaptive)
# All but `Quantize` keep a seed beside words as it has, in groups of 256.
_SEED_BYTES = 4
_Errors: TypeAlias = Mapping[type[Action], tuple[float, ...]]
_OF_VALUES: _Errors = {
    Quantize: (6.40, 0.551, 0.101, 0.0221),
    Dithered: (2.50, 0.278, 0.0510, 0.0111),
    Rotated: (0.564, 0.131, 0.0349, 0.00931),
    Adaptive: (0.554, 0.130, 0.0349, 0.00910),
}
_OF_EXPONENTIALS: _Errors = {
    Quantize: (0.822, 0.115, 0.0238, 0.00554),
    Dithered: (1.61, 0.179, 0.0331, 0.00720),
    Rotated: (0.436, 0.101, 0.0270, 0.00723),
    Adaptive: (0.409, 0.0837, 0.0196, 0.00466),
}
_OF_DERIVATIVES: _Errors = {
    Quantize: (0.949, 0.0949, 0.0174, 0.00382),
    Dithered: (0.437, 0.0484, 0.00887, 0.00195),
    Rotated: (0.268, 0.0622, 0.0167, 0.00443),
    Adaptive: (0.268, 0.0408, 0.00847, 0.00193),
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
# Without a kernel a rotation needs several float32 copies of what it packs, more than
# it saves: a CPU's step with two layers grows from 58 to 70 MiB.
WITHOUT_KERNELS = tuple(a for a in EVERY if not isinstance(a, Rotated | Adaptive))
# Where there is a host memory beside the device's. The compiled step does shrink: 6
# layers of width 512 on an H100, exact residuals to the host, from 1085 to 244 MiB
# scanned and from 531 to 404 unrolled; 4 bits from 329 to 230, and from 203 to 193.
ON_HOST: tuple[Action, ...] = (Offload(), Offload(Quantize(4)))


def relative_error(action: Action, residual: Residual) -> float:
    """The squared error over the squared distance from the mean."""
    if action.is_lossless or action.bits is None:
        return 0.0
    if isinstance(action, Offload):
        return relative_error(action.codec, residual)
    errors = _errors(residual).get(type(action))
    if errors is None:  # as `Quantize` at these bits, which need not be whole
        return NORMAL_GROUP * (2.0**action.bits - 1) ** -2
    if action.bits == HALF_BIT:
        return errors[0] * NORMAL_ERROR[HALF_BIT] / NORMAL_ERROR[1]
    bits = round(action.bits)
    return errors[min(bits, 4) - 1] * 4.0 ** min(0, 4 - bits)


def measured_error(action: Action, residual: Residual, cost: Cost) -> float:
    """The variance that it adds to the squared gradient, from a measurement.

    Formats other than the measured one err in proportion. Infinite where the residual
    must stay exact.
    """
    if action.is_lossless:
        return 0.0
    bits = min(8, cost.bits or 4)
    before = relative_error(action_of(bits, cost.action), residual)
    ratio = relative_error(action, residual) / before
    return relative(ratio * cost.error(bits), cost.signal)


def _errors(residual: Residual) -> _Errors:
    if residual.primitive == "exp":
        return _OF_EXPONENTIALS
    is_derivative = DERIVATIVE in (
        *residual.path.split("/"),
        *residual.label.split("."),
    )
    return _OF_DERIVATIVES if is_derivative else _OF_VALUES


def stored_bytes(action: Action, residual: Residual, copies: int) -> int:
    """Bytes of all copies, as stored on the device."""
    if isinstance(action, Offload):
        return 0
    shape, dtype = residual.shape, residual.dtype
    if isinstance(action, Exact):
        return copies * math.prod(shape) * dtype.itemsize
    if type(action) in FORMATS and getattr(action, "group_size", 0) == 256:
        first, second = (bytes_of(Quantize(b), shape, dtype) for b in (1, 2))
        bits = action.bits or 0
        seed = 0 if isinstance(action, Quantize) else _SEED_BYTES
        return copies * (first + int((bits - 1) * (second - first)) + seed)
    assert isinstance(action, Codec), f"{action} stores nothing"
    return copies * bytes_of(action, shape, dtype)


def workspace(action: Action, residual: Residual) -> int:
    """Bytes of a whole array that encoding reads or decoding writes."""
    if isinstance(action, Offload):  # one fetched copy, as it was stored
        inner = action.codec
        return stored_bytes(inner, residual, 1) + workspace(inner, residual)
    if not isinstance(action, _WHOLE):
        return 0
    return math.prod(residual.shape) * residual.dtype.itemsize


def seconds(action: Action, residual: Residual, copies: int, gpu: Gpu) -> float:
    """Seconds that packing and unpacking add.

    On the way to the host and back nothing else is computed: XLA may hide a part of
    that. An encoder and a decoder move the stored array. The encoder reads the
    residual; what a decoder's kernel writes, the operation after it reads, as it would
    read the residual without one.
    """
    if isinstance(action, Exact):
        return 0.0
    if isinstance(action, Offload):
        moved = 2 * stored_bytes(action.codec, residual, copies)
        inner = seconds(action.codec, residual, copies, gpu)
        return inner + moved / gpu.host_bytes_per_second
    exact = stored_bytes(Exact(), residual, copies)
    passes = 3 if isinstance(action, _WHOLE) else 1
    moved = passes * exact + 2 * stored_bytes(action, residual, copies)
    operations = _OPERATIONS.get(type(action), _OPERATIONS[Quantize])
    elements = copies * math.prod(residual.shape)
    return max(moved / gpu.bytes_per_second, elements * operations / gpu.alu_flops)

"""What differs between the supported JAX versions in Pallas through Mosaic GPU.

Versions meant: 0.10.2 to 0.12.
"""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

# Whatever version is installed, its types lack names of another one.
_plgpu: Any = mosaic_gpu

# What a thread holds is said by the kernels, not inferred, where that is a choice.
LANE: dict[str, Any] = (
    {"lowering_semantics": _plgpu.LoweringSemantics.Lane}
    if hasattr(_plgpu, "LoweringSemantics")
    else {}
)


def interpreter() -> Any:
    """How `kernel` is told to interpret; 0.10 cannot."""
    return _plgpu.InterpretGPUParams()


def load(ref: Any, layout: Any) -> jax.Array:
    """Load a whole reference; before 0.12 the index is an argument of its own."""
    index = ((),) if "idx" in inspect.signature(_plgpu.load).parameters else ()
    return _plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref: Any, x: jax.Array) -> None:
    """Store a whole reference; before 0.12 no assignment is checked to be fast."""
    if hasattr(_plgpu, "store"):
        _plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x

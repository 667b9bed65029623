"""Pallas through Mosaic GPU, alike in the supported JAX versions: 0.10.2 to 0.12."""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

# Whatever version is installed, its types lack names from another one.
_plgpu: Any = mosaic_gpu

# Kernels state which thread holds which element, where that is a choice, instead of
# having it inferred.
THREAD_SEMANTICS: dict[str, Any] = (
    {"lowering_semantics": _plgpu.LoweringSemantics.Lane}
    if hasattr(_plgpu, "LoweringSemantics")
    else {}
)


def interpreter() -> Any:
    """The `interpret` option with which `kernel` runs on a CPU; 0.10 has none."""
    return _plgpu.InterpretGPUParams()


def load(ref: jax.Ref, layout: mosaic_gpu.Layout) -> jax.Array:
    """Load a whole reference; 0.10 asks for an index beside it."""
    parameter = inspect.signature(_plgpu.load).parameters.get("idx")
    is_required = parameter is not None and parameter.default is parameter.empty
    index = ((),) if is_required else ()
    return _plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref: jax.Ref, x: jax.Array) -> None:
    """Store a whole reference; before 0.12 no assignment is checked to be fast."""
    if hasattr(_plgpu, "store"):
        _plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x

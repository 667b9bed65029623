"""Compile a step for the local backend, or for a GPU that is not attached."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.stages import Compiled, Traced

from jaxact._memory.targets import gpu_of
from jaxact._modules.as_argument import with_module
from jaxact._modules.find import for_states
from jaxact._modules.pure import refuse_module
from jaxact_kernels import device as kernel_device

T = TypeVar("T")
# jax.Device is no type to type checkers.
Device: TypeAlias = Any
# Kernels of products to choose from cannot be timed without the GPU, but XLA compiles
# them all the same: 51 instead of 33 s for a step of ResNet-152. Memory and predicted
# times of ResNet-50, ViT-B and GPT-2 small are the same to the last digit.
_UNATTACHED = {"xla_gpu_autotune_level": 0}


def compile_step(
    step: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    target: str | None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile `step(*args, **kwargs)` for a target, or for the local backend.

    A jitted step keeps its options; another is jitted first. `options`: for XLA.
    """
    return trace_and_compile(step, args, kwargs, target, options)[1]


def trace_and_compile(
    step: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    target: str | None,
    options: dict[str, Any] | None = None,
) -> tuple[Traced, Compiled]:
    """The traced step and the compiled one, as `compile_step`."""
    step, args = with_module(step, args)
    traceable = _traceable(step, args, kwargs)
    if target is None:
        traced = traceable.trace(*args, **kwargs)
        return _own(traced), traced.lower().compile(options)
    gpu_of(target)  # a value that is no name has no hash, perhaps
    device = device_of(target)
    args, kwargs = jax.tree.map(abstract_on(device), (tuple(args), kwargs))
    with lowering_for(target), complete_toolchain(target):
        # Pallas looks for its device while tracing and lowering.
        traced = traceable.trace(*args, **kwargs)
        lowered = traced.lower(lowering_platforms=("cuda",))
        return _own(traced), lowered.compile(_UNATTACHED | (options or {}))


def trace(
    step: Callable[..., object], args: Sequence[object], kwargs: dict[str, Any]
) -> Traced:
    """The step traced for the local backend."""
    step, args = with_module(step, args)
    return _own(_traceable(step, args, kwargs).trace(*args, **kwargs))


def _traceable(
    step: Callable[..., object], args: Sequence[object], kwargs: dict[str, Any]
) -> Any:
    """The step itself if it is jitted, else jitted.

    By `nnx.jit` where NNX modules are arguments: JAX's own drops changes to them, such
    as an optimizer's update, and with it the gradient.
    """
    refuse_module(step)
    if not callable(step) or isinstance(step, Compiled):  # a step is lowered here
        raise TypeError(
            f"jaxact: got a value of type {type(step).__name__}; a step is required, a "
            "function such as jax.grad(loss), and its arguments after it."
        )
    if hasattr(step, "trace"):
        return step
    adapter = for_states((*args, *kwargs.values()))
    return jax.jit(_hashable(step)) if adapter is None else adapter.jit(step)


def _hashable(step: Callable[..., object]) -> Callable[..., object]:
    """A function that `jax.jit` takes: Equinox's gradients hold a dict, so no hash."""
    try:
        hash(step)
    except TypeError:
        return lambda *args, **kwargs: step(*args, **kwargs)
    return step


def _own(traced: Any) -> Traced:
    """JAX's own traced step, which that of an `nnx.jit` holds."""
    return getattr(traced, "traced", traced)


def abstract_on(device: Device) -> Callable[[T], T | jax.ShapeDtypeStruct]:
    """Map an array to its abstract twin on `device`; leave anything else."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def abstract(leaf: T) -> T | jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return leaf  # a Python number, or a static value
        spread = getattr(leaf, "sharding", None)
        if spread is not None and len(spread.device_set) > 1:
            raise ValueError(
                f"an argument of shape {leaf.shape} is sharded over "
                f"{len(spread.device_set)} devices; a target is one GPU: pass "
                "jax.ShapeDtypeStructs of the shapes that one device holds"
            )
        traced = jax.eval_shape(lambda x: x, leaf)  # the dtype that JAX will use
        return traced.update(sharding=sharding)

    return abstract


@functools.cache
def device_of(target: str) -> Device:
    """The target as a compile-only device.

    Raises:
      ValueError: no such target.
      ImportError: the packages that compile for a target are missing.
    """
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=gpu_of(target).description,
        topology="1x1x1",
    )
    try:
        return describe().devices[0]
    except NotImplementedError:  # no CUDA plugin, or one that found no libraries
        _register_compiler(target)
        return describe().devices[0]


def _register_compiler(target: str) -> None:
    """Register the CUDA plugin on a machine without the libraries that run programs.

    JAX skips a plugin whose cuDNN or cuBLAS is missing. Compiling needs neither.
    """
    try:
        from jax_plugins import xla_cuda13  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(_missing(target, "XLA's GPU compiler")) from error
    skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(skip)
    os.environ[skip] = "1"
    try:
        xla_cuda13.initialize()
    finally:
        if before is None:
            del os.environ[skip]
        else:
            os.environ[skip] = before


def lowering_for(target: str) -> contextlib.AbstractContextManager[object]:
    """The context in which Pallas lowers for `target` and no local device."""
    gpu = gpu_of(target)
    return kernel_device.lowering_for(kernel_device.Device(gpu.name), gpu.cores)


@contextlib.contextmanager
def complete_toolchain(target: str) -> Iterator[None]:
    """Say the package to install, or the line to write, if compiling fails.

    Raises:
      ImportError: XLA finds no assembler or no maths library.
      NotImplementedError: the program asks for cuDNN while it is traced.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "ptxas" in str(error) or "libdevice" in str(error):
            message = _missing(target, "NVIDIA's assembler and maths library")
            raise ImportError(message) from error
        raise
    except RuntimeError as error:
        if "cuDNN" in str(error):
            raise NotImplementedError(_NO_CUDNN.format(target=target)) from error
        raise


_NO_CUDNN = (
    "compiling for {target!r}: the step asks for cuDNN while it is traced, which needs "
    "an attached GPU. For jax.nn.dot_product_attention(implementation='cudnn') write "
    "jax.experimental.pallas.ops.gpu.attention.mha, which does not keep the "
    "scores either, or implementation='xla', which does."
)


def _missing(target: str, part: str) -> str:
    version = jax.__version__
    return (
        f"compiling for {target!r} needs {part}, not found here. No GPU is needed:\n"
        '  pip install "jaxact[targets]"\n'
        f"or, the same for the installed JAX {version} (Linux only):\n"
        f"  pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
        '"nvidia-cuda-nvcc>=13.0" "nvidia-nvvm>=13.0"'
    )

"""How much memory a compiled step takes, here or on a GPU that is not attached.

What JAX lists as residuals and what a compiled program allocates are different
numbers: XLA fuses, rematerialises and shares buffers. This asks the compiler.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxact._tabular import Tabular
from jaxact._targets import TARGETS


@dataclass(frozen=True)
class Memory(Tabular):
    """Bytes one device needs to run a compiled function, by what they hold.

    `temp_bytes` is what lives only while it runs: residuals, gradients not yet
    returned, scratch space. `alias_bytes` are outputs written over donated arguments.
    `peak_bytes` is arguments + outputs + temporaries - aliases.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    device: str

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once.

        Computed, because XLA:CPU leaves temporaries out of the peak it reports; on a
        GPU this equals XLA's own number.
        """
        total = self.argument_bytes + self.output_bytes + self.temp_bytes
        return total - self.alias_bytes

    def summary(self) -> str:
        """The peak, and of what device."""
        return f"peak {self.peak_bytes / 2**20:.1f} MiB on {self.device}"

    def _cells(self) -> list[list[str]]:
        parts = ["temp", "argument", "output", "alias"]
        sizes = (getattr(self, part + "_bytes") / 2**20 for part in parts)
        return [parts, [f"{size:.1f} MiB" for size in sizes]]

    def __str__(self) -> str:
        pairs = map(" ".join, zip(*self._cells(), strict=True))
        sizes = (pair.removesuffix(" MiB") for pair in pairs)
        return f"{', '.join(sizes)}, {self.summary()}"


def memory(
    step: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> Memory:
    """Compile `step` for these arguments and report the memory it takes.

    Nothing runs. With a `target` no such device is needed: `a100`, `b200`, `h100` and
    `h200` are compiled for by XLA's GPU compiler on any Linux machine. For the local
    backend, and for a program sharded over several devices, the numbers are those of
    one device.

    Not included: workspaces that cuDNN and cuBLAS allocate when they run, the XLA
    runtime's own memory, and kernel choices that autotuning on a device would make.

    Args:
      step: a function. If it is jitted its static and donated arguments count;
        otherwise it is jitted with neither.
      *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`, and static
        values where `step` declares them.
      target: the GPU to compile for; `None` is the local backend.
      **kwargs: its keyword arguments.

    Raises:
      ValueError: an unknown target, or an argument sharded over several devices
        together with a target.
      ImportError: the packages that compile for a target are missing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> jaxact.memory(lambda x: x @ x, x).output_bytes
      4194304
    """
    return _measure(_compile(step, args, kwargs, target))


def _compile(step: Any, args: Any, kwargs: Any, target: str | None) -> Any:
    traceable = step if hasattr(step, "trace") else jax.jit(step)
    if target is None:
        return traceable.trace(*args, **kwargs).lower().compile()
    device = _device(target)
    args, kwargs = jax.tree.map(_on(device), (args, kwargs))
    with _described(target), _complete_toolchain(target):
        # Pallas looks for its device while tracing and lowering.
        traced = traceable.trace(*args, **kwargs)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def _measure(compiled: Any) -> Memory:
    stats = compiled.memory_analysis()
    shardings = (compiled.input_shardings, compiled.output_shardings)
    devices = jax.tree.leaves(shardings)[0].device_set
    return Memory(
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        device=min(devices, key=lambda d: d.id).device_kind,
    )


def _on(device: Any) -> Callable[[Any], Any]:
    """Map an array to its abstract twin on `device`; leave anything else."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(leaf: Any) -> Any:
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

    return place


@functools.cache
def _device(target: str) -> Any:
    """A compile-only device of the kind that `target` names."""
    if target not in TARGETS:
        raise ValueError(
            f"unknown target {target!r}: choose one of {', '.join(sorted(TARGETS))}, "
            "or None for the local backend"
        )
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=TARGETS[target].description,
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


def _described(target: str) -> contextlib.AbstractContextManager[Any]:
    """The context in which Pallas lowers for `target` instead of a local device."""
    gpu = TARGETS[target]
    device = jax.sharding.AbstractDevice(gpu.name, gpu.cores, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def _complete_toolchain(target: str) -> Iterator[None]:
    """Say what to install when XLA finds no assembler or no maths library."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "ptxas" in str(error) or "libdevice" in str(error):
            message = _missing(target, "NVIDIA's assembler and maths library")
            raise ImportError(message) from error
        raise


def _missing(target: str, what: str) -> str:
    version = jax.__version__
    return (
        f"compiling for {target!r} needs {what}, not found here. No GPU is needed:\n"
        '  pip install "jaxact[targets]"\n'
        f"or, the same for the installed JAX {version} (Linux only):\n"
        f"  pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
        '"nvidia-cuda-nvcc>=13.0" "nvidia-nvvm>=13.0"'
    )

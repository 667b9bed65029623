"""How much memory a compiled step takes, here or on a GPU that is not attached.

The bytes that JAX lists as residuals and those that a compiled program allocates are
different numbers: XLA fuses, rematerializes and shares buffers. This asks the compiler.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled

from jaxact._memory.compiling import Device, compile_step
from jaxact._tabular import Column, Tabular
from jaxact._written_as import written_as


@dataclass(frozen=True)
class Memory(Tabular):
    """Bytes that one device needs to run a compiled function.

    Tables have them in MiB, whatever their size, so that steps compare.

    Attributes:
      temp_bytes: live only while it runs: residuals, gradients not yet returned,
        scratch space.
      argument_bytes: its arguments.
      output_bytes: its results.
      alias_bytes: results that are written over donated arguments.
      device: the device's kind.
    """

    derived = ("peak_bytes",)
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    device: str

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once: arguments + outputs + temps - aliases.

        Computed, because XLA:CPU leaves temporaries out of the peak it reports; on a
        GPU this equals XLA's own number.
        """
        total = self.argument_bytes + self.output_bytes + self.temp_bytes
        return total - self.alias_bytes

    def summary(self) -> str:
        """The peak, and the device."""
        return f"peak {_mebibytes(self.peak_bytes)} on {self.device}"

    def _table(self) -> tuple[list[Column["Memory"]], list["Memory"]]:
        return _COLUMNS, [self]

    def __str__(self) -> str:
        parts = [f"{c.title} {c.cell(self)}".removesuffix(" MiB") for c in _COLUMNS]
        return f"{', '.join(parts)}, {self.summary()}"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"


_COLUMNS: list[Column[Memory]] = [
    Column("temp", lambda m: _mebibytes(m.temp_bytes), is_number=True),
    Column("argument", lambda m: _mebibytes(m.argument_bytes), is_number=True),
    Column("output", lambda m: _mebibytes(m.output_bytes), is_number=True),
    Column("alias", lambda m: _mebibytes(m.alias_bytes), is_number=True),
]


@written_as("memory(step, params, batch)")
def memory(
    step: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> Memory:
    """Compile `step` for these arguments and report the memory it takes.

    Nothing runs. With a `target` no such device is needed: XLA's GPU compiler compiles
    for 't4' (15 GiB), 'l4' and 'a10g' (22), 'rtx4090' (23), 'a100' and 'h100' (79),
    'h200' (141) and 'b200' (178) on any Linux machine; capitals, blanks and hyphens do
    not matter. For a board with another size give that to `plan` or `max_batch` as
    `budget`. The numbers are for one device, also where the program is sharded over
    several.

    Not included: workspaces that cuDNN and cuBLAS allocate when they run, the XLA
    runtime's own memory, and kernel choices that autotuning on a device would make.

    Args:
      step: a function. If it is jitted its static and donated arguments count;
        otherwise it is jitted with neither.
      *args: its arguments: pytrees with arrays or `jax.ShapeDtypeStruct`, and static
        values where `step` declares them.
      target: the GPU to compile for; `None` is the local backend.
      **kwargs: its keyword arguments.

    Raises:
      ValueError: an unknown target; a target, and an argument that is sharded over
        several devices; no target, and a local backend that reports no memory.
      ImportError: the packages that compile for a target are missing.
      NotImplementedError: a target, and a step that asks for cuDNN while it is traced.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> jaxact.memory(lambda x: x @ x, x).output_bytes
      4194304
    """
    return measure(compile_step(step, args, kwargs, target))


def measure(compiled: Compiled) -> Memory:
    """The memory that a compiled program takes.

    Raises:
      ValueError: its backend does not say.
    """
    stats: Any = compiled.memory_analysis()
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    # A program without arrays is compiled for the local backend, whatever the target.
    device = first_device(shardings)
    if stats is None or (stats.output_size_in_bytes == 0 < _output_bytes(compiled)):
        raise ValueError(
            f"jaxact.memory: the backend of {device.device_kind} reports no memory of "
            "compiled programs. Compile for another: memory(..., target='h100')."
        )
    return Memory(
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        device=device.device_kind,
    )


def first_device(shardings: Sequence[jax.sharding.Sharding]) -> Device:
    """Where a program runs whose arrays have these; without any, the local backend."""
    devices = shardings[0].device_set if shardings else jax.local_devices()
    return min(devices, key=lambda d: d.id)


def _output_bytes(compiled: Compiled) -> int:
    outputs = jax.tree.leaves(compiled.out_info)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in outputs)

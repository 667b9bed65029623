"""How much memory a compiled step takes, here or on a GPU that is not attached.

What JAX lists as residuals and what a compiled program allocates are different
numbers: XLA fuses, rematerialises and shares buffers. This asks the compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxact._memory.compiling import compile_step
from jaxact._tabular import Tabular


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
    return measure(compile_step(step, args, kwargs, target))


def measure(compiled: Any) -> Memory:
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

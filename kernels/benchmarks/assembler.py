"""NVIDIA's assembler's report about a function's kernels, with no GPU attached.

XLA calls `ptxas` from a folder that a compile option names. There we leave a script
that calls the real one and keeps its input and output. Kernels that reach the GPU
by another way, as Pallas's Mosaic GPU kernels do, are not seen.
"""

import contextlib
import dataclasses
import importlib.util
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import jax

from jaxact._memory.compiling import (
    abstract_on,
    complete_toolchain,
    device_of,
    lowering_for,
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as assembled; sizes in bytes, all but shared memory for each thread.

    `ptx` and `cubin` are the whole module that holds the kernel, perhaps with others.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int  # for each block, static
    ptx: str = dataclasses.field(repr=False)
    cubin: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function, `jax.stages.Compiled`, and its kernels, sorted by name.

    XLA shares one kernel between calls that would be equal.
    """

    compiled: object
    kernels: list[Kernel]


def assemble(function, *args, target="h100", **kwargs):
    """Compile `function` for `target` and report its kernels.

    Args are those of `jaxact.memory`. Raises ImportError where the packages that
    compile for a target are missing, and RuntimeError where no kernel was assembled.
    """
    traceable = function if hasattr(function, "trace") else jax.jit(function)
    args, kwargs = jax.tree.map(abstract_on(device_of(target)), (args, kwargs))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _wrap_assembler(folder)
        stack.enter_context(lowering_for(target))
        stack.enter_context(complete_toolchain(target))
        lowered = traceable.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
        options = {"xla_gpu_cuda_data_dir": str(folder)}
        compiled = lowered.compile(compiler_options=options)
        # XLA may assemble a kernel more than once; the last is reported.
        calls = sorted(folder.glob("kept.*"), key=lambda call: call.stat().st_mtime_ns)
        kernels = {kernel.name: kernel for call in calls for kernel in kernels_in(call)}
    if not kernels:
        raise RuntimeError(f"no kernel of {function} passed through ptxas")
    return Program(compiled, [kernels[name] for name in sorted(kernels)])


def tool(name):
    """Path of a tool of NVIDIA's toolkit: from a wheel, or else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else []:
        for path in sorted(Path(root).glob(f"cu*/bin/{name}"), reverse=True):
            return path
    path = shutil.which(name)
    if path is None:
        package = {"ptxas": "nvcc"}.get(name, name)
        raise ImportError(
            f"{name} of NVIDIA's toolkit is not here. No GPU is needed:\n"
            f"  pip install nvidia-cuda-{package}"
        )
    return Path(path)


def _wrap_assembler(folder):
    real = tool("ptxas")
    script = folder / "bin" / "ptxas"
    script.parent.mkdir()
    script.write_text(_SCRIPT.format(real=shlex.quote(str(real)), folder=folder))
    script.chmod(0o755)
    # XLA looks for libdevice, the maths library, in the same folder.
    library = real.resolve().parent.parent / "nvvm"
    if library.exists():
        (folder / "nvvm").symlink_to(library)


# XLA asks for versions first, without a file. Of calls with one it makes several at a
# time, so that each has a folder of its own.
_SCRIPT = """#!/bin/sh
[ -f "$1" ] || exec {real} "$@"
kept=$(mktemp -d {folder}/kept.XXXXXX)
cp "$1" "$kept/ptx"
{real} "$@" -v 2> "$kept/report" || {{ cat "$kept/report" >&2; exit 1; }}
while [ "$1" != -o ]; do shift; done
cp "$2" "$kept/cubin"
"""

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SIZES = {
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "registers": r"Used (\d+) registers",
}


def kernels_in(folder):
    """Kernels that one call assembled, from its `ptx`, `cubin` and `report`.

    `ptxas -v` writes a paragraph for each entry function to the last.
    """
    ptx, cubin = (folder / "ptx").read_text(), (folder / "cubin").read_bytes()
    _, *parts = _ENTRY.split((folder / "report").read_text())
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        sizes = {size: int(_first(pattern, text)) for size, pattern in _SIZES.items()}
        shared = re.search(r"(\d+) bytes smem", text)
        sizes["shared"] = int(shared[1]) if shared else 0
        yield Kernel(name, **sizes, ptx=ptx, cubin=cubin)


def _first(pattern, text):
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"ptxas wrote no {pattern!r} in {text!r}")
    return match[1]

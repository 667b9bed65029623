"""Bound the speed of the kernels on an H100 from their machine code alone.

  python kernels/benchmarks/count.py [--bits 2 4] [--implementations triton]

Needs the packages of jaxact's `targets` extra and nvidia-cuda-nvdisasm.

Counted are the instructions that a thread runs where all elements are ordinary numbers,
by the pipe that runs them. The branch for other numbers is told apart by its
instructions: the Triton kernels load their elements a second time there, the Mosaic GPU
kernels run more. The busiest pipe, or memory, sets a lower bound for time, were every
latency hidden and every byte moved once: an upper bound for speed, no measurement.

How much a multiprocessor's pipes finish in a clock is from the CUDA C++ Programming
Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0: 128
additions and multiplications in float32; 64 integer additions, comparisons, minima,
shifts, logic, multiplications, and conversions, but 16 in the special function unit; 32
shuffles; 16 reductions over a warp.
Four schedulers issue an instruction each, for 32 threads. Integer multiplications run
in one half of the float32 pipe, so they are counted in both.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import assembler
import jax
from machine_code import disassemble, in_flight, loaded_bytes, ordinary_path

from jaxact._memory import compiling
from jaxact_kernels import affine, mask, rotated
from jaxact_kernels.affine import mosaic_block
from jaxact_kernels.config import Config, heuristic
from jaxact_kernels.index import reference as index, triton as index_triton
from jaxact_kernels.layout import layout_of

FOLDER = Path(__file__).parent
SHAPE = (8192, 1024)
TARGET = "h100"
IMPLEMENTATIONS = ["triton", "mosaic_gpu"]
FORMATS = ["affine", "mask", "rotated", "adaptive"]
MASKS = ("encode", "bool"), ("encode above", "bfloat16"), ("decode", "bool")

# NVIDIA H100 SXM data sheet; the clock is the boost clock that its peaks assume.
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 3.35e12
THROUGHPUT = {
    "issue": 128,
    "alu": 64,
    "fma": 128,
    "imad": 64,
    "special": 16,
    "memory": 32,
    "reduction": 16,
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel, by its task.

    Attributes:
        format: `affine`, `rotated`, `adaptive` (in the module `rotated`) or `mask`.
        operation: `encode`, `decode`, or `encode above`, which compares with 0.
        dtype: of the unpacked array.
        config: None for the heuristic's.
    """

    format: str
    operation: str
    implementation: str
    bits: int
    dtype: str = "bfloat16"
    group_size: int = 256
    config: Config | None = None

    @property
    def module(self) -> Any:
        folder = self.format.replace("adaptive", "rotated")
        name = f".{folder}.{self.implementation}"
        return importlib.import_module(name, "jaxact_kernels")

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(SHAPE, self.dtype)

    @property
    def stored(self) -> Any:
        if self.format == "mask":
            return jax.eval_shape(mask.encode, jax.ShapeDtypeStruct(SHAPE, "bool"))
        seed, options = jax.ShapeDtypeStruct((), "uint32"), self._options
        encode = affine.encode if self.format == "affine" else rotated.encode
        return jax.eval_shape(functools.partial(encode, **options), self.x, seed)

    @property
    def _options(self) -> dict[str, int]:
        options = {"bits": self.bits, "group_size": self.group_size}
        if self.format != "affine":
            options["is_adaptive"] = self.format == "adaptive"
        return options

    @property
    def block(self) -> Config:
        """The block that the kernel has."""
        item_bytes = self.x.dtype.itemsize
        if self.format == "mask":
            layout = index.index_layout(SHAPE)
            return self.config or index_triton.heuristic(layout, self.bits, item_bytes)
        if self.format != "affine":
            return self.config or self.module.CONFIG
        layout = layout_of(SHAPE, self.group_size)
        block = self.config or heuristic(layout.group, item_bytes)
        if self.implementation == "triton":
            return block
        tiles = self.module.tiles_for(layout, self.bits, self.dtype, block)
        return Config(tiles.groups, mosaic_block.WARPS)

    @property
    def elements(self) -> float:  # in a thread
        group = index.GROUP_SIZE if self.format == "mask" else self.group_size
        return self.block.groups * group / (32 * self.block.num_warps)

    def call(self) -> tuple[Any, ...]:
        """The function and its operands."""
        config = self.config if self.format in ("affine", "mask") else self.block
        encode = functools.partial(self.module.encode, config=config)
        decode = functools.partial(self.module.decode, shape=SHAPE, config=config)
        if self.format == "mask":
            above = jax.ShapeDtypeStruct((), self.dtype)
            if self.operation == "decode":
                return decode, self.stored
            return encode, self.x, *([above] if "above" in self.operation else [])
        if self.operation == "decode":
            decode = functools.partial(decode, dtype=self.dtype, **self._options)
            return decode, self.stored
        seed, options = jax.ShapeDtypeStruct((), "uint32"), self._options
        options |= {"stochastic": True} if self.format == "affine" else {}
        return functools.partial(encode, **options), self.x, seed


def assemble(subject: Subject) -> Any:
    """The kernel for a subject, as `assembler` reports it."""
    if subject.implementation == "mosaic_gpu":
        return _assemble_mosaic(*subject.call())
    (kernel,) = assembler.assemble(*subject.call(), target=TARGET).kernels
    return kernel


def _assemble_mosaic(function: Any, *operands: Any) -> Any:
    """Mosaic GPU calls the assembler itself, and leaves us its PTX."""
    operands = jax.tree.map(
        compiling.abstract_on(compiling.device_of(TARGET)), operands
    )
    with (
        tempfile.TemporaryDirectory() as name,
        unittest.mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=name),
        unittest.mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTX="1"),
        compiling.lowering_for(TARGET),
        compiling.complete_toolchain(TARGET),
    ):
        traced = jax.jit(function).trace(*operands)
        traced.lower(lowering_platforms=("cuda",)).compile()
        (dumped,) = (folder := Path(name)).glob("*.ptx")
        ptx = dumped.rename(folder / "ptx").read_text()
        architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
        command = [str(assembler.tool("ptxas")), "-v", f"-arch={architecture}"]
        command += [str(folder / "ptx"), "-o", str(folder / "cubin")]
        with (folder / "report").open("w") as report:
            subprocess.run(command, stderr=report, check=True)
        (kernel,) = assembler.kernels_in(folder)
    return kernel


def count(subject: Subject) -> dict:
    """Counts and bounds for a kernel."""
    kernel, elements = assemble(subject), subject.elements
    code = disassemble(kernel)
    is_encode, unpacked = subject.operation != "decode", subject.x.dtype.itemsize
    path = ordinary_path(
        code,
        is_shorter=subject.implementation == "mosaic_gpu",
        bytes_in_loop=int(elements * unpacked) if is_encode else 0,
    )
    packed = sum(part.size * 4 for part in jax.tree.leaves(subject.stored))
    packed /= math.prod(SHAPE)
    read, written = (unpacked, packed) if is_encode else (packed, unpacked)
    # An adaptive encoder loads elements once more, from the first-level cache.
    passes = 2 if subject.format == "adaptive" and is_encode else 1
    if not read <= loaded_bytes(path) / elements <= 1.5 * passes * read + 0.25:
        raise RuntimeError(f"{loaded_bytes(path)} bytes loaded: not the ordinary path")
    counts = collections.Counter(instruction.pipe for instruction in path)
    names = collections.Counter(f"{each.pipe} {each.name}" for each in path)
    counts["fma"] += counts["imad"]
    counts["issue"] = len(path)
    clocks = {pipe: counts[pipe] / elements / THROUGHPUT[pipe] for pipe in THROUGHPUT}
    rates = {
        pipe: unpacked * MULTIPROCESSORS * CLOCK / clock
        for pipe, clock in clocks.items()
        if clock
    } | {"HBM": unpacked * BANDWIDTH / (read + written)}
    bound = min(rates, key=rates.__getitem__)
    return dataclasses.asdict(subject) | {
        "config": dataclasses.asdict(subject.block),
        "registers": kernel.registers,
        "uses_shared": ".shared." in kernel.ptx,
        "spilled_bytes": kernel.spill_stores + kernel.spill_loads,
        "instructions_in_kernel": len(code.instructions),
        "instructions_on_path": len(path),
        "elements_per_thread": elements,
        "bytes_in_flight_per_thread": in_flight(path),
        "operations_per_element": {k: n / elements for k, n in names.most_common(16)},
        "per_element": {pipe: counts[pipe] / elements for pipe in THROUGHPUT},
        "bytes_read": read,
        "bytes_written": written,
        "logical_bytes_per_second": rates,
        "compute_bytes_per_second": min(rates[pipe] for pipe in rates if pipe != "HBM"),
        "bound": bound,
        "expected_bytes_per_second": rates[bound],
    }


def assumed() -> dict:
    """Constants that turn counts into time, and the compiler's versions."""
    ptxas = [str(assembler.tool("ptxas")), "--version"]
    version = subprocess.run(ptxas, capture_output=True, text=True, check=True).stdout
    return {
        "target": TARGET,
        "jax": jax.__version__,
        "ptxas": re.search(r"release [\d.]+, V([\d.]+)", version)[1],
        "date": datetime.date.today().isoformat(),
        "assumed": {
            "multiprocessors": MULTIPROCESSORS,
            "clock_hz": CLOCK,
            "hbm_bytes_per_second": BANDWIDTH,
            "results_per_clock": THROUGHPUT,
        },
    }


def table(rows: list[dict]) -> str:
    columns = ["kernel", "by", "dtype", "bits", "registers", *THROUGHPUT]
    columns += ["read", "written", "compute TB/s", "HBM TB/s", "bound"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"{row['format']} {row['operation']}"]
        cells += [row[k] for k in ("implementation", "dtype", "bits", "registers")]
        cells += [f"{number:.2f}" for number in row["per_element"].values()]
        cells += [f"{row[k]:.3f}" for k in ("bytes_read", "bytes_written")]
        speeds = row["compute_bytes_per_second"], row["logical_bytes_per_second"]["HBM"]
        cells += [*(f"{speed / 1e12:.2f}" for speed in speeds), row["bound"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def subjects(
    formats: list[str], implementations: list[str], bits: list[int]
) -> list[Subject]:
    each = itertools.product(formats, ("encode", "decode"), implementations, bits)
    kernels = [
        Subject(*case)
        for case in each
        if case[0] == "affine" or (case[0] != "mask" and case[2] == "triton")
    ]
    has_masks = "mask" in formats and "triton" in implementations
    masks = MASKS if has_masks else ()
    return kernels + [Subject("mask", op, "triton", 1, dtype) for op, dtype in masks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS)
    default = FOLDER / "results" / "h100-count.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    cases = subjects(options.formats, options.implementations, options.bits)
    rows = [count(s) for s in cases]
    command = " ".join(["python kernels/benchmarks/count.py", *sys.argv[1:]])
    results = assumed() | {"command": command, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

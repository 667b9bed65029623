"""Bound the speed of the Triton kernels on an H100 from their machine code alone.

  python kernels/benchmarks/count.py [--bits 2 4]

Needs the packages of jaxact's `targets` extra and nvidia-cuda-nvdisasm.

Counted are the instructions that a thread runs where all elements are ordinary numbers,
by the pipe that runs them; the other side of that branch loads its elements again, by
which it is told apart. Time is at least that of the busiest pipe, or of memory, were
every latency hidden and every byte moved once: an upper bound of speed, no measurement.

What a multiprocessor's pipes finish in a clock is from the CUDA C++ Programming Guide,
"Throughput of Native Arithmetic Instructions", compute capability 9.0: 128 additions
and multiplications of float32; 64 integer additions, comparisons, minima, shifts,
logic, multiplications, and conversions, but 16 of what the special function unit
does; 32 shuffles; 16 reductions over a warp.
Four schedulers issue an instruction each, for 32 threads. Integer multiplications run
in one half of the float32 pipe, so they are counted in both.
"""

import argparse
import collections
import datetime
import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxact_kernels import affine, config
from jaxact_kernels.affine import triton
from jaxact_kernels.layout import layout_of

FOLDER = Path(__file__).parent
SHAPE = (8192, 1024)
DTYPE = jnp.dtype("bfloat16")
GROUP_SIZE = 256

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
PIPES = {
    "fma": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "imad": "IMAD",
    "special": "MUFU F2I I2F F2F POPC FLO BREV",
    "memory": "LDG STG LDS STS LDL STL LDSM STSM SHFL ATOM ATOMS RED",
    "reduction": "REDUX",
    "issue": "ACQBULK BAR BRA BSSY BSYNC CS2R DEPBAR EXIT LDC MEMBAR NOP PREEXIT R2UR "
    "S2R S2UR VOTEU WARPSYNC",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}


class Instruction(NamedTuple):
    is_conditional: bool
    operation: str
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def pipe(self) -> str:
        """Where it runs; `issue` if no pipe but the schedulers is at stake."""
        is_uniform = self.name.startswith("U")
        return PIPE_OF.get(self.name, "issue" if is_uniform else "alu")

    @property
    def loaded_bytes(self) -> int:
        """Bytes a thread reads from global memory."""
        if self.name != "LDG":
            return 0
        width = re.search(r"\.[US]?(8|16|64|128)\b", self.operation)
        return int(width[1]) // 8 if width else 4


class Code(NamedTuple):
    """A kernel's instructions, and where its labels point."""

    instructions: list[Instruction]
    labels: dict[str, int]


def disassemble(kernel) -> Code:
    nvdisasm = _assembler().tool("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        command = [str(nvdisasm), "--print-code", file.name]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    code = Code([], {})
    inside = False
    for line in ran.stdout.splitlines():
        if line.startswith(".text."):
            inside = line == f".text.{kernel.name}:"
        if not inside:
            continue
        if label := re.match(r"(\.L_\w+):", line):
            code.labels[label[1]] = len(code.instructions)
        if found := re.match(r"\s+/\*\w+\*/\s+(@!?\w+ )?\s*([A-Z][\w.]*)(.*?);", line):
            code.instructions.append(Instruction(bool(found[1]), found[2], found[3]))
    return code


def ordinary_path(code: Code) -> list[Instruction]:
    """Instructions from the entry to the exit, on the side that loads nothing again.

    Of sides that load the same, the longer: some threads run it.
    """

    @functools.cache
    def path_from(start: int) -> tuple[Instruction, ...]:
        path = []
        for here in range(start, len(code.instructions)):
            instruction = code.instructions[here]
            path.append(instruction)
            if instruction.name == "EXIT" and not instruction.is_conditional:
                break
            if instruction.name in ("BRX", "CALL", "JMP", "RET"):
                raise NotImplementedError(f"{instruction} leads where no label says")
            if instruction.name == "BRA":
                target = code.labels[re.search(r"\((\.L_\w+)\)", instruction[2])[1]]
                if target <= here:
                    raise NotImplementedError("a loop: how often it runs is not known")
                sides = [path_from(target)]
                if instruction.is_conditional:
                    sides.append(path_from(here + 1))
                path += min(sides, key=lambda side: (_loaded(side), -len(side)))
                break
        return tuple(path)

    return list(path_from(0))


def count(operation: str, bits: int) -> dict:
    """Counts and bounds of `encode` or `decode`."""
    program = _assembler().assemble(*_call(operation, bits), target="h100")
    (kernel,) = program.kernels
    code = disassemble(kernel)
    path = ordinary_path(code)
    layout = layout_of(SHAPE, GROUP_SIZE)
    block = config.heuristic(layout.group, DTYPE.itemsize)
    elements = block.groups * layout.group / (32 * block.num_warps)  # of one thread
    packed = bits / 8 + 4 / layout.group
    read, written = DTYPE.itemsize, packed
    if operation == "decode":
        read, written = written, read
    if not read <= _loaded(path) / elements <= 1.5 * read + 0.25:
        raise RuntimeError(
            f"the path loads {_loaded(path)} bytes: not the ordinary one"
        )
    counts = collections.Counter(instruction.pipe for instruction in path)
    counts["fma"] += counts["imad"]
    counts["issue"] = len(path)
    clocks = {pipe: counts[pipe] / elements / THROUGHPUT[pipe] for pipe in THROUGHPUT}
    rates = {
        pipe: DTYPE.itemsize * MULTIPROCESSORS * CLOCK / clock
        for pipe, clock in clocks.items()
        if clock
    } | {"HBM": DTYPE.itemsize * BANDWIDTH / (read + written)}
    bound = min(rates, key=rates.__getitem__)
    return {
        "operation": operation,
        "bits": bits,
        "registers": kernel.registers,
        "instructions_in_kernel": len(code.instructions),
        "instructions_on_path": len(path),
        "elements_per_thread": elements,
        "operations_per_element": _most_common(path, elements),
        "per_element": {pipe: counts[pipe] / elements for pipe in THROUGHPUT},
        "bytes_read": read,
        "bytes_written": written,
        "logical_bytes_per_second": rates,
        "bound": bound,
        "expected_bytes_per_second": rates[bound],
    }


def table(rows: list[dict]) -> str:
    columns = ["op", "bits", "registers", *THROUGHPUT, "read", "written"]
    columns += ["compute TB/s", "HBM TB/s", "bound"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        rates = row["logical_bytes_per_second"]
        compute = min(rate for pipe, rate in rates.items() if pipe != "HBM")
        cells = [row["operation"], row["bits"], row["registers"]]
        cells += [f"{number:.2f}" for number in row["per_element"].values()]
        cells += [f"{row['bytes_read']:.3f}", f"{row['bytes_written']:.3f}"]
        cells += [f"{compute / 1e12:.2f}", f"{rates['HBM'] / 1e12:.2f}", row["bound"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _call(operation: str, bits: int):
    x, seed = jax.ShapeDtypeStruct(SHAPE, DTYPE), jax.ShapeDtypeStruct((), "uint32")
    options = {"bits": bits, "group_size": GROUP_SIZE}
    if operation == "encode":
        encode = functools.partial(triton.encode, **options, stochastic=True)
        return encode, x, seed
    encode = functools.partial(affine.encode, **options)
    decode = functools.partial(triton.decode, shape=SHAPE, dtype=DTYPE, **options)
    return decode, jax.eval_shape(encode, x, seed)


def _most_common(path, elements: float) -> dict[str, float]:
    found = collections.Counter(f"{i.pipe} {i.name}" for i in path)
    return {name: n / elements for name, n in found.most_common(16)}


def _loaded(path) -> int:
    return sum(instruction.loaded_bytes for instruction in path)


@functools.cache
def _assembler():
    # The tests read the assembler's report with the same helper.
    sys.path.append(str(FOLDER.parents[1] / "tests"))
    import assembler

    return assembler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    default = FOLDER / "results" / "h100-count.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    rows = [count(op, bits) for op in ("encode", "decode") for bits in options.bits]
    ptxas = [str(_assembler().tool("ptxas")), "--version"]
    version = subprocess.run(ptxas, capture_output=True, text=True, check=True).stdout
    results = {
        "target": "h100",
        "dtype": DTYPE.name,
        "group_size": GROUP_SIZE,
        "jax": jax.__version__,
        "ptxas": re.search(r"release [\d.]+, V([\d.]+)", version)[1],
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python kernels/benchmarks/count.py", *sys.argv[1:]]),
        "assumed": {
            "multiprocessors": MULTIPROCESSORS,
            "clock_hz": CLOCK,
            "hbm_bytes_per_second": BANDWIDTH,
            "results_per_clock": THROUGHPUT,
        },
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

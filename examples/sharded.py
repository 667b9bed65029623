"""Train the GPT of gpt.py on several devices: data parallel, and fully sharded (FSDP).

  python examples/sharded.py --devices 8 --mesh 2 4           simulated, on a CPU
  python examples/sharded.py --size full --data TEXT          all GPUs of a host
  srun python examples/sharded.py --mesh 2 8 --distributed    two hosts of eight GPUs
  python examples/sharded.py --devices 4 --mesh 2 4 --coordinator localhost:7000 \\
    --processes 2 --process 0 & the same with --process 1     two processes, on a CPU

A batch is spread over all devices of the mesh, in both of its directions. Matrices and
their optimizer state are spread over the second one, "fsdp": XLA gathers
those of a layer when it needs them, in the forward and again in the backward pass.
Compression works on each device's own arrays, so it adds nothing to the exchange.
How processes find each other: `jax.distributed.initialize`. If one ends, so do the
others, with an error; the same commands go on from --checkpoint, a folder that all see.

Small, with `--data tinyshakespeare.txt`: the network and the steps of gpt.py, about
140 s of CPU time and 0.9 GB (2-core CPU, JAX 0.12.0, 4 bits, one seed). Temporaries are
those of one device; the table's residuals are those of all:

                              validation    temp, uncompressed    temp, 4 bits
  --devices 8 --mesh 2 4      2.063 nats               8.4 MiB         3.3 MiB
  --devices 1                 2.064 nats              57.4 MiB        15.5 MiB

and at the end, on 8 devices, 13 all-gathers and 7 all-reduces in both programs, those
of a loop counted once.

Full, one of eight: `--size full --devices 8 --dry-run --data tinyshakespeare.txt` gives
6980 and 1316 MiB, compiled for the CPU. Compiled for an H100, one device's part of the
batch takes 7147 and 1346 MiB without the sharding (`gpt.py --size full --batch 4
--dry-run --target h100`). Neither was run on a GPU.
"""

import argparse
import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import command
import gpt
import jax
import loop
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from models.gpt_nnx import Block
from rich.console import Console
from rich.table import Table

import jaxact

BATCH = P(("data", "fsdp"))
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter"),
    *("all-to-all", "collective-permute"),
)


class ShardedBlock(Block):
    """A block whose activations are spread by sequence, on the mesh of the context."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, BATCH)
        return jax.lax.with_sharding_constraint(super().__call__(x), BATCH)


def training(options: argparse.Namespace, mesh: Mesh) -> loop.Training:
    """The training of gpt.py, on a mesh."""
    plain = gpt.training(options, ShardedBlock)
    size = len(next(plain.batches(0)))
    if size % mesh.size:
        raise ValueError(
            f"a batch of {size} sequences on a mesh of {mesh.size} devices: as many "
            f"for each are required; give --batch {mesh.size} or a multiple of it"
        )
    spread = NamedSharding(mesh, BATCH)

    def init() -> Any:
        places = shardings(mesh, jax.eval_shape(plain.init))
        return jax.jit(plain.init, out_shardings=places)()

    def batches(start: int) -> Iterator[jax.Array]:
        for batch in plain.batches(start):  # the same in all processes
            part = lambda index, batch=batch: batch[index]
            yield jax.make_array_from_callback(batch.shape, spread, part)

    return dataclasses.replace(
        plain,
        name=f"{plain.name}, {mesh.shape['data']} x {mesh.shape['fsdp']} devices",
        init=init,
        batches=batches,
        part=lambda batch: batch,
        shardings=lambda state: shardings(mesh, state),
    )


def shardings(mesh: Mesh, tree: Any) -> Any:
    """Matrices over "fsdp", by their last axis; the small rest whole on each device."""

    def one(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        is_matrix = "kernel" in name or "embedding" in name
        if is_matrix and x.shape[-1] % mesh.shape["fsdp"] == 0:
            return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp"))
        return NamedSharding(mesh, P())

    return jax.tree.map_with_path(one, tree)


def compiled(training: loop.Training, policy: jaxact.Policy | None) -> Any:
    """The program of a step."""
    state, batch = loop.shapes(training), next(training.batches(0))
    places = training.shardings(state)
    step = loop.training_step(training.loss(policy), training.optimizer, places)
    return step.lower(state, batch).compile()


def collectives(program: Any) -> collections.Counter[str]:
    """How many of each kind a program has; those of a loop count once."""
    kinds = "|".join(COLLECTIVES)  # on a GPU: NAME-start and NAME-done
    calls = re.findall(rf" ({kinds})(?:-start)?\(", program.as_text())
    return collections.Counter(calls)


def exchanged(training: loop.Training, bits: int) -> Table:
    """The exchange between devices in a step, uncompressed and compressed."""
    policies = {"uncompressed": None, f"jaxact, {bits} bits": jaxact.Policy(bits)}
    found = [collectives(compiled(training, policy)) for policy in policies.values()]
    table = Table("", *policies, title="Collectives of a step")
    for kind in COLLECTIVES:
        table.add_row(kind, *(str(count[kind]) for count in found))
    return table


def parse() -> argparse.Namespace:
    parser = loop.parser(__doc__)
    sizes = "sizes of the mesh; 1 and all devices"
    count, names = command.at_least_one, ("DATA", "FSDP")
    parser.add_argument("--mesh", type=count, nargs=2, metavar=names, help=sizes)
    parser.add_argument(
        "--devices", type=count, help="so many simulated, on a CPU, in each process"
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="several processes, as SLURM, MPI or the cloud started them",
    )
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=count, help="so many; with --coordinator")
    number, which = command.at_least_zero, "the number of this one, from 0"
    parser.add_argument("--process", type=number, help=which)
    options = parser.parse_args()
    if options.target is not None:
        parser.error(
            "--target compiles for one GPU, this example for a mesh: use gpt.py with "
            "--batch set to the part that one device of the mesh gets"
        )
    numbers = options.coordinator, options.processes, options.process
    if None in numbers and any(number is not None for number in numbers):
        parser.error("--coordinator, --processes and --process are required together")
    return options


def connect(options: argparse.Namespace) -> None:
    """Make the devices of all processes one set of devices."""
    if options.distributed or options.coordinator is not None:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            # A process that is gone is noticed after so long where no error tells.
            heartbeat_timeout_seconds=30,
        )


def main() -> None:
    options = parse()
    with command.short_errors():
        if options.devices is not None:  # before JAX looks for devices
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", options.devices)
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        connect(options)
        sizes, types = options.mesh or (1, jax.device_count()), (AxisType.Auto,) * 2
        mesh = jax.make_mesh(sizes, ("data", "fsdp"), types)
        with jax.set_mesh(mesh):
            chosen = training(options, mesh)
            loop.run(chosen, options)
            table = exchanged(chosen, options.bits)
    Console(quiet=jax.process_index() > 0).print(table)


if __name__ == "__main__":
    main()

"""The largest batch whose training step fits a GPU, in several ways; no GPU needed.

  python examples/benchmarks/batch.py --model gpt2-medium --memory 24GiB 80GiB \\
      --output examples/benchmarks/results/batch

Each row is certified by the target's compiler: the batch fits, the next one (8 more for
networks of images) does not, both compiled; 5 % of the memory stays free. A step
is value, gradient and AdamW update, its state donated. With OUTPUT, OUTPUT.json gets
each row as it is found, and OUTPUT.md the tables; rows that the file has are not
searched again. Nothing runs, so nothing is said about time.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from environment import environment
from step_networks import FULL, NETWORKS, Network
from step_runs import Trainer
from step_ways import WAYS, Way, compressed, compressed_checkpoint

import jaxact

Record = dict[str, Any]
ROWS: dict[str, Way] = {
    way.name: way
    for way in (
        WAYS["uncompressed"],
        WAYS["checkpoint"],
        compressed("jaxact 4 bits", bits=4),
        compressed("jaxact 2 bits", bits=2),
        compressed("jaxact 1 bit", bits=1),
        compressed_checkpoint("jaxact 1 bit + checkpoint", bits=1),
    )
}
# ActNN: Chen et al. 2021, arXiv:2104.14129, abstract; GACT: Liu et al. 2022,
# arXiv:2206.11357, abstract.
OTHERS = """\
The authors' own figures, on other networks and GPUs, for comparison: ActNN trains with
6.6 to 14 times the batch, GACT with 4.2 to 24.7 times."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    choice("--model", choices=NETWORKS, default=list(FULL), help=", ".join(NETWORKS))
    choice("--rows", choices=ROWS, default=list(ROWS), help="; ".join(ROWS))
    parser.add_argument("--memory", nargs="+", default=["24GiB", "80GiB"])
    parser.add_argument("--target", default="h100", help="GPU to compile for")
    parser.add_argument("--output", type=Path, help="name of files, without a suffix")
    return parser.parse_args()


def largest(name: str, way: Way, memory: str, target: str) -> Record:
    """The largest batch for one network, way and memory."""
    network = NETWORKS[name]
    unit = 8 if network.unit == "images" else 1

    def step_of_batch(size: int) -> tuple[Any, tuple[Any, Any]]:
        trainer = Trainer(dataclasses.replace(network, batch=size), way)
        state = jax.eval_shape(trainer.init)
        return trainer.step, (state, batch_shapes(network, size))

    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        found = jaxact.max_batch(
            step_of_batch, target=target, budget=memory, multiple_of=unit
        )
    row = found.rows[0]
    return {
        "network": name,
        "way": way.name,
        "memory": memory,
        "target": target,
        "unit": network.unit,
        "multiple_of": unit,
        "limit": found.limit,
        "batch": row.batch,
        "bytes": row.bytes,
        "next_bytes": row.next_bytes,
        "compiled": {str(c.batch): c.bytes for c in row.compiled},
        "compiled_for": found.device,
    } | environment()


def batch_shapes(network: Network, size: int) -> Any:
    """A batch that does not exist: its first axis, and the others of a batch of 1."""
    (one,) = dataclasses.replace(network, batch=1).batches(1)
    arrays = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, one))
    struct = lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype)
    return jax.tree.map(struct, arrays)


def markdown(rows: list[Record]) -> str:
    """A table for each network, with a column for each memory."""
    lines = []
    for name in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == name]
        sizes = list(dict.fromkeys(row["memory"] for row in mine))
        step, first = mine[0]["multiple_of"], mine[0]
        by_key = {(row["way"], row["memory"]): row for row in mine}
        about = NETWORKS[name].about.replace(f", batch {NETWORKS[name].batch}", "")
        lines += [f"**{about}**; batches are multiples of {step}", ""]
        lines += [f"| | {' | '.join(sizes)} |", f"|---|{'---:|' * len(sizes)}"]
        for way in dict.fromkeys(row["way"] for row in mine):
            cells = [cell(by_key, way, size) for size in sizes]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        lines += ["", described(first), ""]
    return "\n".join([*lines, OTHERS, ""])


def cell(rows: dict[tuple[str, str], Record], way: str, memory: str) -> str:
    row = rows.get((way, memory))
    if row is None:
        return "-"
    base = rows.get(("uncompressed", memory))
    times = f" ({row['batch'] / base['batch']:.1f}x)" if base and base["batch"] else ""
    open_end = "" if row["next_bytes"] is not None else "at least "
    return f"{open_end}{row['batch']}{times}"


def described(row: Record) -> str:
    return (
        f"Compiled for {row['compiled_for']}, which was not attached; "
        f"JAX {row['jax']}, Flax {row['flax']}, jaxact {row['jaxact']}; "
        f"{row['date'][:10]}; `{row['command']}`."
    )


def main() -> None:
    options = parse()
    path = options.output and options.output.with_suffix(".json")
    rows = json.loads(path.read_text()) if path and path.exists() else []
    key = lambda row: (row["network"], row["way"], row["memory"])
    done = {key(row) for row in rows}
    for memory in options.memory:
        for name in options.model:
            for way in options.rows:
                if (name, way, memory) in done:
                    continue
                rows.append(largest(name, ROWS[way], memory, options.target))
                if path:
                    path.write_text(json.dumps(rows, indent=1) + "\n")
                    options.output.with_suffix(".md").write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()

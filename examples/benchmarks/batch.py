"""The largest batch, depth, width or resolution whose training step fits a GPU.

  python examples/benchmarks/batch.py --model gpt2-medium --memory 24GiB 80GiB \\
      --output examples/benchmarks/results/batch
  python examples/benchmarks/batch.py --model resnet152 --vary depth

No GPU is needed. Each row is certified by the target's compiler: the size fits, the
next one (8 more for batches of images) does not, both compiled; 5 % of the memory stays
free. A step is value, gradient and AdamW update, its state donated. With OUTPUT,
OUTPUT.json gets each row as it is found, and OUTPUT.md the tables; rows that the file
has are not searched again, but for those that were not certified, and their compiled
sizes serve other memories. Nothing runs, so nothing is said about time.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from environment import environment
from sizes import NAMES, sizes_of
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
# ActNN: Chen et al. 2021, arXiv:2104.14129, abstract and section 6.3; GACT: Liu et al.
# 2022, arXiv:2206.11357, abstract.
OTHERS = """\
The authors' own figures, on other networks and GPUs, for comparison: ActNN trains with
6.6 to 14 times the batch, ResNet-152 with 6.4 times the depth, 3.7 times the width or
3.1 times the resolution; GACT with 4.2 to 24.7 times the batch."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choice = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    choice("--model", choices=NETWORKS, help=", ".join(NETWORKS))
    choice("--rows", choices=ROWS, default=list(ROWS), help="; ".join(ROWS))
    parser.add_argument("--vary", choices=NAMES, default="batch", help="; ".join(NAMES))
    parser.add_argument("--memory", nargs="+", default=["24GiB", "80GiB"])
    parser.add_argument("--target", default="h100", help="GPU to compile for")
    parser.add_argument("--output", type=Path, help="name of files, without a suffix")
    options = parser.parse_args()
    if options.model is None:
        options.model = [name for name in FULL if options.vary in sizes_of(name)]
    for name in options.model:
        if options.vary not in sizes_of(name):
            known = ", ".join(sizes_of(name))
            parser.error(f"--vary {options.vary}: {name} has no such size, but {known}")
    return options


def largest(
    name: str, vary: str, way: Way, memory: str, target: str, earlier: list[Record]
) -> Record:
    """The largest size for one network, quantity, way and memory."""
    network, quantity = NETWORKS[name], sizes_of(name)[vary]
    start = time.perf_counter()

    def step_of_size(size: int) -> tuple[Any, tuple[Any, Any]]:
        resized = quantity.resized(network, size)
        trainer = Trainer(resized, way)
        return trainer.step, (jax.eval_shape(trainer.init), batch_shapes(resized))

    row: Record = {"network": name, "vary": vary, "way": way.name, "target": target}
    known = known_sizes(row, earlier)
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        if not quantity.has_parameters:
            _, (state, _) = step_of_size(quantity.multiple_of)
            known[0] = size_of(state) + size_of(state.params)
        found = jaxact.max_batch(
            step_of_size,
            {way.name: None},
            target=target,
            budget=memory,
            multiple_of=quantity.multiple_of,
            degree=quantity.degree,
            known={way.name: known},
        )
        best = found.rows[0]
        _, (state, batch) = step_of_size(max(best.batch, quantity.multiple_of))
    numbers = {
        "memory": memory,
        "unit": quantity.unit,
        "multiple_of": quantity.multiple_of,
        "limit": found.limit,
        "size": best.batch,
        "bytes": best.bytes,
        "next_bytes": best.next_bytes,
        "state_bytes": size_of(state),
        "gradient_bytes": size_of(state.params),
        "batch_bytes": size_of(batch),
        "compiled": {str(c.batch): c.bytes for c in best.compiled},
        "seconds": round(time.perf_counter() - start),
        "compiled_for": found.device,
    }
    return row | numbers | environment()


def known_sizes(row: Record, earlier: list[Record]) -> dict[int, int]:
    """Bytes by size that earlier rows have of the same step."""
    same = row | {name: environment()[name] for name in ("jax", "flax", "jaxact")}
    return {
        int(size): count
        for other in earlier
        if other | same == other
        for size, count in other["compiled"].items()
    }


def size_of(arrays: Any) -> int:
    """Bytes of a tree of arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def batch_shapes(network: Network) -> Any:
    """The network's batch, which does not exist: as a batch of 1, but longer."""
    (one,) = dataclasses.replace(network, batch=1).batches(1)
    arrays = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, one))
    struct = lambda a: jax.ShapeDtypeStruct((network.batch, *a.shape[1:]), a.dtype)
    return jax.tree.map(struct, arrays)


def markdown(rows: list[Record]) -> str:
    """A summary, then a table for each network and quantity, with all memories."""
    memories = dict.fromkeys(row["memory"] for row in rows)
    lines = [table for memory in memories for table in summary(rows, memory)]
    for key in dict.fromkeys(map(step_of, rows)):
        mine = [row for row in rows if step_of(row) == key]
        sizes = list(dict.fromkeys(row["memory"] for row in mine))
        columns = {size: [r for r in mine if r["memory"] == size] for size in sizes}
        lines += [title(mine[0]), table(columns), fixed_bytes(mine), described(mine)]
    return "\n\n".join([*lines, OTHERS]) + "\n"


def summary(rows: list[Record], memory: str) -> list[str]:
    """Tables with a column for each network: of batches, then of other quantities."""
    columns: dict[bool, dict[str, list[Record]]] = {True: {}, False: {}}
    for row in rows:
        if row["memory"] == memory:
            name, is_batch = NETWORKS[row["network"]].name, row["vary"] == "batch"
            head = name if is_batch else f"{name}: {row['vary']} ({row['unit']})"
            columns[is_batch].setdefault(head, []).append(row)
    kinds = {True: "batch", False: "depth, width, resolution"}
    return [
        f"**Largest {kinds[is_batch]} on {memory}**\n\n{table(found)}"
        for is_batch, found in columns.items()
        if found
    ]


def step_of(row: Record) -> tuple[str, str]:
    return row["network"], row["vary"]


def table(columns: dict[str, list[Record]]) -> str:
    """A column for each list of rows, a line for each way."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    by_way = [{row["way"]: row for row in rows} for rows in columns.values()]
    for way in ROWS:
        if any(way in rows for rows in by_way):
            cells = [cell(rows, way) for rows in by_way]
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def title(row: Record) -> str:
    network = NETWORKS[row["network"]]
    phrase = sizes_of(row["network"])[row["vary"]].phrase(network)
    about = network.about.replace(phrase, "")
    step = f", multiples of {row['multiple_of']}" if row["multiple_of"] > 1 else ""
    return f"**Largest {row['vary']}: {about}**; {row['unit']}{step}"


def cell(rows: dict[str, Record], way: str) -> str:
    row, base = rows.get(way), rows.get("uncompressed")
    if row is None:
        return "-"
    times = f" ({row['size'] / base['size']:.1f}x)" if base and base["size"] else ""
    open_end = "" if row["next_bytes"] is not None else "at least "
    return f"{open_end}{row['size']:,}{times}"


def fixed_bytes(rows: list[Record]) -> str:
    """The memory that stays, however residuals are kept."""
    gib = lambda count: f"{count / 2**30:.1f}"
    parts = [
        (gib(row["state_bytes"]), gib(row["gradient_bytes"]), gib(row["limit"]))
        for row in rows
    ]
    if rows[0]["vary"] in ("batch", "resolution"):  # the same for all
        state, gradients, _ = parts[0]
        return f"State takes {state} GiB and gradients {gradients} GiB at any size."
    found = [
        f"{row['way']} {state} + {gradients} of {limit}"
        for row, (state, gradients, limit) in zip(rows, parts, strict=True)
    ]
    return f"State + gradients at these sizes, GiB: {'; '.join(found)}."


def described(rows: list[Record]) -> str:
    row, times = rows[0], [row["seconds"] for row in rows]
    total = "" if None in times else f" {sum(times)} s;"
    commands = dict.fromkeys(f"`{row['command']}`" for row in rows)
    return (
        f"Compiled for {row['compiled_for']}, which was not attached; "
        f"JAX {row['jax']}, Flax {row['flax']}, jaxact {row['jaxact']}; "
        f"{row['date'][:10]};{total} {', '.join(commands)}."
    )


def main() -> None:
    options = parse()
    path = options.output and options.output.with_suffix(".json")
    rows = json.loads(path.read_text()) if path and path.exists() else []
    key = lambda row: tuple(
        row[name] for name in ("network", "vary", "way", "memory", "target")
    )
    done = {key(row) for row in rows if row["next_bytes"] is not None}
    for memory in options.memory:
        for name in options.model:
            for way in options.rows:
                if (name, options.vary, way, memory, options.target) in done:
                    continue
                chosen = name, options.vary, ROWS[way], memory, options.target
                found = largest(*chosen, rows)
                rows = [row for row in rows if key(row) != key(found)] + [found]
                if path:
                    path.write_text(json.dumps(rows, indent=1) + "\n")
                    options.output.with_suffix(".md").write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()

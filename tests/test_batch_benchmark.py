"""The tables of largest sizes, and the steps that they are compiled for."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytestmark = pytest.mark.unoptimized
EXAMPLES = Path(__file__).parent.parent / "examples"


def test_shapes_of_a_batch_that_does_not_exist(load):
    tiny = load("step_networks").NETWORKS["tiny"]
    (batch,) = tiny.batches(1)
    shapes = load("batch").batch_shapes
    assert shapes(tiny).shape == batch.shape
    assert shapes(dataclasses.replace(tiny, batch=5)).shape == (5, *batch.shape[1:])


def row(way, size, **changes):
    common = {"network": "tiny", "vary": "batch", "unit": "texts", "multiple_of": 1}
    common |= {"compiled_for": "H", "jax": "j", "flax": "f", "jaxact": "a"}
    common |= {
        "date": "2026-01-01T",
        "memory": "24GiB",
        "next_bytes": 1,
        "limit": 2**30,
    }
    common |= {"state_bytes": 2**29, "gradient_bytes": 2**28, "seconds": 60}
    return common | {"way": way, "size": size, "command": way} | changes


def test_the_table(load):
    """A ratio to the uncompressed step of the same memory; an end that is not known."""
    rows = [
        row("uncompressed", 10),
        row("jaxact 2 bits", 25),
        row("checkpoint", 40, next_bytes=None),
        row("uncompressed", 4, vary="width", unit="channels", multiple_of=64),
    ]
    text = load("batch").markdown(rows)
    both, sizes, batches, widths = text.split("**Largest ")[1:]
    assert "| | tiny GPT |" in both and "| jaxact 2 bits | 25 (2.5x) |" in both
    assert "| | tiny GPT: width (channels) |" in sizes
    assert batches.startswith("batch: tiny GPT, length 32, bfloat16, scanned")
    assert "| jaxact 2 bits | 25 (2.5x) |" in batches
    assert "| checkpoint | at least 40 (4.0x) |" in batches
    assert "State takes 0.5 GiB and gradients 0.2 GiB at any size." in batches
    assert "180 s; `uncompressed`, `jaxact 2 bits`, `checkpoint`." in batches
    assert "channels, multiples of 64" not in batches
    assert "| uncompressed | 4 (1.0x) |" in widths
    assert "GiB: uncompressed 0.5 + 0.2 of 1.0." in widths
    assert "6.6 to 14 times" in widths


def test_the_readme_has_the_tables_of_the_results(load):
    batch = load("batch")
    readme = (EXAMPLES / "README.md").read_text()
    results = EXAMPLES / "benchmarks" / "results"
    rows = json.loads((results / "batch.json").read_text())
    assert (results / "batch.md").read_text() == batch.markdown(rows)
    for table in batch.summary(rows, "24GiB"):
        assert table in readme, table


def parameters(network):
    params, _ = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.thorough
def test_sizes_grow_what_they_name(load):
    networks, sizes = load("step_networks").NETWORKS, load("sizes")
    deep, wide, large = (
        sizes.sizes_of("resnet152")[vary].resized(networks["resnet152"], size)
        for vary, size in (("depth", 94), ("width", 128), ("resolution", 448))
    )
    # Blocks are shared 8 to 36, as in ResNet-152 with its 50 blocks.
    assert deep.module.keywords["blocks_per_stage"] == (3, 16, 72, 3)
    plain = parameters(networks["resnet152"])
    assert parameters(large) == plain == 60_192_808
    # As torchvision's wide_resnet101_2 has.
    wide = dataclasses.replace(
        wide,
        module=sizes.with_module(wide, blocks_per_stage=(3, 4, 23, 3)).module,
    )
    assert parameters(wide) == 126_886_696
    assert large.example.shape == (1, 448, 448, 3)


def test_networks_without_the_size_are_refused_or_left_out(load, monkeypatch, capsys):
    batch = load("batch")
    command = ["batch.py", "--vary", "resolution"]
    monkeypatch.setattr(sys, "argv", command)
    assert batch.parse().model == ["resnet50"]
    monkeypatch.setattr(sys, "argv", [*command, "--model", "resnet50", "gcn"])
    with pytest.raises(SystemExit):
        batch.parse()
    assert "gcn has no such size, but batch, width" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-1b-lora", "bert-large", "gcn"])
def test_a_network_for_the_tables(load, name):
    """Its batch has the shape that its loss takes; only parameters have gradients."""
    networks, ways = load("step_networks").NETWORKS, load("step_ways").WAYS
    network = dataclasses.replace(networks[name], batch=2)
    if name == "gcn":
        network = dataclasses.replace(networks[name], batch=64)
    batch = load("batch").batch_shapes(network)
    (real,) = network.batches(1)
    assert jax.tree.map(jnp.shape, real) == jax.tree.map(jnp.shape, batch)
    params, statistics = jax.eval_shape(lambda: network.init(jax.random.key(0)))
    wanted = {"llama-1b-lora": 5_636_096, "gcn": 174_848}
    found = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found == wanted.get(name, found)
    for way in "uncompressed", "jaxact 2 bits":
        loss = network.loss(ways[way])
        value, after = jax.eval_shape(loss, params, statistics, batch)
        assert value.shape == ()
        shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        assert shapes(after) == shapes(statistics)


def test_the_command_resumes_and_uses_sizes_of_another_memory(
    load, monkeypatch, tmp_path
):
    batch, output = load("batch"), tmp_path / "batch"
    compiled = []

    def memory(step_of_size, policies, known, **options):
        (name,), limit = policies, 10 if options["budget"] == "1GiB" else 100
        compiled.append((dict(known[name]), limit, step_of_size(2)[1][1].shape))
        taken = tuple(batch.jaxact.CompiledBatch(n, 1) for n in (4, limit))
        # The first search of the larger memory ends too early.
        following = None if limit == 100 and 100 not in known[name] else 2
        best = batch.jaxact.LargestBatch(name, limit, 1, following, taken)
        return batch.jaxact.LargestBatches((best,), limit, 1, "H")

    monkeypatch.setattr(batch.jaxact, "max_batch", memory)

    def run(*memories):
        line = [
            "batch.py",
            "--model",
            "tiny",
            "--rows",
            "checkpoint",
            "--target",
            "h100",
        ]
        line += ["--output", str(output), "--memory", *memories]
        monkeypatch.setattr("sys.argv", line)
        batch.main()
        return json.loads(output.with_suffix(".json").read_text())

    (first,) = run("1GiB")
    assert first["size"] == 10 and first["compiled"] == {"4": 1, "10": 1}
    # Parameters, their two moments and a count; 4 bytes each.
    assert first["state_bytes"] == 3 * first["gradient_bytes"] + 4
    assert run("1GiB", "2GiB")[0] == first
    fixed = first["state_bytes"] + first["gradient_bytes"]  # as a batch of 0 takes
    earlier = {0: fixed, 4: 1, 10: 1}
    assert compiled == [({0: fixed}, 10, (2, 33)), (earlier, 100, (2, 33))]
    table = output.with_suffix(".md")
    assert "| checkpoint | 10 | at least 100 |" in table.read_text()
    rows = run("1GiB", "2GiB")
    assert [row["size"] for row in rows] == [10, 100] and len(compiled) == 3
    assert compiled[2][0] == earlier | {100: 1}
    assert "| checkpoint | 10 | 100 |" in table.read_text()

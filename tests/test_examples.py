"""Each example runs, at a size that takes seconds."""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
import jaxact_kernels
from support.variants import thorough

EXAMPLES = Path(__file__).parent.parent / "examples"
TIMEOUT = 900  # seconds: for an example that waits, many times what any takes
TOY = "--epochs 6 --batch 64 --channels 16 32 --blocks 1".split()


def run(script, *options):
    pytest.importorskip("flax")
    pytest.importorskip("rich")
    packages = (jaxact.__file__, jaxact_kernels.__file__)
    path = os.pathsep.join(str(Path(f).parent.parent) for f in packages)
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes longer than running
        "COLUMNS": "120",
    }
    command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rows(text):
    """The cells of the table's two rows."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def rows_under(text, title):
    """The cells of the two rows under the line of titles that begins so."""
    lines = text.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.split()[:2] == title.split()]
    return [re.split(r" {2,}", line.strip()) for line in lines[start + 1 : start + 3]]


def mib(cell):
    number, unit = cell.split()
    return float(number) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[unit]


@pytest.mark.slow
def test_quickstart_learns_the_digits():
    pytest.importorskip("sklearn")
    text = run("quickstart.py", *TOY)
    for row in rows_under(text, "test accuracy"):
        assert float(row[1].removesuffix("%")) >= 80
    here = text[text.index("compiled for cpu") :]
    plain, packed = rows_under(here, "step residuals")
    assert mib(packed[2]) * 3 <= mib(plain[2])
    assert mib(packed[3]) <= mib(plain[3])


@pytest.mark.slow
def test_quickstart_reads_a_file(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 8, 8, 3), np.uint8)
    labels = np.arange(24) % 3
    np.savez(
        tmp_path / "tiny.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:8],
        test_labels=labels[:8],
        class_names=np.array(["a", "b", "c"]),
    )
    options = "--epochs", 1, "--batch", 8, "--channels", 8, "--blocks", 1
    text = run("quickstart.py", "--data", tmp_path / "tiny.npz", *options, "--bits", 2)
    assert re.search(r"tiny: 1 epochs, batch 8", text)
    names = [row[0] for row in rows_under(text, "test accuracy")]
    assert names == ["uncompressed", "jaxact, 2 bits"]


def test_an_incomplete_file_says_what_is_missing(tmp_path):
    from examples import data

    np.savez(tmp_path / "half.npz", train_images=np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="lacks train_labels, test_images"):
        data.load(tmp_path / "half.npz")


def scores(output):
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return {(r["config"], r["seed"]): r["score"] for r in found}


@thorough
@pytest.mark.parametrize("task, seeds", [("text", 1), ("images", 2)])
def test_training_scores_every_configuration_and_seed(task, seeds, tmp_path):
    output = tmp_path / "runs.jsonl"
    options = "--small", "--task", task, "--output", output, "--seeds", seeds
    configs = "uncompressed", "1bit-allocated"
    text = run("benchmarks/training.py", *options, "--configs", *configs)
    found = scores(output)
    assert set(found) == {(c, s) for c in configs for s in range(seeds)}
    assert len({found["uncompressed", s] for s in range(seeds)}) == seeds
    for config in configs:
        assert f"| {config} | {seeds} |" in text


@pytest.mark.unoptimized
def test_a_text_is_scored_also_where_it_fills_no_piece(load, tmp_path):
    for package in ("flax", "optax", "rich"):
        pytest.importorskip(package)
    training, path = load("training"), tmp_path / "tinyshakespeare.txt"
    path.write_text("to be or not to be, " * 10)  # one window of 17
    options = argparse.Namespace(data=tmp_path, small=True, steps=None)
    task = training.TextTask(options, None)
    assert np.isfinite(task.score(task.init(0)))
    path.write_text("to be")
    with pytest.raises(ValueError, match="has 1 characters; 17 are required"):
        training.TextTask(options, None)


@pytest.mark.slow
def test_ablation_adds_to_earlier_runs(tmp_path):
    output = tmp_path / "runs.jsonl"
    small = "benchmarks/training.py", "--small", "--seeds", 1, "--output", output
    run(*small, "--configs", "uncompressed")
    text = run(*small, "--first-seed", 5, "--configs", "uncompressed", "--ablate")
    assert {("uncompressed", 0), ("uncompressed", 5)} < set(scores(output))
    assert "| uncompressed | 2 |" in text
    assert text.count("| 2bits only ") == len(scores(output)) - 2 >= 2


def test_text_of_a_file(tmp_path):
    from examples import data

    (tmp_path / "tiny.txt").write_text("abba" * 5)
    text = data.load_text(tmp_path / "tiny.txt")
    assert (text.name, text.alphabet) == ("tiny", "ab")
    assert "".join("ab"[i] for i in text.train) == ("abba" * 5)[:18]
    (first,) = data.windows(text.train, 4, 3, 1, seed=0)
    (again,) = data.windows(text.train, 4, 3, 1, seed=0)
    assert first.shape == (3, 4) and (first == again).all()


def test_models_have_their_published_sizes(load):
    pytest.importorskip("flax")
    gpt, resnet, vit = (load(f"models.{name}") for name in ("gpt", "resnet", "vit"))

    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert count(gpt.SMALL.shapes) == 124_439_808
    assert count(gpt.MEDIUM.shapes) == 354_823_168
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    # As torchvision counts them.
    for net, size in {
        resnet.ResNet50(1000): 25_557_032,
        resnet.ResNet152(1000, scanned=True): 60_192_808,
        vit.ViTL16(1000, scanned=True): 304_326_632,
    }.items():
        init = net.init
        if isinstance(net, resnet.ResNet):
            init = functools.partial(init, train=True)
        found = jax.eval_shape(init, jax.random.key(0), image)
        assert count(found["params"]) == size, type(net)


@thorough
@pytest.mark.unoptimized
def test_a_head_computes_its_gradient_in_the_dtype_of_its_input():
    from examples.models.gpt import logits

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 5, 32), (11, 32), (2, 5, 11)
    x, head, cotangent = map(jax.random.normal, keys, shapes)
    plain = lambda x, head: x @ head.T
    (y, vjp), (wanted, plain_vjp) = jax.vjp(logits, x, head), jax.vjp(plain, x, head)
    # The same products in float32, summed in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (y, vjp(cotangent)), (wanted, plain_vjp(cotangent)))
    x, head = x.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    y, vjp = jax.vjp(logits, x, head)
    assert y.dtype == jnp.float32
    products = re.findall(r"(\w+)\[[\d,]*\] = dot_general", str(jax.make_jaxpr(vjp)(y)))
    assert products == ["bf16", "bf16"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recompute_attention", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_scanned_gpt_is_the_unrolled_one(recompute_attention):
    from examples.models.gpt import GPT

    shape = {"width": 32, "heads": 4, "length": 16, "vocabulary": 11}
    options = {"recompute_attention": recompute_attention, "dtype": jnp.float32}
    scanned = GPT(2, **shape, **options)
    unrolled = GPT(2, **shape, **options, scanned=False)
    params = scanned.init(jax.random.key(0))
    layers = [jax.tree.map(itemgetter(i), params["layers"]) for i in range(2)]
    tokens = jax.random.randint(jax.random.key(1), (3, 17), 0, 11)
    gradient = lambda net: jax.jit(jax.value_and_grad(net.loss))
    value, found = gradient(scanned)(params, tokens)
    other, parts = gradient(unrolled)(params | {"layers": layers}, tokens)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts["layers"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    jax.tree.map(close, (value, found), (other, parts | {"layers": stack}))
    assert abs(float(value) - np.log(11)) < 0.1


def dense_graph(rng, nodes=7):
    """Edges of a random graph and its adjacency matrix [receiver, sender]."""
    adjacency = rng.random((nodes, nodes)) < 0.4
    adjacency |= adjacency.T | np.eye(nodes, dtype=bool)
    receivers, senders = adjacency.nonzero()
    return senders.astype(np.int32), receivers.astype(np.int32), adjacency


@thorough
@pytest.mark.unoptimized
def test_graph_layers_are_those_of_their_papers():
    """Against dense adjacency in float64; 2e-5 is 100 times float32's rounding."""
    from examples.models.gnn import GAT, GCN

    rng = np.random.default_rng(0)
    senders, receivers, adjacency = dense_graph(rng)
    degree = adjacency.sum(1)
    weights = adjacency / np.sqrt(np.outer(degree, degree))
    edges = senders, receivers, weights[receivers, senders].astype(np.float32)
    x = rng.normal(size=(7, 5)).astype(np.float32)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)

    gcn = GCN(5, 3, width=8)
    p = gcn.init_layer(jax.random.key(0), 5) | {"bias": jnp.arange(8.0)}
    w, bias = (np.asarray(p[k], np.float64) for k in ("weight", "bias"))
    close(gcn.layer(p, x, edges), np.maximum(weights @ x @ w + bias, 0))

    gat = GAT(5, 3, width=8, heads=2)
    p = gat.init_layer(jax.random.key(1), 5) | {"bias": jnp.linspace(-1, 1, 8)}
    p64 = {k: np.asarray(v, np.float64) for k, v in p.items()}
    wanted = []
    for head, h in enumerate(np.split(x @ p64["weight"], 2, 1)):
        scores = (h @ p64["receiver"][head])[:, None] + h @ p64["sender"][head]
        scores = np.where(scores > 0, scores, 0.2 * scores)
        shares = np.where(adjacency, np.exp(scores), 0)
        wanted.append(shares / shares.sum(1, keepdims=True) @ h)
    wanted = np.concatenate(wanted, 1) + p64["bias"]
    close(gat.layer(p, x, edges), np.where(wanted > 0, wanted, np.expm1(wanted)))


@pytest.mark.thorough
def test_every_way_of_keeping_starts_from_the_same_network(monkeypatch):
    for package in ("flax", "optax", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    import tasks

    task = tasks.ImageTask(None, small=True)
    batch = next(task.batches(0))
    found = []
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        variables = task.variables(0)
        for keep in ("all", "inputs", jaxact.Policy(bits=2)):
            loss = jax.jit(task.loss(keep))
            found.append(loss(*variables, batch, np.uint32(0)))
    # XLA may fuse sums of 32 * 16 * 16 values differently: far below 1e-4 of them.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    for other in found[1:]:
        jax.tree.map(close, other, found[0])


@thorough
def test_chunks_of_attention(monkeypatch):
    """The same values in chunks; recomputed or packed they take less."""
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    import chunked

    shape = 3, 64, chunked.HEADS, chunked.WIDTH
    qkv = jax.random.normal(jax.random.key(0), shape)
    whole = chunked.attention(*qkv)
    np.testing.assert_allclose(
        chunked.in_chunks(chunked.attention)(*qkv), whole, rtol=1e-4, atol=1e-5
    )
    found = chunked.compare(1024, target=None)
    packed, recomputed, plain = (
        found[name].memory.temp_bytes
        for name in (
            "4 bits of each chunk",
            "jax.checkpoint of each chunk",
            "in chunks",
        )
    )
    assert 2 * packed < plain and 2 * recomputed < plain


SYSTEMS = "benchmarks/systems.py", "--small", "--tasks", "gcn", "--seeds"


@pytest.mark.slow
def test_systems_compares_and_goes_on_where_it_stopped(tmp_path):
    pytest.importorskip("sklearn")
    resume = "--resume", tmp_path / "runs.jsonl"
    run(*SYSTEMS, 1, *resume, "--variants", "uncompressed")
    variants = "--variants", "uncompressed", "jaxact, 2 bits"
    text = run(*SYSTEMS, 2, *resume, *variants)
    found = [json.loads(line) for line in resume[1].read_text().splitlines()]
    places = [(r["variant"], r["seed"]) for r in found]
    assert sorted(places) == [(v, s) for v in sorted(variants[1:]) for s in (0, 1)]
    plain, packed = rows(text)
    assert (plain[0], packed[0]) == variants[1:]
    assert mib(packed[3]) * 4 < mib(plain[3])
    assert float(packed[6]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, lines", [(("--tasks", "gcn"), 8), (("--ablation",), 11)], ids=str
)
def test_systems_at_a_toy_size(options, lines):
    pytest.importorskip("sklearn")
    text = run("benchmarks/systems.py", "--small", "--seeds", 1, *options)
    found = rows(text)
    assert len(found) == lines
    assert all(row[0] and row[1] for row in found)


@pytest.mark.slow
def test_a_search_at_a_toy_size():
    """A row for the uncompressed network, and one for each way to choose bits."""
    pytest.importorskip("sklearn")
    text = run("benchmarks/search.py", "--small", "--seeds", 2, "--tasks", "gcn")
    base, *ways = rows(text)
    assert [row[0] for row in ways] == ["AC-GC, 0.1", "AC-GC, 0.01", "halving", "grid"]
    steps = [int(row[3]) for row in ways]
    # Two steps are one training; the grid has 8 widths and 2 seeds. Of 8 widths at
    # most 8, 4, 2 and 1 train for an eighth, a quarter, a half and all of the steps.
    assert steps[:2] == [2, 2] and steps[3] == 32 and 1 <= steps[2] <= 8
    assert all(0 < float(row[1]) <= 9 for row in ways)

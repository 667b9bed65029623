"""Each example runs, at a size that takes seconds."""

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

EXAMPLES = Path(__file__).parent.parent / "examples"
TOY = "--epochs 6 --batch 64 --channels 16 32 --blocks 1".split()


def run(script, *options):
    pytest.importorskip("flax")
    pytest.importorskip("rich")
    packages = (jaxact.__file__, jaxact_kernels.__file__)
    path = os.pathsep.join(str(Path(f).parent.parent) for f in packages)
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "120",
    }
    command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rows(text):
    """The cells of the table's two rows."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def mib(cell):
    return float(cell.removesuffix(" MiB"))


@pytest.mark.slow
def test_quickstart_learns_the_digits():
    pytest.importorskip("sklearn")
    plain, packed = rows(run("quickstart.py", *TOY))
    for row in plain, packed:
        assert float(row[1].removesuffix("%")) >= 80
    assert mib(packed[2]) * 3 <= mib(plain[2])
    assert mib(packed[3]) <= mib(plain[3])


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
    assert [row[0] for row in rows(text)] == ["uncompressed", "jaxact, 2 bits"]


def test_an_incomplete_file_says_what_is_missing(tmp_path):
    from examples import data

    np.savez(tmp_path / "half.npz", train_images=np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="lacks train_labels, test_images"):
        data.load(tmp_path / "half.npz")


def scores(output):
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return {(r["config"], r["seed"]): r["score"] for r in found}


@pytest.mark.parametrize("task", ["text", "images"])
def test_training_scores_every_configuration_and_seed(task, tmp_path):
    output = tmp_path / "runs.jsonl"
    options = "--small", "--task", task, "--output", output, "--seeds", 2
    text = run("benchmarks/training.py", *options, "--configs", "uncompressed", "2bits")
    found = scores(output)
    assert set(found) == {(c, s) for c in ("uncompressed", "2bits") for s in (0, 1)}
    assert found["uncompressed", 0] != found["uncompressed", 1]
    assert "| uncompressed | 2 |" in text and "| 2bits | 2 |" in text


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


@jax.numpy_dtype_promotion("standard")  # as Flax asks
def test_models_have_their_published_sizes():
    resnet = pytest.importorskip("examples.models.resnet")
    from examples.models import gpt

    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert count(gpt.SMALL.shapes) == 124_439_808
    assert count(gpt.MEDIUM.shapes) == 354_823_168
    init = functools.partial(resnet.ResNet50(1000).init, train=True)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    assert count(jax.eval_shape(init, jax.random.key(0), image)["params"]) == 25_557_032


@pytest.mark.parametrize("recompute_attention", [False, True])
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

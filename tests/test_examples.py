"""Each example runs, at a size that takes seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

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

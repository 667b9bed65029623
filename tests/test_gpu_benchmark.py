"""The one command for a GPU, as far as it goes without one."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

import jaxact
import jaxact_kernels

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")
pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"
SEED = jax.numpy.uint32(0)


KERNEL = {
    "shape": "stage",
    "format": "rotated",
    "bits": 4,
    "op": "encode",
    "implementation": "triton",
    "is_chosen": True,
    "microseconds": {"median": 50.0},
    "predicted_microseconds": 40.0,
    "logical_bytes_per_second": 2.5e12,
}
STEP = {
    "network": "net",
    "way": "uncompressed",
    "ratio": 1.01,
    "quartiles": [0.99, 1.02],
    "seconds": 0.030,
    "predicted_seconds": 0.020,
    "peak_bytes": 3 * 2**30,
    "compiled_peak_bytes": 2 * 2**30,
    "temp_bytes": 2**30,
    "why": {},
}


def printed(load, checks, kernels, steps):
    about = {"device": "GPU", "jax": "1", "jaxact": "2", "date": "2026-01-01T00"}
    results = about | {"checks": checks, "kernels": kernels, "steps": steps}
    results["left_out"] = 3
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(load("gpu_report").table(results))
    return [line.split("│")[1:-1] for line in console.export_text().splitlines()]


def test_the_table_has_measurements_beside_predictions(load):
    small = STEP | {"way": "small", "ratio": 1.20, "seconds": 0.036}
    small |= {"predicted_seconds": 0.022, "why": {"peak": "Error: no memory"}}
    right = {"shape": "odd", "format": "mask", "bits": 1}
    checks = [right, right | {"format": "affine", "bits": 2, "error": "3 places"}]
    kernels = [KERNEL, {"shape": "odd", "error": "bits"}]
    lines = printed(load, checks, kernels, [STEP, small])
    cells = [[cell.strip() for cell in line] for line in lines if line]
    assert cells == [
        ["kernels with the bits of their definitions", "1", "", "", ""],
        ["odd", "wrong bits", "", "", "affine, 2: 3 places"],
        ["odd", "wrong bits", "", "", "bits"],
        [
            "rotated encode, 4 bits, stage: triton (chosen)",
            *("50.0 us", "40.0 us", "1.25", "2.500 TB/s of unpacked bytes"),
        ],
        [
            "net, uncompressed: over uncompressed",
            *("1.01 x", "1.00 x", "1.01", "quartiles 0.99 to 1.02"),
        ],
        ["net, uncompressed: time", "30.0 ms", "20.0 ms", "1.50", ""],
        ["net, uncompressed: peak", "3072 MiB", "2048 MiB", "1.50", "temp 1024 MiB"],
        [
            "net, small: over uncompressed",
            *("1.20 x", "1.10 x", "1.09", "quartiles 0.99 to 1.02"),
        ],
        ["net, small: time", "36.0 ms", "22.0 ms", "1.64", ""],
        ["net, small: peak", "3072 MiB", "2048 MiB", "1.50", "temp 1024 MiB"],
        ["net, small: peak", "failed", "", "", "Error: no memory"],
    ]


MESSAGE = "encode: triton differs in 3 places"
WRONG = {"shape": "small stream", "error": MESSAGE}


def differs(*_):
    sys.exit(MESSAGE)


def test_a_kernel_with_other_bits_is_a_row(load, monkeypatch):
    run = load("run")
    monkeypatch.setattr(run, "measure", differs)
    monkeypatch.setattr(run, "measure_lossless", lambda *_: [{"op": "mask"}])
    rows = load("gpu").kernel_rows("small stream", (2,), 1)
    assert rows == [*len(run.FORMATS) * [WRONG], {"op": "mask"}]


def test_each_check_says_what_is_wrong(load, monkeypatch):
    run, gpu = load("run"), load("gpu")
    assert gpu.FORMATS == tuple(run.FORMATS)
    monkeypatch.setattr(load("normalized"), "check_normalized", differs)
    monkeypatch.setattr(run, "checked", differs)
    monkeypatch.setattr(run, "checked_lossless", lambda *_: [])
    checks = gpu.Extent(("small stream",), (), (), (), widths=(2,)).subjects
    rows = [gpu.kernel_check(*subject) for subject in checks]
    assert rows[0] == {"shape": "small stream", "format": "lossless", "bits": 1}
    assert all(row.items() >= WRONG.items() for row in rows[1:])
    assert {row["format"] for row in rows[1:]} == {*run.FORMATS, "normalized"}


def test_an_error_is_no_difference_in_bits(load, monkeypatch):
    def fails(*_):
        raise RuntimeError("no memory")

    run, gpu = load("run"), load("gpu")
    monkeypatch.setattr(run, "checked", fails)
    row = gpu.kernel_check("small stream", "affine", 2)
    assert row["error"] == "RuntimeError: no memory" and row["failed"]
    assert printed(load, [row], [], [])[4][1].strip() == "failed"
    step, bits = STEP | {"why": {"run": "Error"}}, "has not the bits"
    problems = lambda checks, steps: "; ".join(
        gpu.problems_of({"checks": checks, "kernels": [], "steps": steps})
    )
    assert problems([], [STEP]) == ""
    assert problems([row], [step]) == "a kernel failed; a step failed"
    assert bits in problems([WRONG], [])


def test_names_are_those_of_the_step_benchmark(load, monkeypatch, capsys):
    for words in (["--networks", "resnet51"], ["--ways", "nothing"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit):
            load("gpu").parse()
        assert "invalid choice" in capsys.readouterr().err


def test_normalized_values_are_compared(load, monkeypatch):
    normalized, shapes = load("normalized"), load("shapes")
    activation = shapes.Activation("tiny", (16, 512))
    normalized.check_normalized(activation, 2)
    zeros = jaxact_kernels.affine.encode(jax.numpy.zeros((16, 512)), SEED, bits=2)
    monkeypatch.setattr(normalized, "run", lambda *_: zeros)
    with pytest.raises(SystemExit, match="normalized, 2 bits, .*: words: "):
        normalized.check_normalized(activation, 2)


def test_a_difference_is_counted(load):
    run, jnp = load("run"), jax.numpy
    x = jnp.arange(4.0)
    same = run.Case("op", "reference", lambda x: x, [x])
    other = run.Case("op", "triton", lambda x: jnp.where(x > 1, -x, x), [x])
    with pytest.raises(SystemExit, match="op: triton differs in 2 places"):
        run.check([same, other], [x])


def command(*options):
    packages = (jaxact.__file__, jaxact_kernels.__file__)
    path = os.pathsep.join(str(Path(f).parents[1]) for f in packages)
    line = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(line, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_dry_run_goes_all_the_way(tmp_path):
    ran = command("--dry-run", "--output", tmp_path / "gpu")
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["left_out"] == 0 and results["jax"] == jax.__version__
    ways = [row["way"] for row in results["steps"]]
    assert ways == ["uncompressed", "jaxact 4 bits"]
    assert all(row["seconds"] > 0 and row["why"] == {} for row in results["steps"])
    assert {row["op"] for row in results["kernels"]} >= {"encode", "decode"}
    # The table comes last.
    assert ran.stdout.splitlines()[-1].startswith("└")


def test_time_that_is_up_and_no_gpu(load, monkeypatch, tmp_path):
    gpu = load("gpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu, "in_fresh_process", lambda f, *args: f(*args))
    arguments = ["gpu.py", "--output", str(tmp_path / "gpu")]
    late = ["--dry-run", "--only", "kernels", "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", [*arguments, *late])
    gpu.main()
    assert json.loads((tmp_path / "gpu.json").read_text())["left_out"] == 1
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="is no GPU"):
        gpu.main()
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *late])
    gpu.main()
    assert not gpu.RESULTS.exists()

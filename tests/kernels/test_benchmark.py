"""The kernel benchmark runs, and its numbers on a CPU hold what is claimed of them.

The claim is about arrays of the size that training stores, here 4 Mi elements: the
reference fuses, and the first attempt writes and reads what it computes in between.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxact
import jaxact_kernels
from benchmarks.assembler import tool
from jaxact_kernels.config import heuristic
from support.gpu_target import needs_target
from support.variants import thorough

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
LARGE = "small stream"
SMALL_RUN = "--small", "--bits", "2", "--samples", "5"

pytestmark = pytest.mark.skipif(
    not SCRIPTS.exists(), reason="benchmarks are in the repository, not in the wheel"
)


def run(script, output, *options):
    packages = (jaxact.__file__, jaxact_kernels.__file__)
    path = os.pathsep.join(str(Path(f).parents[1]) for f in packages)
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPTS / script), "--out", str(output), *options]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(output.read_text())


def slowdown(rows):
    """By how much the first attempt is slower than the reference."""
    return milliseconds(rows, "naive") / milliseconds(rows, "reference")


def milliseconds(rows, implementation):
    """Encoding and decoding together."""
    return sum(
        row["microseconds"]["median"] / 1e3
        for row in rows
        if row["implementation"] == implementation and row["shape"] == LARGE
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "new" / "cpu.json"
    return run("run.py", output, *SMALL_RUN)


@thorough
def test_small_run_checks_times_and_writes(small_run):
    text, results = small_run
    assert {"device", "jax", "date", "command", "clock", "rows"} == set(results)
    rows = results["rows"]
    assert text.count("\n") == len(rows) + 2  # the table comes last, and alone
    assert len({row["shape"] for row in rows}) == 3
    for row in rows:
        times = row["microseconds"]
        assert 0 < times["p20"] <= times["median"] <= times["p80"]
    masks = "mask encode", "mask encode above 0", "mask decode"
    lossless = *masks, "index encode", "index decode"
    assert {(row["op"], row["implementation"]) for row in rows} == {
        *(("encode", name) for name in ("reference", "fused XLA", "naive")),
        *(("decode", name) for name in ("reference", "naive")),
        *((op, "reference") for op in lossless),
        ("copy", "negation"),
    }
    stored = {row["op"]: row["stored_bytes"] for row in rows if row["shape"] == LARGE}
    assert [stored[op] * 8 // 2**22 for op in lossless] == [1, 1, 1, 2, 2]
    assert {row["implementation"] for row in rows if row["is_chosen"]} == {"reference"}


@thorough
def test_the_reference_is_twice_as_fast_as_a_first_attempt(small_run, tmp_path):
    # Alone 3.6 to 6.3 times. The reference uses all cores and the first attempt one, so
    # that other work on one core in two halves the ratio: no bound above 2 is safe.
    ratios = [slowdown(small_run[1]["rows"])]
    options = *SMALL_RUN, "--shapes", LARGE
    while max(ratios) < 2 and len(ratios) < 4:
        rows = run("run.py", tmp_path / "cpu.json", *options)[1]["rows"]
        ratios.append(slowdown(rows))
    assert max(ratios) >= 2, ratios


@thorough
@needs_target
def test_instructions_leave_room_for_the_speed_aimed_at(tmp_path):
    needs_disassembler()
    formats = "--formats", "affine", "mask"
    text, results = run("count.py", tmp_path / "count.json", *formats)
    rows = results["rows"]
    assert text.count("\n") == len(rows) + 2
    kernels = {(row["format"], row["operation"], row["implementation"]) for row in rows}
    assert kernels == {
        *itertools.product(["affine"], ["encode", "decode"], ["triton", "mosaic_gpu"]),
        *itertools.product(["mask"], ["encode", "encode above", "decode"], ["triton"]),
    }
    for row in rows:
        assert not row["spilled_bytes"]
        if row["format"] == "affine" and row["operation"] == "encode":
            # The rare branch is no part of the path.
            share = row["instructions_on_path"] / row["instructions_in_kernel"]
            assert 0.5 < share < 0.85
            # Mosaic GPU, which serves where there is no Triton, adds up the content of
            # groups by more instructions.
            least = 2.9e12 if row["implementation"] == "triton" else 2.6e12
            assert row["compute_bytes_per_second"] >= least
        else:
            assert row["bound"] == "HBM"


@pytest.mark.slow  # a quarter of a minute of CPU time for each encoder
@needs_target
def test_instructions_of_a_rotation_are_few_enough(tmp_path):
    # Rates that instructions allow, in bytes of bfloat16; at 2 bits nothing is spilled.
    needs_disassembler()
    formats = "--formats", "rotated", "adaptive", "--bits", "2"
    _, results = run("count.py", tmp_path / "count.json", *formats)
    least = {"rotated encode": 1.3e12, "adaptive encode": 1.0e12}
    for row in results["rows"]:
        assert not row["spilled_bytes"]
        name = f"{row['format']} {row['operation']}"
        assert row["compute_bytes_per_second"] >= least.get(name, 2.0e12)


@thorough
@needs_target
def test_tuning_for_a_gpu_that_is_not_attached_counts_candidates(tmp_path):
    needs_disassembler()
    options = "--target", "h100", "--ops", "encode", "--bits", "2", "--most", "2"
    which = "--dtypes", "bfloat16", "--groups", "256"
    output = tmp_path / "tune.json"
    text, results = run("tune.py", output, *options, *which)
    assert text.count("\n") == 6
    assert len(results["results"]) == 2
    for result in results["results"]:
        assert result["finding"] == ""  # the rule is within 3 % and spills nothing
        first, other = result["candidates"]
        assert first["config"] == dataclasses.asdict(heuristic(256, item_bytes=2))
        assert first["config"] != other["config"]
        assert result["best"] in (first, other)
        for row in first, other:
            assert (
                1 <= row["resident_warps"] <= min(64, 65536 // 32 // row["registers"])
            )
            assert row["bytes_in_flight"] > 0 and not row["spilled_bytes"]


def needs_disassembler():
    try:
        tool("nvdisasm")
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])

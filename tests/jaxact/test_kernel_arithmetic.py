"""Kernels whose predicted time is not that of their bytes alone."""

import json
from pathlib import Path

import pytest

from support.predictions import LAUNCH, of

# A batch norm's sums, of many positions and of few.
COLUMNS = """HloModule jit_columns

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused_columns (x: bf16[SHAPE]) -> f32[RESULT] {
  %x = bf16[SHAPE] parameter(0)
  %wide = f32[SHAPE] convert(%x)
  %square = f32[SHAPE] multiply(%wide, %wide)
  %zero = f32[] constant(0)
  ROOT %sums = f32[RESULT] reduce(%square, %zero), dimensions={AXIS}, to_apply=%sum
}

ENTRY %main (p: bf16[SHAPE]) -> f32[RESULT] {
  %p = bf16[SHAPE] parameter(0)
  ROOT %sums.1 = f32[RESULT] fusion(%p), kind=KIND, calls=%fused_columns
}
"""


def of_columns(shape, result, axis, kind="kInput"):
    named = {"SHAPE": shape, "RESULT": result, "AXIS": axis, "KIND": kind}
    text = COLUMNS
    for name, value in named.items():
        text = text.replace(name, value)
    (row,) = of(text).rows
    return row


def test_sums_of_columns_wait_for_memory_and_then_compute():
    """For each element a conversion, a product and a sum, by 64 lanes a core."""
    clocks = 0.89 * 1.98e9 * 132
    stream = 0.9 * 3.35232e12
    row = of_columns("256,784,256", "256,256", "1")
    size, elements = 2 * 2**16 * 784 + 4 * 2**16, 2**16 * 784
    seconds = size / stream + 3 * elements / (64 * clocks)
    assert row.seconds == pytest.approx(LAUNCH + seconds)
    assert row.bound == "memory"
    # 512 columns are 8 blocks of threads, and 64 bytes a clock reach each core.
    row = of_columns("3136,512", "512", "0")
    size, elements = 2 * 3136 * 512 + 4 * 512, 3136 * 512
    seconds = (size / 64 + 3 * elements / 64) * 132 / 8 / clocks
    assert row.seconds == pytest.approx(LAUNCH + seconds)
    assert row.bound == "arithmetic"


@pytest.mark.parametrize("result, axis, kind", [
    ("256,784", "2", "kInput"),  # rows: other warps compute while some wait
    ("256,256", "1", "kLoop"),  # each thread sums a column by itself
])  # fmt: skip
def test_other_sums_wait_and_compute_at_once(result, axis, kind):
    row = of_columns("256,784,256", result, axis, kind)
    assert row.seconds == pytest.approx(LAUNCH + row.bytes / (0.9 * 3.35232e12))


PACKING = """\
ENTRY %main (x: bf16[4096,256], s: u32[1]) -> bf16[4096,256] {
  %x = bf16[4096,256]{1,0} parameter(0)
  %s = u32[1]{0} parameter(1)
  %packed = (u32[4096,WORDS]{1,0}, u32[4096]{0}) custom-call(%x, %s), \
custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/jaxact.FORMAT.encode/encode/pallas_call"}
  %words = u32[4096,WORDS]{1,0} get-tuple-element(%packed), index=0
  %metadata = u32[4096]{0} get-tuple-element(%packed), index=1
  ROOT %numbers = bf16[4096,256]{1,0} custom-call(%words, %metadata, %s), \
custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/jaxact.FORMAT.decode/decode/pallas_call"}
}
"""
COUNTS = Path(__file__).parents[2] / "kernels/benchmarks/results/h100-count.json"
COUNTED = [
    row
    for row in json.loads(COUNTS.read_text())["rows"]
    if row["implementation"] == "triton" and row["format"] in ("affine", "rotated")
]


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: row["format"])
def test_own_kernels_have_the_arithmetic_of_their_machine_code(row):
    """Rotations are bound by it: 1.5 times the time of their bytes, and more."""
    text = PACKING.replace("WORDS", str(8 * row["bits"]))
    rows = {r.name: r for r in of(text.replace("FORMAT", row["format"])).rows}
    found = rows["packed" if row["operation"] == "encode" else "numbers"]
    integers = row["per_element"]["alu"] * 2**20 / (0.89 * 1.98e9 * 132 * 64)
    moved = found.bytes / (0.9 * 3.35232e12)
    assert found.seconds == pytest.approx(LAUNCH + max(integers, moved), rel=0.01)

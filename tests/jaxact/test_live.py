"""The arrays at a compiled peak: those of known programs, loops included."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact._memory import wire
from jaxact._memory.program import _parsed
from support.gpu_target import needs_target
from support.variants import thorough

SIDE = 256
SQUARE = SIDE * SIDE * 4  # bytes of one float32 array
ROWS = 128
BOTH = pytest.mark.parametrize(
    "target", [None, pytest.param("h100", marks=needs_target)]
)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_every_array_of_a_known_program():
    """Two products in a row: the first lives until the second has run."""
    found = jaxact.live(lambda x: (x @ x) @ x, shape(SIDE, SIDE))
    assert found.peak_bytes == 3 * SQUARE == found.memory.peak_bytes
    assert sorted((row.kind, row.bytes, row.type) for row in found.rows) == [
        (kind, SQUARE, f"f32[{SIDE},{SIDE}]")
        for kind in ("argument", "output", "temporary")
    ]
    (temporary,) = [row for row in found.rows if row.kind == "temporary"]
    assert temporary.operation == "dot_general"
    assert temporary.source.startswith("test_live.py:")
    assert found.backward_start is None


def scanned(length, width=SIDE):
    def loss(w, x):
        def step(x, _):
            with jax.named_scope("Net/layer"):
                return jnp.sin(x @ w), None

        return lax.scan(step, x, length=length)[0].sum()

    return jax.grad(loss), shape(width, width), shape(width, width)


@BOTH
def test_arrays_that_a_scan_stacks(target):
    """Each step more keeps its input and its slope."""
    found = [
        jaxact.live(step, *shapes, target=target)
        for step, *shapes in map(scanned, (8, 24))
    ]
    short, long = (each.peak_bytes for each in found)
    assert long - short == 2 * 16 * SQUARE
    stacks = [row for row in found[1].rows if row.type == f"f32[24,{SIDE},{SIDE}]"]
    assert [row.bytes for row in stacks] == [24 * SQUARE] * 2
    for row in stacks:
        assert (row.kind, row.phase, row.path) == ("temporary", "forward", "Net/layer")
        assert row.source.startswith("test_live.py:") and "(scanned" in row.source


@BOTH
def test_the_curve_goes_up_to_the_peak_and_packs_into_what_is_reserved(target):
    step, *shapes = scanned(8)
    found = jaxact.live(step, *shapes, target=target)
    assert found.peak_bytes == max(found.curve) == sum(row.bytes for row in found.rows)
    # Alignment and gaps: 10 % is more than any of the programs here leaves.
    reserved = found.memory.peak_bytes
    assert 0.9 * reserved <= found.peak_bytes <= reserved
    start = found.backward_start
    assert start is not None and 0 < start < len(found.curve)
    assert found.memory == jaxact.memory(step, *shapes, target=target)


def clipped(length):
    """A step that needs its whole gradient before it updates a donated weight."""

    def loss(ws, x):  # the network's own arrays have the shape that its input has
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0].sum()

    def step(ws, x):
        gradient = jax.grad(loss)(ws, x)
        return ws - gradient / jnp.sqrt((gradient**2).sum())

    donating = jax.jit(step, donate_argnums=0)
    return donating, shape(length, SIDE, SIDE), shape(ROWS, SIDE)


@BOTH
def test_the_parts_of_the_curve(target):
    """Residuals: the stacked inputs and slopes; gradients: the stacked weights'."""
    step, *shapes = clipped(24)
    found = jaxact.live(step, *shapes, target=target)
    start, one = found.backward_start, ROWS * SIDE * 4
    assert start is not None
    # The output of the forward loop may live across the beginning of backward too.
    assert 0 <= found.residual_curve[start] - 2 * 24 * one <= 3 * one
    assert max(found.gradient_curve) == 24 * SQUARE
    parts = zip(found.residual_curve, found.gradient_curve, found.curve, strict=True)
    assert all(r + g + found.fixed_bytes <= total for r, g, total in parts)
    assert found.fixed_bytes == 24 * SQUARE + one


def test_the_budget_of_a_chart_says_above_what_it_stands():
    found = jaxact.live(lambda x: (x @ x) @ x, jnp.ones((64, 64)))
    temporary, device = (found.chart("4KiB", of=of) for of in ("temp", "device"))
    assert temporary.endswith("- budget, above arguments and results")
    assert device.endswith("- budget")
    assert found.chart(2**12) == temporary


@pytest.mark.parametrize("options, message", [
    ({"budget": "much"}, r"Live.chart\(budget='much'\): bytes are required"),
    ({"budget": 0.5}, "bytes are required"),
    ({"top": "high"}, r"Live.chart\(top='high'\)"),
    ({"of": "x"}, r"Live.chart\(of='x'\): 'temp' or 'device' is required"),
    ({"height": 0}, "such as height=12"),
    ({"width": 0}, "such as width=12"),
    ({"width": 1.5}, "such as width=12"),
])  # fmt: skip
def test_wrong_arguments_of_a_chart(options, message):
    found = jaxact.live(lambda x: (x @ x) @ x, jnp.ones((64, 64)))
    with pytest.raises(ValueError, match=message):
        found.chart(**options)
    wrong = {k: v for k, v in options.items() if k in ("budget", "of")}
    if wrong:
        with pytest.raises(ValueError, match="Live.plot"):
            found.plot(**wrong)


def test_the_chart_is_the_curve():
    step, *shapes = clipped(24)
    found = jaxact.live(step, *shapes)
    height, width = 20, len(found.curve)
    lines = found.chart(found.bytes_of("temporary"), height=height, width=width)
    *rows, ground, keys = lines.splitlines()
    cells = [row.partition("|")[2].ljust(width)[:width] for row in rows]
    columns = ["".join(column)[::-1] for column in zip(*cells, strict=True)]
    row = found.peak_bytes / height
    for i, column in enumerate(columns):
        parts = {
            ":": found.fixed_bytes,
            "#": found.residual_curve[i],
            "=": found.gradient_curve[i],
        }
        for character, size in parts.items():
            assert abs(column.count(character) * row - size) <= row
        stack = column.rstrip().rstrip("-").rstrip()
        assert abs(len(stack) * row - found.curve[i]) <= row
    assert "-" in cells[0] or " " not in cells[0]  # the budget is the peak's
    assert rows[0].endswith("MiB") and "- budget" in keys
    assert ground.partition("+")[2].index("^") == found.backward_start
    twice = found.chart(top=2 * found.peak_bytes, height=height).splitlines()
    assert all(line.endswith("|") for line in twice[: height // 2 - 1])


def test_donated_arguments_are_told_apart():
    step = jax.jit(lambda state, x: state + jnp.sin(x), donate_argnums=0)
    found = jaxact.live(step, shape(SIDE, SIDE), shape(SIDE, SIDE))
    kinds = {row.path: row.kind for row in found.rows}
    assert kinds == {"state": "donated argument", "x": "argument"}
    assert found.peak_bytes == 2 * SQUARE == found.memory.peak_bytes


def test_recomputed_arrays_say_so():
    block = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))
    loss = lambda w, x: lax.scan(lambda x, w: (block(w, x), None), x, w)[0].sum()
    found = jaxact.live(jax.grad(loss), shape(4, SIDE, SIDE), shape(SIDE, SIDE))
    assert "recomputed" in {row.phase for row in found.rows}


def test_words_of_a_compressed_scan_are_small():
    def network(ws, x, block):
        return lax.scan(lambda x, w: (block(w, x), None), x, ws)[0].sum()

    block = lambda w, x: jnp.tanh(x @ w)
    small = jaxact.compress(block, policy=jaxact.Policy(bits=2), activations="x")
    shapes = shape(24, SIDE, SIDE), shape(SIDE, SIDE)
    plain, packed = (
        jaxact.live(jax.grad(lambda w, x, b=b: network(w, x, b)), *shapes)
        for b in (block, small)
    )
    words = [row for row in packed.rows if row.type.startswith("u32[24,")]
    # Input and slope at 2 of 32 bits, and 4 bytes for each row, which is a group.
    each = SQUARE * 2 // 32 + 4 * SIDE
    assert sum(row.bytes for row in words) == 2 * 24 * each
    assert packed.peak_bytes < plain.peak_bytes - 2 * 24 * SQUARE * 0.9


def test_forms(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    step, *shapes = scanned(24)
    found = jaxact.live(step, *shapes)
    lines = str(found).splitlines()
    assert lines[0].split() == "bytes type kind array source".split()
    assert max(map(len, lines)) <= 80
    assert "live at the peak" in str(found) and "reserved on cpu" in str(found)
    assert len(found.text(full=True).splitlines()) == len(found.rows) + 2
    assert json.dumps([row.source for row in found.rows])


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    step, *shapes = scanned(8)
    found = jaxact.live(step, *shapes)
    axis = found.plot()
    curve = axis.lines[0]
    np.testing.assert_allclose(curve.get_ydata(), np.array(found.curve) / 2**20)
    other = found.plot(axis, label="again")
    assert other is axis and len(axis.lines) == 4  # two curves, two dotted lines
    assert axis.lines[2].get_label() == "again"
    parts = [area.get_label() for area in axis.collections]
    assert parts[:4] == ["arguments, results", "residuals", "gradients", "other"]
    axis = found.plot(budget=2**20, of="device")
    assert axis.lines[-1].get_label() == "budget"
    assert list(axis.lines[-1].get_ydata()) == [1, 1]


CACHED = """
import jax, jaxact
x = jax.ShapeDtypeStruct((64, 64), "float32")
print(jaxact.live(lambda x: (x @ x) @ x, x).peak_bytes)
"""


@thorough
def test_a_program_in_the_persistent_cache_is_described_too(tmp_path):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", CACHED],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(ran.stdout) == 3 * 64 * 64 * 4


@pytest.mark.parametrize("name, parsed", [
    ("jit(f)/jvp(Net)/block0/up/dot_general",
     ("Net/block0/up", "dot_general", "forward")),
    ("jit(f)/transpose(jvp(Net))/block0/mul", ("Net/block0", "mul", "backward")),
    ("jit(step)/jvp()/while/body/closed_call/layer/sin", ("layer", "sin", "forward")),
    ("jit(f)/transpose(jvp(b))/rematted_computation/sin", ("b", "sin", "recomputed")),
    ("jit(f)/jit(silu)/mul", ("", "mul", "")),
    ("params['w']", ("", "params['w']", "")),
])  # fmt: skip
def test_names(name, parsed):
    assert _parsed(name) == parsed


def test_wire_format():
    """The examples of protobuf.dev/programming-guides/encoding."""
    assert wire.read(b"\x08\x96\x01") == {1: [150]}
    assert wire.text(wire.read(b"\x12\x07testing"), 2) == "testing"
    inner = wire.message(wire.read(b"\x1a\x03\x08\x96\x01"), 3)
    assert wire.integer(inner, 1) == 150
    packed = wire.read(b"\x32\x06\x03\x8e\x02\x9e\xa7\x05")
    assert wire.integers(packed, 6) == [3, 270, 86942]
    assert wire.integers(wire.read(b"\x30\x03\x30\x05"), 6) == [3, 5]
    assert (wire.integer({}, 1), wire.text({}, 1), wire.message({}, 1)) == (0, "", {})
    with pytest.raises(ValueError, match="no protocol buffer"):
        wire.read(b"\x0b")


@pytest.mark.parametrize("data", [b"\x80", b"\x08", b"\x12\x07test", b"\x0d\x01"])
def test_a_message_that_is_cut_off(data):
    with pytest.raises(ValueError, match="ends inside a field"):
        wire.read(data)

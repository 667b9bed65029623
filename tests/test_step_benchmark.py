"""What the side-by-side benchmark counts, compares and writes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.variants import thorough

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")
pytestmark = [
    pytest.mark.unoptimized,
    thorough,
    # A row has a rule for checkpoints, also where its network has none.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]

OURS = "jaxact 4 bits"


def images(load):
    """A Linen network with batch norms."""
    resnet = load("models.resnet")
    module = functools.partial(resnet.ResNet, 10, (4,), 1)
    return load("step_networks").Classifier(
        "tiny", module, {"block": resnet.Block}, 16, 8, (True,)
    )


def text(load):
    """A scanned GPT."""
    net = load("models.gpt").GPT(2, 16, 2, 8, 128, dtype=jnp.float32)
    return load("step_networks").Decoder("tiny", net, 8)


def test_every_way_has_the_same_parameters(load):
    """Flax names a block's parameters after its class."""
    ways, net = load("step_ways").WAYS, images(load).net
    init = lambda way: net(way).init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), True)
    shapes = {
        name: jax.tree.structure(jax.eval_shape(functools.partial(init, way)))
        for name, way in ways.items()
        if not name.startswith("qwix")
    }
    assert set(shapes.values()) == {shapes["uncompressed"]}


def test_every_way_is_a_program_of_its_own(load):
    ways, runs, network = load("step_ways").WAYS, load("step_runs"), text(load)
    programs = {}
    for name, way in ways.items():
        if not name.startswith("qwix"):
            trainer = runs.Trainer(network, way)
            state, batch = trainer.shapes
            after, loss = jax.eval_shape(trainer.step, state, batch)
            assert jax.tree.structure(after) == jax.tree.structure(state), name
            programs.setdefault(str(trainer.step.trace(state, batch).jaxpr), name)
    assert list(programs.values()) == [name for name in ways if "qwix" not in name]


def test_pieces_of_a_batch_have_its_gradient(load):
    """In float32; the state of norms goes from piece to piece."""

    def loss(params, seen, batch):
        x, y = batch
        return ((x @ params - y) ** 2).mean(), seen + len(x)

    rng = np.random.default_rng(0)
    params, batch = rng.normal(size=3), (rng.normal(size=(8, 3)), rng.normal(size=8))
    params, batch = jax.tree.map(np.float32, (params, batch))
    gradient = jax.value_and_grad(loss, has_aux=True)
    whole, pieces = (
        load("step_runs").in_pieces(gradient, n)(params, np.int32(0), batch)
        for n in (1, 4)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, pieces, whole)
    assert whole[0][1] == 8


@pytest.mark.filterwarnings("ignore:'VariableState' was removed")  # what qwix asks for
def test_quantized_training_computes_in_integers(load):
    pytest.importorskip("qwix")
    way, network = load("step_ways").WAYS["qwix int8"], images(load)
    trainer = load("step_runs").Trainer(network, way)
    assert "i8[" in str(trainer.step.trace(*trainer.shapes).jaxpr)
    with pytest.raises(TypeError, match="qwix takes Flax modules"):
        text(load).loss(way)


@pytest.fixture
def command(load, monkeypatch, tmp_path):
    """Runs the command on tiny networks, in this process; returns rows and table."""
    step, networks = load("step"), load("step_networks")
    monkeypatch.setattr(step, "in_fresh_process", lambda f, *args: f(*args))
    for name, network in ("images", images(load)), ("text", text(load)):
        monkeypatch.setitem(networks.NETWORKS, name, network)

    def run(*options):
        output = tmp_path / "step"
        line = ["step.py", "--output", output, *options]
        monkeypatch.setattr("sys.argv", [str(word) for word in line])
        step.main()
        assert output.with_suffix(".png").stat().st_size > 1000
        table = output.with_suffix(".md").read_text()
        return json.loads(output.with_suffix(".json").read_text()), table

    return run


def test_a_run_writes_every_number_and_resumes(command, load, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    options = "--model", "text", "--steps", 4, "--resume"
    rows, _ = command(*options, "--ways", "uncompressed", "qwix int8")
    base, failed = rows
    assert base["temp_bytes"] > 0 and base["ratio"] > 0 and base["loss"] < 6
    assert base["items_per_second"] > 0 and base["why"] == {}
    assert base["command"].startswith("step.py") and base["jax"] == jax.__version__
    assert failed["loss"] is None and "qwix takes Flax" in failed["why"]["run"]
    monkeypatch.setattr(load("step"), "measure", lambda *args: base | {"way": OURS})
    # As if from before times were predicted.
    older = [{k: v for k, v in row.items() if "predicted" not in k} for row in rows]
    (tmp_path / "step.json").write_text(json.dumps(older))
    rows, table = command(*options, "--ways", "uncompressed", "qwix int8", OURS)
    assert rows == [base, failed, base | {"way": OURS}]
    assert "| qwix int8 | - | - | - | - | - |" in table
    assert "- qwix int8: TypeError: qwix takes Flax modules" in table


def test_rows_of_other_runs_are_not_resumed(load, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    step, path = load("step"), tmp_path / "step.json"
    line = ["step.py", "--resume", "--output", str(tmp_path / "step"), "--steps", "8"]
    monkeypatch.setattr("sys.argv", line)
    monkeypatch.setattr(step, "measurer", None)
    for row, told in (
        ({"target": None, "steps": 4}, "target None, steps 4; this run is of .* 8"),
        ({"target": "h100", "steps": 8}, "target h100, steps 8; this run is of "),
    ):
        path.write_text(json.dumps([{"network": "a", "way": "b"} | row]))
        with pytest.raises(SystemExit, match=told):
            step.main()


def test_compiling_alone_runs_nothing(command, load, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(load("step_runs"), "race", None)
    (row,), table = command("--model", "text", "--compile-only", "--ways", OURS)
    assert row["temp_bytes"] > 0 and row["loss"] is None and row["why"] == {}
    assert f"| {OURS} | {row['temp_bytes'] / 2**20:.0f} MiB |" in table


def test_predicted_times_are_shown_and_drawn(load, tmp_path):
    report, runs = load("step_report"), load("step_runs")
    about = {"network": "net", "about": "a net", "unit": "images", "target": "h100"}
    about |= {"device": "cpu", "python": "3", "jax": "1", "flax": "1", "jaxact": "1"}
    about |= {"date": "2026-01-01T00:00", "command": "step.py", "why": {}}
    part = lambda count: {"kernels": count, "bytes": count * 1e9, "seconds": 1e-3}

    def row(way, seconds, flops):
        numbers = {
            "predicted_seconds": seconds,
            "predicted_kernels": 1234,
            "flops": flops,
        }
        numbers |= {"predicted_bytes": 5e10, "target_bytes": 2**30 * seconds}
        causes = {"encode": part(3.0), "other": part(47.0)}
        empty = dict.fromkeys(runs.NUMBERS)
        return about | empty | numbers | {"way": way, "by_cause": causes}

    rows = [row("uncompressed", 0.020, 1e12), row("checkpoint", 0.025, 1.33e12)]
    lines = report.markdown(rows).splitlines()
    assert (
        "| uncompressed | 20 MiB (1.0x) | 1.00 (20.0 ms) | 1234 | 50.0 | 1 |" in lines
    )
    again = (
        "| checkpoint | 26 MiB (0.8x) | 1.25 (25.0 ms) | 1234 | 50.0 | 1.33 (+33%) |"
    )
    assert again in lines
    assert "|  | encode | other |" in lines and "| checkpoint | 3.0 | 47.0 |" in lines
    assert [table.row_count for table in report.tables(rows)] == [2, 2]
    pytest.importorskip("matplotlib")
    assert [round(point.time, 9) for point in report.points_of(rows)] == [1.0, 1.25]
    report.plot(rows, tmp_path / "net.png")
    assert (tmp_path / "net.png").stat().st_size > 1000


def test_throughputs_are_in_the_ratio_of_the_times(load):
    # Each row's own was taken at another time, on a machine with other work.
    base = {"ratio": 1.0, "items_per_second": 100.0}
    slower = {"ratio": 2.0, "items_per_second": 170.0}
    assert load("step_report").throughput(slower, base) == "50"

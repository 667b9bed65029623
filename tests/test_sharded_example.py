"""The GPT on a mesh: what its devices exchange, hold and save."""

from pathlib import Path

import jax
import pytest

from support.eight_devices import run_on_eight_devices

for package in ("flax", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)
TESTS = Path(__file__).parent


@pytest.mark.slow
def test_eight_devices_train_as_one():
    run_on_eight_devices(TESTS / "support" / "sharded_gpt.py")


@pytest.fixture
def sharded(monkeypatch):
    monkeypatch.syspath_prepend(TESTS.parent / "examples")
    import sharded

    return sharded


def start(sharded, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["sharded.py", *words])
    return sharded.main()


def test_a_run_is_on_the_mesh_that_was_asked_for(sharded, monkeypatch, capsys):
    seen = []

    def run(training, options):
        (batch,) = [x for x, _ in zip(training.batches(0), "1", strict=False)]
        seen.append((jax.sharding.get_mesh().shape, batch.sharding.mesh.shape))

    monkeypatch.setattr(sharded.loop, "run", run)
    monkeypatch.setattr(sharded, "exchanged", lambda training, bits: f"at {bits} bits")
    start(sharded, monkeypatch, "--mesh", "1", "1", "--bits", "2")
    assert seen == [({"data": 1, "fsdp": 1},) * 2]
    assert "at 2 bits" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--devices", "--mesh", "--processes"])
def test_none_of_them_is_refused(option, sharded, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        start(sharded, monkeypatch, option, "0", "1")
    assert f"argument {option}: 0: an integer from 1 on" in capsys.readouterr().err


def test_a_batch_that_devices_cannot_share(sharded):
    mesh = jax.sharding.AbstractMesh((1, 2), ("data", "fsdp"))
    options = sharded.loop.parser("").parse_args(["--batch", "3"])
    with pytest.raises(ValueError, match="3 sequences on a mesh of 2 .* --batch 2 or"):
        sharded.training(options, mesh)


def test_a_target_is_refused_before_anything_runs(sharded, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        start(sharded, monkeypatch, "--target", "h100")
    assert "use gpt.py with --batch" in capsys.readouterr().err

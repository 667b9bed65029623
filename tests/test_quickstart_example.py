"""What the quickstart checks before it compiles, and its table."""

import importlib.util

import pytest

for package in ("flax", "optax", "rich"):
    pytest.importorskip(package)


@pytest.fixture
def quickstart(load):
    return load("quickstart")


@pytest.mark.parametrize("option", ["--epochs", "--batch", "--channels", "--blocks"])
def test_counts_of_none_are_refused(option, quickstart, capsys):
    with pytest.raises(SystemExit):
        quickstart.parser().parse_args([option, "0"])
    assert f"argument {option}: 0: an integer from 1" in capsys.readouterr().err


def test_one_step_has_no_time(quickstart):
    one, three = (quickstart.Trainer(None, None) for _ in range(2))
    one.seconds, three.seconds = [9.0], [9.0, 1.0, 3.0]
    assert quickstart.relative_time(one, one) == "-"
    assert quickstart.relative_time(three, three) == "1.00x"


def test_a_picture_is_looked_after_before_anything_is_compiled(
    quickstart, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    console = quickstart.Console()
    picture = tmp_path / "new" / "a.png"
    assert quickstart.place_of(picture, console) == picture
    with pytest.raises(OSError, match="a.png"):
        quickstart.place_of(picture / "b.png", console)
    with pytest.raises(OSError, match="new"):
        quickstart.place_of(tmp_path / "new", console)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert quickstart.place_of(picture, console) is None
    assert "needs matplotlib: pip install -e '.[plots]'" in capsys.readouterr().out

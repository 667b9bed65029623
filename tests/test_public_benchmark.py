"""The benchmark of public models, on a small model in a folder."""

import json
from pathlib import Path

import jax
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytestmark = pytest.mark.unoptimized

EXAMPLES = Path(__file__).parent.parent / "examples"
CODE = """
import flax.linen as nn
import helper

class Block(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        assert train is True
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(64)(x)))

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return Block()(Block()(x, train=train), train=train)
"""


@pytest.fixture
def model(load, tmp_path):
    """A model of a checkout that imports a package which is not there."""
    setting, ways = load("public_setting"), load("public_ways")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "nets.py").write_text(CODE)

    def make(s):
        nets = s.load("toy", "nets", "helper")
        s.wrap(nets, "Block", static=["train"])
        x = s.floats(16, 32)
        loss = lambda y, x: setting.squared(y, None, 1.0)
        return ways.linen(nets.Net(), (x,), loss, train=True)

    return setting.Model("toy", "toy", "Block", "16 x 32", make)


@pytest.mark.slow
def test_a_gradient_is_checked(load, model, tmp_path):
    found = load("public").check(model, tmp_path)
    assert found["bits"] == "same" and found["exact_error"] < 1e-6
    # Of 16 independent draws: a quarter, give or take 1 / sqrt(2 * 15) of it.
    assert 0.15 < found["error_of_mean"] / found["error"] < 0.35
    assert 0 < found["error"] < 0.3 and found["bias"] < found["error"] / 4


@pytest.mark.slow
def test_a_wrong_gradient_is_a_bias(load, model, tmp_path, monkeypatch):
    public = load("public")
    run = public.loss_and_outputs

    def wrong(net):
        scale = 1.1 if net is wrong.small else 1.0
        return lambda *args: jax.tree.map(lambda x: scale * x, run(net)(*args))

    build = type(model).build

    def remember(self, code, way, is_small):
        net = build(self, code, way, is_small)
        wrong.small = net if way.name == "jaxact" else getattr(wrong, "small", None)
        return net

    monkeypatch.setattr(type(model), "build", remember)
    monkeypatch.setattr(public, "loss_and_outputs", wrong)
    found = public.check(model, tmp_path)
    assert found["bits"] == "forward alone"
    assert found["bias"] == pytest.approx(0.1, abs=0.03)


def test_fewer_bytes_are_stored(load, model, tmp_path):
    found = load("public").stored(model, tmp_path)
    assert 0 < found["stored_bytes"] < found["plain_bytes"] / 2


@pytest.mark.slow
def test_recomputing_a_block_with_a_static_keyword_changes_no_bit(
    load, model, tmp_path
):
    ways, public = load("public_ways"), load("public")
    plain, remat = (
        model.build(tmp_path, way, is_small=True) for way in (ways.PLAIN, ways.REMAT)
    )
    params, rest = plain.init()
    jaxpr = jax.make_jaxpr(public.loss_of(remat))(
        params, rest, jax.random.key(0), *remat.inputs
    )
    assert str(jaxpr).count("remat") + str(jaxpr).count("checkpoint") >= 2
    run = lambda net: net.outputs(params, rest, jax.random.key(0), *net.inputs)
    assert public.same(run(plain), run(remat))


def test_a_table_is_written_for_the_committed_rows(load):
    rows = json.loads((EXAMPLES / "benchmarks/results/public.json").read_text())
    table = load("public").markdown(rows.values())
    assert len(rows) >= 12 and table.count("\n") == len(rows) + 2
    inside = [row for row in rows.values() if "both" in row]
    assert len(inside) >= 12
    for row in inside:
        assert row["both"]["temp_bytes"] < row["remat"]["temp_bytes"]
    for row in rows.values():
        assert row["bits"] in ("same", "forward alone")  # see `public.check`
        assert row["stored_bytes"] < row["plain_bytes"] / 3

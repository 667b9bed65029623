"""The graph example learns a small graph, and ends with its memory."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxact
from support.variants import thorough
from test_examples import mib, rows, run

for package in ("flax", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)
pytestmark = pytest.mark.unoptimized
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def communities(tmp_path):
    """A file of two groups of 128 nodes, mostly joined within; one node in eight shows
    a feature of its group, one in four has a label."""
    rng = np.random.default_rng(0)
    labels = np.arange(256) % 2
    group = labels + 2 * rng.integers(0, 128, (1024, 256))
    senders = np.concatenate([group[:4].ravel(), rng.integers(0, 256, 64)])
    receivers = np.concatenate([np.tile(np.arange(256), 4), rng.integers(0, 256, 64)])
    shown = np.arange(256) % 16 < 2
    path = tmp_path / "communities.npz"
    np.savez(
        path,
        feature_rows=np.arange(256),
        feature_cols=np.where(shown, labels, 2 + rng.integers(0, 6, 256)),
        num_features=8,
        labels=labels,
        senders=senders,
        receivers=receivers,
        train_index=np.arange(64),
        test_index=np.arange(64, 256),
    )
    return path


@pytest.fixture
def training(communities, monkeypatch):
    """Makes the example's training of the options."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import graph

    def make(*words):
        options = ["--data", communities, *words]
        return graph.training(graph.parser().parse_args(list(map(str, options))))

    return make


@thorough
@pytest.mark.parametrize("net", ["gcn", "gat"])
@jax.numpy_dtype_promotion("standard")  # as optax asks
def test_a_graph_is_learned(net, training):
    import loop

    chosen = training("--net", net, "--steps", 60)
    assert chosen.name == f"{net.upper()} on communities, 60 steps"
    step = loop.training_step(chosen.loss(jaxact.Policy(4)), chosen.optimizer)
    state, losses = loop.fresh(chosen), []
    for batch in chosen.batches(0):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.3 < 0.6 < losses[0]
    score = chosen.score(state.params, ())
    # Chance is a half; a node hears of 16 others through two layers.
    assert float(score.removeprefix("test accuracy ").removesuffix("%")) > 85


def test_batches_are_the_same_after_an_interruption(training):
    chosen = training("--steps", 3, "--batch", 16)
    batches, later = list(chosen.batches(0)), list(chosen.batches(1))
    nodes = [np.asarray(nodes) for _, _, nodes, _ in batches]
    assert len(batches) == 3 and len(later) == 2 and nodes[0].shape == (16,)
    assert (nodes[0] != nodes[1]).any()
    for a, b in zip(batches[1:], later, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


@thorough
def test_the_graph_example_ends_with_its_memory(communities):
    text = run("graph.py", "--net", "gcn", "--data", communities, "--steps", 2)
    assert "test accuracy" in text and "2/2" in text
    plain, packed = rows(text)
    assert [plain[0], packed[0]] == ["uncompressed", "jaxact"]
    assert mib(packed[2]) * 3 < mib(plain[2])

"""The table of largest batches, and the shapes that they are compiled for."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytestmark = pytest.mark.unoptimized


def test_shapes_of_a_batch_that_does_not_exist(load):
    tiny = load("step_networks").NETWORKS["tiny"]
    (batch,) = tiny.batches(1)
    found = load("batch").batch_shapes(tiny, tiny.batch)
    assert found.shape == batch.shape
    assert load("batch").batch_shapes(tiny, 5).shape == (5, *batch.shape[1:])


def test_the_table(load):
    """A ratio to the uncompressed step of the same memory; an end that is not known."""
    common = {"network": "tiny", "unit": "tokens", "multiple_of": 1, "command": "c"}
    common |= {"compiled_for": "H", "jax": "j", "flax": "f", "jaxact": "a"}
    common |= {"date": "2026-01-01T", "memory": "24GiB", "next_bytes": 1}
    rows = [
        common | {"way": "uncompressed", "batch": 10},
        common | {"way": "jaxact 2 bits", "batch": 25},
        common | {"way": "checkpoint", "batch": 40, "next_bytes": None},
    ]
    text = load("batch").markdown(rows)
    assert "| jaxact 2 bits | 25 (2.5x) |" in text
    assert "| checkpoint | at least 40 (4.0x) |" in text
    assert "6.6 to 14 times" in text

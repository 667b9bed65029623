"""The files that examples read: what is wrong with one is said."""

import numpy as np
import pytest

from examples import data


def images_of(shape, labels):
    images = np.zeros(shape, np.uint8)
    names = np.array(["a", "b"])
    fields = {"train_images": images, "train_labels": np.zeros(labels, int)}
    tests = {"test_images": images, "test_labels": np.zeros(labels, int)}
    return fields | tests | {"class_names": names}


@pytest.mark.parametrize(
    "shape, labels, message",
    [
        ((4, 8, 8), 4, r"train_images \[4, 8, 8\] .*height, width, channels"),
        ((4, 8, 8, 3), 3, r"train_labels \[3\]"),
        ((0, 8, 8, 3), 0, "N at least 1"),
    ],
)
def test_arrays_with_other_shapes(shape, labels, message, tmp_path):
    np.savez(tmp_path / "data.npz", **images_of(shape, labels))
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "data.npz")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"test_labels": [0, 1, 2, 1]}, "test_labels .* 0 to 2; .* from 0 to 1 are"),
        ({"train_labels": [0, -1, 0, 1]}, "train_labels .* from -1 to 1; .* from 0"),
        ({"train_labels": [0.0, 1, 0, 1]}, "train_labels are float64 .* integers"),
        ({"test_images": np.ones((4, 8, 8, 3))}, "test_images are float64; uint8"),
    ],
)
def test_arrays_with_other_values(changed, message, tmp_path):
    np.savez(tmp_path / "data.npz", **images_of((4, 8, 8, 3), 4) | changed)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "data.npz")


GRAPH = {
    "feature_rows": [0, 0, 1],
    "feature_cols": [1, 3, 0],
    "num_features": 4,
    "labels": [0, 1, 1],
    "senders": [0, 1],
    "receivers": [1, 0],
    "train_index": [0, 1],
    "test_index": [2],
}


def test_a_graph_of_a_file(tmp_path, load):
    graphs = load("graphs")
    np.savez(tmp_path / "tiny.npz", **GRAPH)
    graph = graphs.load(tmp_path / "tiny.npz")
    assert (graph.name, graph.num_classes) == ("tiny", 2)
    wanted = [[0, 0.5, 0, 0.5], [1, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(graph.features, wanted)
    senders, receivers, weights = graph.edges
    assert sorted(zip(senders, receivers, weights, strict=True)) == [
        *((0, 0, 0.5), (0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.5), (2, 2, 1.0))
    ]
    np.savez(tmp_path / "half.npz", labels=[0])
    with pytest.raises(ValueError, match="lacks feature_rows, feature_cols"):
        graphs.load(tmp_path / "half.npz")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"feature_rows": [0, 0, 3]}, "feature_rows .* 0 to 3; from 0 to 2"),
        ({"feature_cols": [1, -1, 0]}, "feature_cols .* -1 to 1; from 0 to 3"),
        ({"receivers": [1, 3]}, "receivers .* 1 to 3; from 0 to 2"),
        ({"senders": [0.0, 1.0]}, "senders are float64 .* integers"),
        ({"senders": [0]}, "has 1 senders and 2 receivers"),
        ({"test_index": np.array([], int)}, r"test_index .*\[0\]; .* at least 1"),
        ({"test_index": [1, 2]}, "train_index and test_index share 1 nodes"),
        ({"labels": [0, -1, 1]}, "labels .* -1 to 1; from 0 on"),
    ],
)
def test_a_graph_with_other_values(changed, message, tmp_path, load):
    np.savez(tmp_path / "graph.npz", **GRAPH | changed)
    with pytest.raises(ValueError, match=message):
        load("graphs").load(tmp_path / "graph.npz")


def test_a_file_that_is_no_archive(tmp_path):
    np.save(tmp_path / "data.npy", np.zeros(4))
    whole = tmp_path / "data.npz"
    np.savez(whole, **images_of((4, 8, 8, 3), 4))
    whole.write_bytes(whole.read_bytes()[:1000])
    for path in (tmp_path / "data.npy", whole):
        with pytest.raises(ValueError, match="an .npz with train_images, .* required"):
            data.load(path)


def test_a_batch_with_more_images_than_there_are(tmp_path):
    np.savez(tmp_path / "data.npz", **images_of((4, 8, 8, 3), 4))
    images = data.load(tmp_path / "data.npz")
    assert np.isfinite(images.train_images).all()  # a channel without deviation
    assert len(next(images.training_batches(4, seed=0, start=0))[0]) == 4
    with pytest.raises(ValueError, match="4 are there to learn from"):
        next(images.training_batches(5, seed=0, start=0))


def test_a_text_with_any_character(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("b\0ab" * 10, encoding="utf-8")
    text = data.load_text(path)
    assert text.alphabet == "\0ab"
    np.testing.assert_array_equal(text.train[:4], [2, 0, 1, 2])

"""Trainings on drawn shapes and on characters: their data, scores and residuals."""

import jax
import numpy as np
import pytest

import jaxact

pytest.importorskip("flax")
pytest.importorskip("optax")
pytestmark = pytest.mark.unoptimized


@pytest.fixture
def drawn(load):
    return load("drawn_tasks")


@pytest.fixture
def scene(drawn):
    return drawn.draw(64, seed=0)


def test_every_shape_is_in_its_box(scene):
    shapes = np.argwhere(scene.kinds)
    assert len(shapes) > 64
    for i, row, column in shapes:
        top, left, bottom, right = scene.boxes[i, row, column]
        assert 0 <= top < bottom <= 32 and 0 <= left < right <= 32
        assert (row, column) == ((top + bottom) // 8, (left + right) // 8)
        inside = scene.labels[i, int(top) : int(bottom) + 1, int(left) : int(right) + 1]
        assert inside.any()  # another shape may cover it
    assert (scene.labels > 0).any(axis=(1, 2)).all()


def test_the_right_answer_scores_fully_and_another_less(drawn, scene):
    segments = drawn.Segmentation(None, True)
    right = np.eye(4)[scene.labels]
    assert segments.rate(right, scene) == 100
    assert segments.rate(np.roll(right, 4, axis=1), scene) < 80
    detects = drawn.Detection(None, True)
    kinds, boxes = np.eye(4)[scene.kinds], drawn.relative(scene.boxes)
    found = np.concatenate([kinds, boxes], -1)
    assert detects.rate(found, scene) == 100
    # Boxes of half the side overlap the right ones by a quarter.
    assert detects.rate(np.concatenate([kinds, boxes / 2], -1), scene) < 50
    assert detects.rate(np.roll(found, 1, axis=1), scene) < 50


def test_overlaps(drawn):
    square, moved = np.array([0.0, 0, 4, 4]), np.array([0.0, 2, 4, 6])
    assert drawn.iou(square, square) == 1
    assert drawn.iou(square, moved) == pytest.approx(1 / 3)
    assert drawn.iou(square, square + 4) == 0


def test_smaller_images_are_means_of_four_pixels(drawn):
    task = drawn.SuperResolution(None, True)
    x = np.arange(2 * 32 * 32 * 3, dtype=np.float32).reshape(2, 32, 32, 3)
    found = np.asarray(task.inputs(x))
    blocks = x.reshape(2, 16, 2, 16, 2, 3).mean((2, 4))
    np.testing.assert_allclose(found[:, ::2, 1::2], blocks, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["Segmentation", "Detection", "SuperResolution", "rnn"]
)
def test_residuals_of_a_training_are_stored_in_few_bits(load, drawn, name):
    task_of = load("rnn_task").RecurrentTask if name == "rnn" else getattr(drawn, name)
    task = task_of(None, True)
    params, statistics = jax.eval_shape(lambda: task.variables(0))
    batch = next(task.batches(0))

    def stored(keep):
        loss = lambda *args: task.loss(keep)(*args)[0]
        arguments = params, statistics, batch, np.uint32(0)
        return jaxact.residuals(loss, *arguments, argnums=0).stored_bytes

    assert stored(jaxact.Policy(bits=4)) < 0.4 * stored("all")

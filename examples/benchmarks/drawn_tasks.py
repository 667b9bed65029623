"""Three small trainings on drawn shapes: segmentation, detection, super-resolution.

An image has one to three shapes, squares, discs and triangles, of random colors on a
noisy background. Every image is drawn anew, so none is seen twice.
"""

import abc
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tasks import Keep, State, Task, kept_module, schedule

SIDE, CELL = 32, 4  # pixels of an image; of a cell that a detector reports on
NUM_KINDS = 3
TEST_SEED = 10**6


class Scene(NamedTuple):
    """Images, and the shapes that are on them.

    Attributes:
      images: float32 [N, 32, 32, 3].
      labels: int32 [N, 32, 32], 0 for the background, else 1 + the kind of the shape.
      kinds: int32 [N, 8, 8], the same for the cell that a shape's center is in.
      boxes: float32 [N, 8, 8, 4], there top, left, bottom, right in pixels.
    """

    images: np.ndarray
    labels: np.ndarray
    kinds: np.ndarray
    boxes: np.ndarray


def draw(num_images: int, seed: int) -> Scene:
    rng, cells = np.random.default_rng(seed), SIDE // CELL
    images = rng.normal(0, 0.3, (num_images, SIDE, SIDE, 3)).astype(np.float32)
    labels = np.zeros((num_images, SIDE, SIDE), np.int32)
    kinds = np.zeros((num_images, cells, cells), np.int32)
    boxes = np.zeros((num_images, cells, cells, 4), np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    for i in range(num_images):
        for _ in range(rng.integers(1, 4)):
            kind, half = int(rng.integers(NUM_KINDS)), rng.uniform(3, 7)
            y, x = rng.uniform(half, SIDE - half, 2)
            down, right = rows - y, columns - x
            inside = (
                np.maximum(abs(down), abs(right)) < half,
                np.hypot(down, right) < half,
                (abs(right) < (down + half) / 2) & (down < half),
            )[kind]
            images[i][inside] = rng.normal(0, 1, 3) + rng.normal(0, 0.3, 3)
            labels[i][inside] = 1 + kind
            cell = i, int(y) // CELL, int(x) // CELL
            kinds[cell] = 1 + kind
            boxes[cell] = y - half, x - half, y + half, x + half
    return Scene(images, labels, kinds, boxes)


class ConvBlock(nn.Module):
    """A residual block of two convolutions."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.channels, (3, 3), use_bias=False)(x)))
        y = norm()(nn.Conv(self.channels, (3, 3), use_bias=False)(y))
        return nn.relu(x + y)


class Pyramid(nn.Module):
    """A network from images to maps, through coarser maps and back.

    Attributes:
      outputs: channels of the map.
      stride: of the map, in pixels: 1 or 4.
      block: of every residual block.
    """

    outputs: int
    stride: int
    block: Any
    channels: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = lambda width, x, stride=1: nn.Conv(width, (3, 3), (stride, stride))(x)
        fine = self.block(self.channels)(conv(self.channels, x), train)
        middle = self.block(2 * self.channels)(conv(2 * self.channels, fine, 2), train)
        coarse = conv(2 * self.channels, middle, 2)
        coarse = self.block(2 * self.channels)(coarse, train)
        if self.stride == CELL:
            return nn.Dense(self.outputs)(coarse)
        middle = middle + upsample(coarse)
        fine = jnp.concatenate([fine, upsample(middle)], -1)
        fine = self.block(self.channels)(conv(self.channels, fine), train)
        return nn.Dense(self.outputs)(fine)


def upsample(x: jax.Array) -> jax.Array:
    return x.repeat(2, axis=1).repeat(2, axis=2)


def coarse(images: Any) -> Any:
    """The images from a quarter of the pixels, means of four, in the same size."""
    small = images[:, ::2, ::2] + images[:, 1::2, ::2]
    small = small + images[:, ::2, 1::2] + images[:, 1::2, 1::2]
    return upsample(small / 4)


class DrawnTask(Task):
    """A network of drawn images, trained with BatchNorm."""

    outputs: int
    stride = 1

    def __init__(self, folder: Path | None, small: bool):
        del folder  # nothing is read
        super().__init__()
        self.num_steps = 2 if small else 300
        self.batch_size, self.num_tests = (4, 8) if small else (16, 256)
        self.optimizer = optax.adam(schedule(4e-3, self.num_steps))
        self.name = f"{type(self).__name__}, drawn shapes, {self.num_steps} steps"
        self.evaluate = jax.jit(self._evaluate)

    @abc.abstractmethod
    def error(self, output: jax.Array, scene: Any) -> jax.Array:
        """The loss of one batch."""

    @abc.abstractmethod
    def rate(self, output: np.ndarray, scene: Scene) -> float:
        """The score of all test images."""

    def inputs(self, images: Any) -> Any:
        return images

    def network(self, keep: Keep) -> Pyramid:
        block = kept_module(ConvBlock, keep)
        return Pyramid(self.outputs, self.stride, block)

    def variables(self, seed: int) -> tuple[Any, Any]:
        images = self.inputs(jnp.zeros((1, SIDE, SIDE, 3)))
        init = functools.partial(self.network("all").init, train=True)
        found = init(jax.random.key(seed), images)
        return found["params"], found["batch_stats"]

    def loss(self, keep: Keep) -> Callable[..., tuple[Any, Any]]:
        net = self.network(keep)

        def loss(params: Any, statistics: Any, scene: Any, seed: Any) -> Any:
            output, updated = net.apply(
                {"params": params, "batch_stats": statistics},
                self.inputs(scene.images),
                train=True,
                mutable=["batch_stats"],
                rngs={"jaxact": jax.random.key(seed)},
            )
            return self.error(output, scene), updated["batch_stats"]

        return loss

    def batches(self, seed: int) -> Iterator[Scene]:
        for step in range(self.num_steps):
            yield draw(self.batch_size, seed * self.num_steps + step)

    def score(self, state: State) -> float:
        scene = draw(self.num_tests, TEST_SEED)
        return self.rate(np.asarray(self.evaluate(state, scene.images)), scene)

    def _evaluate(self, state: State, images: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.statistics}
        return self.network("all").apply(variables, self.inputs(images), train=False)


class Segmentation(DrawnTask):
    """The kind of every pixel; scored by intersection over union, mean of 4 kinds."""

    metric, sign, outputs = "mean IoU, %", 1, 1 + NUM_KINDS

    def error(self, output: jax.Array, scene: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(output, scene.labels)
        return losses.mean()

    def rate(self, output: np.ndarray, scene: Scene) -> float:
        found, right = output.argmax(-1), scene.labels
        both = [((found == k) & (right == k)).sum() for k in range(self.outputs)]
        either = [((found == k) | (right == k)).sum() for k in range(self.outputs)]
        return 100 * float(np.mean(np.divide(both, np.maximum(either, 1))))


class Detection(DrawnTask):
    """Kind and box of a shape in the cell of its center, as FCOS at one scale.

    Scored by F1: a box is right if it is of the right kind and overlaps that of its
    cell by an intersection over union of 0.5.
    """

    metric, sign, outputs = "F1 at IoU 0.5, %", 1, 1 + NUM_KINDS + 4
    stride = CELL

    def error(self, output: jax.Array, scene: Any) -> jax.Array:
        logits, boxes = output[..., : 1 + NUM_KINDS], output[..., 1 + NUM_KINDS :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, scene.kinds)
        is_shape = (scene.kinds > 0)[..., None]
        misses = optax.huber_loss(boxes, relative(scene.boxes)) * is_shape
        return losses.mean() + misses.sum() / jnp.maximum(is_shape.sum(), 1)

    def rate(self, output: np.ndarray, scene: Scene) -> float:
        found = output[..., : 1 + NUM_KINDS].argmax(-1)
        overlap = iou(absolute(output[..., 1 + NUM_KINDS :]), scene.boxes)
        right = (found > 0) & (found == scene.kinds) & (overlap > 0.5)
        return 200 * float(right.sum() / ((found > 0).sum() + (scene.kinds > 0).sum()))


def centers() -> np.ndarray:
    """Centers of the cells, twice, as boxes of no size: [1, 8, 8, 4]."""
    cells = SIDE // CELL
    grid = np.moveaxis(np.mgrid[:cells, :cells] + 0.5, 0, -1)
    return CELL * np.tile(grid, 2)[None]


def relative(boxes: Any) -> Any:
    return (boxes - centers()) / CELL


def absolute(boxes: Any) -> Any:
    return boxes * CELL + centers()


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes [..., 4]."""
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    both = np.maximum(high - low, 0).prod(-1)
    area = lambda box: np.maximum(box[..., 2:] - box[..., :2], 0).prod(-1)
    return both / np.maximum(area(a) + area(b) - both, 1e-6)


class SuperResolution(DrawnTask):
    """Images from those of half the side; scored by the signal-to-noise ratio."""

    metric, sign, outputs = "peak signal to noise, dB", 1, 3
    peak = 4.0  # nearly all values are between -2 and 2

    def inputs(self, images: Any) -> Any:
        return coarse(images)

    def error(self, output: jax.Array, scene: Any) -> jax.Array:
        return jnp.square(self.inputs(scene.images) + output - scene.images).mean()

    def rate(self, output: np.ndarray, scene: Scene) -> float:
        error = self.error(jnp.asarray(output), scene)
        return float(10 * np.log10(self.peak**2 / error))


DRAWN_TASKS = {
    "segmentation": Segmentation,
    "detection": Detection,
    "super-resolution": SuperResolution,
}

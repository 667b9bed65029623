"""Images in folders, as ImageNet has them, read while training.

root/train/<class>/*.jpg     any format that Pillow reads, and any size
root/val/<class>/*.jpg       the same classes
"""

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

# Of ImageNet's training images; red, green and blue in 0..255.
MEAN = np.array([123.68, 116.28, 103.53], np.float32)
DEVIATION = np.array([58.40, 57.12, 57.38], np.float32)

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ImageFolders:
    """Batches of float32 images [N, size, size, 3] and of their int32 labels [N]."""

    root: Path
    size: int = 224

    @property
    def name(self) -> str:
        return self.root.name

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        folders = sorted(p.name for p in (self.root / "train").glob("*") if p.is_dir())
        if not folders:
            raise ValueError(
                f"{self.root} has no folders train/<class>: one folder of images for "
                "each class is required, in train/ and in val/."
            )
        return tuple(folders)

    def files(self, split: str) -> tuple[list[Path], np.ndarray]:
        """All images of a split, class by class, and their labels."""
        of_class = [sorted((self.root / split / c).glob("*")) for c in self.class_names]
        if not any(of_class):
            raise ValueError(
                f"{self.root / split} has no images in {', '.join(self.class_names)}"
            )
        labels = np.repeat(np.arange(len(of_class)), [len(paths) for paths in of_class])
        return list(itertools.chain(*of_class)), labels.astype(np.int32)

    def training_batches(self, size: int, seed: int, start: int) -> Iterator[Batch]:
        """Endless batches of random crops; the first `start` of them are left out."""
        self.files("val")  # wanted after the training
        paths, labels = self.files("train")
        per_epoch = len(paths) // size
        if not per_epoch:
            raise ValueError(f"{len(paths)} images do not fill a batch of {size}")

        def crop(epoch: int, index: int) -> np.ndarray:
            # NumPy takes (seed, epoch, 0) for (seed, epoch), which gives the order.
            rng = np.random.default_rng((seed, epoch, index + 1))
            return random_crop(paths[index], self.size, rng)

        with ThreadPoolExecutor() as pool:
            for number in itertools.count(start):
                epoch, place = divmod(number, per_epoch)
                order = np.random.default_rng((seed, epoch)).permutation(len(paths))
                chosen = order[place * size :][:size]
                images = pool.map(functools.partial(crop, epoch), chosen)
                yield np.stack(list(images)), labels[chosen]

    def test_batches(self, size: int) -> Iterator[Batch]:
        """The middles of all images of val/, up to `size` at a time."""
        paths, labels = self.files("val")
        middle = functools.partial(middle_crop, size=self.size)
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(paths), size):
                images = pool.map(middle, paths[start:][:size])
                yield np.stack(list(images)), labels[start:][:size]


def random_crop(path: Path, size: int, rng: np.random.Generator) -> np.ndarray:
    """A part of the image, 8 to 100 % of its area and near a square, maybe mirrored.

    Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6.
    """
    image = opened(path)
    area = image.width * image.height * rng.uniform(0.08, 1)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width = min(image.width, round((area * ratio) ** 0.5))
    height = min(image.height, round((area / ratio) ** 0.5))
    left = rng.integers(image.width - width + 1)
    top = rng.integers(image.height - height + 1)
    box = (left, top, left + width, top + height)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return normalized(ImageOps.mirror(image) if rng.random() < 0.5 else image)


def middle_crop(path: Path, size: int) -> np.ndarray:
    """The middle square, seven eighths of the shorter side."""
    image = ImageOps.fit(opened(path), (size, size), bleed=1 / 16)
    return normalized(image)


def opened(path: Path) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB")


def normalized(image: Any) -> np.ndarray:
    return (np.asarray(image, np.float32) - MEAN) / DEVIATION

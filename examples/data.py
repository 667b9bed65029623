"""Training data: that which comes with a dependency, or a file of your own.

Images are scikit-learn's handwritten digits, text is Python's own help. A file of text
is UTF-8. A file of images is an .npz with these arrays, for any number of images, sizes
and classes:

  train_images  uint8 [N, height, width, channels]
  train_labels  integers [N], from 0 to the number of classes - 1
  test_images   uint8 [M, height, width, channels]
  test_labels   integers [M]
  class_names   strings [classes]

CIFAR-10 in this form has images of [32, 32, 3] and ten classes. To make a file:
`np.savez_compressed(path, train_images=..., train_labels=..., ...)`.
"""

import itertools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]

FIELDS = ("train_images", "train_labels", "test_images", "test_labels", "class_names")


@dataclass(frozen=True)
class Images:
    """float32 images [N, height, width, channels] and their int32 labels [N].

    Each channel has mean 0 and deviation 1 over the training images.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]

    def training_batches(self, size: int, seed: int, start: int) -> Iterator[Batch]:
        """Endless batches, each epoch in its own order; `start` of them left out."""
        epochs = (
            batches(self.train_images, self.train_labels, size, 1000 * seed + epoch)
            for epoch in itertools.count()
        )
        return itertools.islice(itertools.chain.from_iterable(epochs), start, None)

    def test_batches(self, size: int) -> Iterator[Batch]:
        """All test images in order, up to `size` at a time."""
        for start in range(0, len(self.test_images), size):
            yield self.test_images[start:][:size], self.test_labels[start:][:size]


def load(path: Path | None = None) -> Images:
    """The images of the file at `path`, or the digits."""
    fields = digits() if path is None else read(path)
    pixels = fields["train_images"].astype(np.float32)
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    deviation = np.where(deviation > 0, deviation, 1)  # an empty channel
    normalize = lambda x: (x.astype(np.float32) - mean) / deviation
    return Images(
        name="handwritten digits" if path is None else path.stem,
        train_images=normalize(fields["train_images"]),
        train_labels=fields["train_labels"].astype(np.int32),
        test_images=normalize(fields["test_images"]),
        test_labels=fields["test_labels"].astype(np.int32),
        class_names=tuple(str(name) for name in fields["class_names"]),
    )


def load_images(path: Path | None, pixels: int) -> Any:
    """As `load`; of a folder, images of `pixels` squared: see examples/folders.py."""
    if path is None or not path.is_dir():
        return load(path)
    from folders import ImageFolders

    return ImageFolders(path, pixels)


def accuracy(images: Any, classify: Callable[[np.ndarray], Any]) -> float:
    """How many test images `classify` gives their label."""
    right = [np.asarray(classify(x)) == y for x, y in images.test_batches(256)]
    return float(np.concatenate(right).mean())


@dataclass(frozen=True)
class Text:
    """int32 characters: the first nine tenths [N] and the rest [M] of one text.

    A number is the character's place in `alphabet`.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    alphabet: str


def load_text(path: Path | None = None) -> Text:
    """The text of the file at `path`, or Python's help."""
    text = python_help() if path is None else read_text(path)
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    found = np.array([numbers[character] for character in text], np.int32)
    train, validation = np.split(found, [len(text) * 9 // 10])
    name = "Python's help" if path is None else path.stem
    return Text(name, train, validation, alphabet)


def read_text(path: Path) -> str:
    """The text in a file, checked to be one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a file of text in UTF-8 is required") from error


def python_help() -> str:
    """Half a megabyte of English about Python, as `help("for")` prints it."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, checked for the fields above.

    Raises:
      ValueError: no such file, or a field is missing or not as `check` asks.
    """
    fields = arrays(path, FIELDS, "examples/data.py")
    check(fields, path)
    return fields


def arrays(path: Path, names: Sequence[str], described: str) -> dict[str, np.ndarray]:
    """The arrays with these names in an .npz file.

    Args:
      described: the file that says how they must be, for messages.

    Raises:
      OSError: no such file.
      ValueError: it is no .npz, or lacks one.
    """
    required = f"an .npz with {', '.join(names)} is required, see {described}"
    if not zipfile.is_zipfile(path):
        path.stat()  # "no such file"
        raise ValueError(f"{path}: {required}")
    with np.load(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}; it holds {', '.join(file)}: "
                + required
            )
        return {name: file[name] for name in names}


def check(fields: dict[str, np.ndarray], path: Path) -> None:
    """Raise `ValueError` where the arrays of a file are not as said above."""
    last = len(fields["class_names"]) - 1
    for part in ("train", "test"):
        images, labels = fields[f"{part}_images"], fields[f"{part}_labels"]
        if images.ndim != 4 or labels.shape != images.shape[:1] or not len(images):
            raise ValueError(
                f"{path}: {part}_images {list(images.shape)} and {part}_labels "
                f"{list(labels.shape)}: [N, height, width, channels] and [N] are "
                "required, N at least 1"
            )
        if images.dtype != np.uint8:
            raise ValueError(
                f"{path}: {part}_images are {images.dtype}; uint8 from 0 to 255 is "
                "required"
            )
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > last:
            raise ValueError(
                f"{path}: {part}_labels are {labels.dtype} from {labels.min()} to "
                f"{labels.max()}; integers from 0 to {last} are required, as there are "
                f"{last + 1} class_names"
            )


def digits() -> dict[str, np.ndarray]:
    """1797 digits of 8x8 pixels, doubled to 16x16 so that a network can halve twice.

    Every fifth image is for testing. They come in order of writer, so the test set has
    writers of the training set; it checks training, not the state of the art.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images = found.images[..., None].repeat(2, 1).repeat(2, 2) * (255 / 16)
    test = np.arange(len(images)) % 5 == 0
    return {
        "train_images": images[~test].astype(np.uint8),
        "train_labels": found.target[~test],
        "test_images": images[test].astype(np.uint8),
        "test_labels": found.target[test],
        "class_names": found.target_names,
    }


def windows(
    text: np.ndarray, length: int, size: int, num_batches: int, seed: int
) -> Iterator[np.ndarray]:
    """Batches [size, length] of stretches of the text, from places `seed` fixes."""
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        starts = rng.integers(len(text) - length + 1, size=(size, 1))
        yield text[starts + np.arange(length)]


def check_batch(size: int, count: int, examples: str = "images") -> None:
    """Raise `ValueError` where so many examples make no full batch."""
    if size > count:
        raise ValueError(
            f"a batch of {size} {examples}: {count} are there to learn from; give "
            f"--batch {count} or less"
        )


def batches(
    images: np.ndarray, labels: np.ndarray, size: int, seed: int
) -> Iterator[Batch]:
    """One epoch of full batches, in an order that `seed` fixes."""
    check_batch(size, len(images))
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]

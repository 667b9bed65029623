"""The ResNet and ViT examples, and the images that they read from folders."""

import numpy as np
import pytest

from support.variants import thorough
from test_examples import mib, rows, run

PILLOW = pytest.importorskip("PIL.Image")
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path):
    """Images of one colour each, of several sizes; the class is the colour."""
    for split, count in {"train": 4, "val": 2}.items():
        for name, colour in COLOURS.items():
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i in range(count):
                image = PILLOW.new("RGB", (20 + 7 * i, 31 - 3 * i), colour)
                image.save(place / f"{i}.png")
    return tmp_path


def expected(labels):
    """Images of a colour, normalized with the statistics of ImageNet."""
    pixels = np.array(list(COLOURS.values()), np.float32)[labels]
    mean = 255 * np.array([0.485, 0.456, 0.406])
    deviation = 255 * np.array([0.229, 0.224, 0.225])
    return ((pixels - mean) / deviation)[:, None, None]


def test_folders_give_each_image_its_label(folder):
    from examples.folders import ImageFolders

    images = ImageFolders(folder, size=8)
    assert images.class_names == ("blue", "green", "red")
    first = images.training_batches(6, seed=0, start=0)
    seen = [next(first) for _ in range(2)]  # an epoch
    (again, _), (tested, labels) = next(first), next(images.test_batches(100))
    for x, y in [*seen, (tested, labels)]:
        assert x.dtype == np.float32 and x.shape == (len(y), 8, 8, 3)
        # The statistics are known to four digits, of values up to 2.7.
        np.testing.assert_allclose(x, expected(y) + 0 * x, atol=2e-3)
    assert np.bincount(np.concatenate([y for _, y in seen])).tolist() == [4, 4, 4]
    assert np.bincount(labels).tolist() == [2, 2, 2]
    assert again.shape == (6, 8, 8, 3)


def test_folders_go_on_where_they_stopped(folder):
    from examples.folders import ImageFolders

    rng = np.random.default_rng(0)
    for path in (folder / "train").glob("*/*.png"):
        noise = rng.integers(0, 256, (16, 24, 3), np.uint8)
        PILLOW.fromarray(noise).save(path)
    images = ImageFolders(folder, size=8)
    batches = images.training_batches(5, seed=1, start=0)
    all_of_them = [next(batches) for _ in range(5)]
    late = images.training_batches(5, seed=1, start=3)
    for x, y in all_of_them[3:]:
        resumed_x, resumed_y = next(late)
        assert (resumed_x == x).all() and (resumed_y == y).all()
    other = next(images.training_batches(5, seed=2, start=0))
    assert (other[0] != all_of_them[0][0]).any()


def test_no_crop_is_drawn_as_the_order_is(folder, monkeypatch):
    from examples import folders

    drawn, make = [], np.random.default_rng

    def noted(seed):
        drawn.append(make(seed).random())
        return make(seed)

    monkeypatch.setattr(folders.np.random, "default_rng", noted)
    next(folders.ImageFolders(folder, 16).training_batches(12, seed=0, start=0))
    assert len(drawn) == 13 == len(set(drawn))


def test_folders_say_what_they_lack(folder, tmp_path_factory):
    from examples.folders import ImageFolders

    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="train/<class>"):
        next(ImageFolders(empty).training_batches(1, 0, 0))
    with pytest.raises(ValueError, match="do not fill a batch of 13"):
        next(ImageFolders(folder).training_batches(13, 0, 0))
    for path in (folder / "val").glob("*/*"):
        path.unlink()
    with pytest.raises(ValueError, match="val has no images in blue, green, red"):
        next(ImageFolders(folder).test_batches(1))


@thorough
def test_crops_are_parts_of_the_image(tmp_path):
    """Of a ramp from left to right, up to its mirror image, a crop is a ramp."""
    from examples import folders

    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    image = np.broadcast_to(ramp[None, :, None], (48, 64, 3))
    PILLOW.fromarray(np.ascontiguousarray(image)).save(tmp_path / "ramp.png")
    widths = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        crop = folders.random_crop(tmp_path / "ramp.png", 16, rng)
        steps = np.diff(crop[:, :, 0], axis=1)
        assert (steps >= 0).all() or (steps <= 0).all()
        widths.append(np.ptp(crop[..., 0]))
    assert min(widths) < max(widths) / 2


@pytest.mark.slow
@pytest.mark.parametrize("net", ["resnet", "vit"])
def test_image_examples_end_with_their_memory(net, folder):
    size = "--steps", 2, "--batch", 12, "--bits", 2
    text = run(f"{net}.py", "--data", folder, *size)
    assert "test accuracy" in text and "2/2" in text
    plain, packed = rows(text)
    assert [plain[0], packed[0]] == ["uncompressed", "jaxact"]
    assert plain[1] == plain[2]
    assert mib(packed[2]) * 4 <= mib(plain[2])
    assert mib(packed[3]) < mib(plain[3])

"""Image folders: decoding, crops, augmentation, and files that are no images."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minidnn.data import ImageFolder, Loader, Slot, open_data
from minidnn.errors import ArgumentError, DataError

from .test_data_sources import Array, read_all

SHAPE = (3, 14, 14)
MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
STD = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)


def pixels(x: Array) -> Array:
    """What was read [C, H, W] as pixels from 0 to 255."""
    return (x * STD + MEAN) * 255


def write(path: Path, array: Array, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return path


def noise(seed: int, height: int = 16, width: int = 16) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def make_folder(root: Path, per_class: int = 12, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for label, name in enumerate(classes):
        for number in range(per_class):
            write(root / name / f"{number:03}.png", noise(100 * label + number))
    return root


def ramp_folder(count: int, **options: Any) -> ImageFolder:
    """One file, many times: brightness rises from left to right by 4 a pixel, and from top to bottom by 1."""
    return ImageFolder(("ramp.png",) * count, (0,) * count, ("ramp",), SHAPE, **options)


@pytest.fixture
def ramp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    down, across = np.mgrid[0:32, 0:48]
    write(tmp_path / "ramp.png", np.repeat((4 * across + down)[:, :, None], 3, axis=2).astype(np.uint8))


def test_the_test_images_are_central_crops_normalized(tmp_path: Path) -> None:
    # 16 pixels are 14 and one seventh more: the image keeps its scale, and the crop leaves one pixel on each side.
    image = noise(0)
    path = write(tmp_path / "a.png", image)
    x, y = read_all(ImageFolder((str(path),), (1,), ("cat", "dog"), SHAPE))
    np.testing.assert_allclose(pixels(x[0]), image[1:15, 1:15].transpose(2, 0, 1), atol=1e-3)
    assert y.tolist() == [1]


def test_large_images_are_scaled_to_their_shorter_side(ramp: None) -> None:
    x, _ = read_all(ramp_folder(1))
    got = pixels(x[0])[0]
    # 32 x 48 pixels at half size: one step is 2 pixels of the file, and the crop's middle is the image's.
    np.testing.assert_allclose(np.diff(got, axis=1)[:, 1:-1], 8, atol=1.01)
    np.testing.assert_allclose(np.diff(got, axis=0)[1:-1], 2, atol=1.01)
    assert abs(got.mean() - (4 * 23.5 + 15.5)) < 0.6


def test_grey_input_from_colour_images_and_colour_input_from_grey_ones(tmp_path: Path) -> None:
    level = np.full((20, 9), 51, np.uint8)
    grey = write(tmp_path / "grey.png", level)
    colour = write(tmp_path / "colour.png", np.repeat(level[:, :, None], 3, axis=2))
    palette = write(tmp_path / "palette.gif", np.repeat(level[:, :, None], 3, axis=2), "P")
    alpha = write(tmp_path / "alpha.png", np.dstack([level, level, level, level]))
    transparent = tmp_path / "transparent.png"
    Image.fromarray(level).convert("P").save(transparent, transparency=b"\x40\x80")
    paths = tuple(map(str, (grey, colour, palette, alpha, transparent)))
    grey_x, _ = read_all(ImageFolder(paths, (0,) * 5, ("a",), (1, 6, 8)))
    np.testing.assert_allclose(grey_x, (51 / 255 - 0.5) / 0.5, atol=1e-5)
    colour_x, _ = read_all(ImageFolder(paths, (0,) * 5, ("a",), (3, 6, 8)))
    np.testing.assert_allclose(pixels(colour_x), 51, atol=1e-3)


def test_augmentation_follows_from_seed_epoch_and_index_alone(ramp: None) -> None:
    dataset = ramp_folder(40, augment=True, seed=3)
    whole, _ = read_all(dataset.at_epoch(2))
    for batch in (1, 7):
        for workers in (1, 3):
            slots = [Slot(np.empty((batch, *SHAPE), np.float32), np.empty(batch, np.int64)) for _ in range(3)]
            with Loader(dataset, batch, slots, shuffle=False, epoch=2, workers=workers) as batches:
                parts = []
                for slot, rows in batches:
                    parts.append(slot.x[:rows].copy())
                    slot.release()
            assert np.concatenate(parts).tobytes() == whole.tobytes()
    for other in (dataset.at_epoch(1), ramp_folder(40, augment=True, seed=4, epoch=2)):
        assert not np.array_equal(read_all(other)[0], whole)


def test_augmentation_crops_anywhere_and_flips_half(ramp: None) -> None:
    x, _ = read_all(ramp_folder(200, augment=True))
    got = (x * STD + MEAN) * 255
    flipped = got[:, 0, 7, 0] > got[:, 0, 7, -1]
    assert 70 < flipped.sum() < 130
    # The crop's middle moves over the whole margin: 2 pixels of the file down and 10 across, each way.
    middle = got.mean(axis=(1, 2, 3)) - (4 * 23.5 + 15.5)
    assert middle.min() < -30
    assert middle.max() > 30
    assert np.abs(middle).max() <= 4 * 10 + 2 + 1
    assert abs(middle.mean()) < 6


def test_without_augmentation_epochs_are_alike(ramp: None) -> None:
    dataset = ramp_folder(2)
    assert dataset.at_epoch(5) == dataset


def test_a_folder_without_test_images_holds_some_out(tmp_path: Path) -> None:
    data = open_data(str(make_folder(tmp_path)), input_shape=SHAPE, seed=1)
    train, test = data.train, data.split("test")
    assert isinstance(train, ImageFolder)
    assert isinstance(test, ImageFolder)
    assert (len(train), len(test), data.classes, train.class_names) == (22, 2, 2, ("cat", "dog"))
    assert (train.augment, train.seed, test.augment) == (True, 1, False)
    assert sorted(test.labels) == [0, 1]
    assert not set(train.paths) & set(test.paths)
    for part in (train, test):
        folders = [Path(path).parent.name for path in part.paths]
        assert folders == [part.class_names[label] for label in part.labels]


@pytest.mark.parametrize("name", ["val", "test"])
def test_a_folder_with_train_and_test_images(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "train", 2)
    make_folder(tmp_path / name, 1, ("dog",))
    data = open_data(str(tmp_path), input_shape=SHAPE, augment=False)
    test = data.split("test")
    assert isinstance(data.train, ImageFolder)
    assert isinstance(test, ImageFolder)
    assert (len(data.train), data.train.augment, test.labels, data.classes) == (4, False, (1,), 2)


def test_other_files_and_hidden_folders_are_no_images(tmp_path: Path) -> None:
    make_folder(tmp_path, 2)
    (tmp_path / "cat" / "readme.txt").write_text("cats")
    (tmp_path / ".cache").mkdir()
    write(tmp_path / "cat" / "more" / "deep.JPG", noise(1))
    data = open_data(str(tmp_path), input_shape=SHAPE)
    assert data.classes == 2
    assert len(data.train) == 5


def test_a_class_that_cannot_be_read_is_not_said_to_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without permission; the superuser would have it."""
    make_folder(tmp_path, 1)
    locked, scandir = str(tmp_path / "dog"), os.scandir

    def forbidden(path: str | Path) -> object:
        if str(path) == locked:
            raise PermissionError(13, "Permission denied", locked)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(DataError, match=rf"^cannot read {locked}: Permission denied; make that folder readable, or"):
        open_data(str(tmp_path), input_shape=SHAPE)


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, 1)
    (tmp_path / "bird").mkdir()
    with pytest.raises(DataError, match=r"bird has no images; add some \(\.bmp .*\) or remove the folder"):
        open_data(str(tmp_path), input_shape=SHAPE)


def test_a_test_class_that_was_never_trained_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 1)
    make_folder(tmp_path / "val", 1, ("bird",))
    with pytest.raises(DataError, match="bird is no class of the training images; it must be one of cat, dog"):
        open_data(str(tmp_path), input_shape=SHAPE)


def test_an_empty_test_folder_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 1)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="val has no class folders with images"):
        open_data(str(tmp_path), input_shape=SHAPE)


def test_an_image_folder_needs_an_input_shape_of_1_or_3_channels(tmp_path: Path) -> None:
    make_folder(tmp_path, 1)
    with pytest.raises(ArgumentError, match="are images of any size; give --input CxHxW"):
        open_data(str(tmp_path))
    with pytest.raises(
        ArgumentError, match=r"input shape has 4 channels; image folders give 3 \(colour\) or 1 \(grey\)"
    ):
        open_data(str(tmp_path), input_shape=(4, 8, 8))


def test_image_folders_without_pillow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"image folders need Pillow; pip install 'minidnn\[images\]'"):
        open_data(str(tmp_path), input_shape=SHAPE)


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp"])
@pytest.mark.parametrize("damage", ["empty", "text", "half", "noise"])
def test_a_corrupt_image_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write(tmp_path / "cat" / f"bad.{suffix}", noise(0, 64, 64))
    whole = path.read_bytes()
    junk = np.random.default_rng(0).bytes(len(whole) - 60)
    payload = {"empty": b"", "text": b"not an image", "half": whole[: len(whole) // 2], "noise": junk + whole[-60:]}
    path.write_bytes(payload[damage])
    data = open_data(str(tmp_path), input_shape=SHAPE)
    slot = Slot(np.empty((1, *SHAPE), np.float32), np.empty(1, np.int64))
    with (
        Loader(data.train, 1, [slot]) as batches,
        pytest.raises(DataError, match=rf"cannot decode image .*bad.{suffix}: .*; replace or remove the file"),
    ):
        next(batches)


def test_an_image_that_has_gone_is_named(tmp_path: Path) -> None:
    dataset = ImageFolder((str(tmp_path / "gone.png"),), (0,), ("a",), SHAPE)
    with pytest.raises(DataError, match=r"cannot decode image .*gone.png: .*No such file"):
        read_all(dataset)


def test_images_of_more_than_8_bits_are_refused_not_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "deep.png", np.full((16, 16), 3000, np.uint16))
    with pytest.raises(DataError, match=r"deep.png: its pixels are wider than 8 bits \(mode I;16\)"):
        read_all(ImageFolder((str(path),), (0,), ("a",), SHAPE))

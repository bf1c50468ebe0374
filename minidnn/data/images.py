"""Image folders: one folder per class, decoded with Pillow when a batch is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minidnn.data.dataset import Data, Floats, Indices, Labels, Shape
from minidnn.data.randomness import Use, holdout, random_words
from minidnn.errors import ArgumentError, DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

# Mean and deviation of ImageNet's pixels in 0..1 per RGB channel, which published weights expect; halves for grey.
_NORMALIZE = {1: ((0.5,), (0.5,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
# The image is scaled until it just covers the input and one seventh more (256 for 224); the input is cropped from it.
_MARGIN = 8 / 7


@dataclass(frozen=True)
class ImageFolder:
    """Image files and their labels; each is scaled, cropped to `input_shape`, and normalized.

    The crop is central; with `augment` it is anywhere, and half of the images are flipped from left to right, both
    decided by (seed, epoch, index). Raises DataError that names the file for an image that cannot be decoded.
    """

    paths: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] = field(repr=False)
    class_names: tuple[str, ...]
    input_shape: Shape
    augment: bool = False
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.input_shape[0] not in _NORMALIZE:
            raise ArgumentError(
                f"input shape has {self.input_shape[0]} channels; image folders give 3 (colour) or 1 (grey)"
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.paths)

    def at_epoch(self, epoch: int) -> ImageFolder:
        """The images as epoch `epoch` sees them."""
        return replace(self, epoch=epoch) if self.augment else self

    def read(self, indices: Indices, x_out: Floats, y_out: Labels) -> None:
        """See `Dataset.read`."""
        for row, index in enumerate(indices.tolist()):
            y_out[row] = self.labels[index]
            # Pillow's arrays are [H, W] or [H, W, C].
            pixels = self._decode(self.paths[index], *self._variation(index))
            x_out[row] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        mean, std = (np.array(values, np.float32).reshape(-1, 1, 1) for values in _NORMALIZE[self.input_shape[0]])
        x_out -= 255 * mean
        x_out *= 1 / (255 * std)

    def _variation(self, index: int) -> tuple[float, float, bool]:
        """Where the crop lies, down and across, from 0 to 1, and whether it is flipped."""
        if not self.augment:
            return 0.5, 0.5, False
        words = random_words(Use.AUGMENT, 3, seed=self.seed, epoch=self.epoch, index=index)
        down, across = (int(word) / 2**64 for word in words[:2])
        return down, across, bool(words[2] & 1)

    def _decode(self, path: str, down: float, across: float, flip: bool) -> NDArray[np.uint8]:
        from PIL import Image

        channels, height, width = self.input_shape
        try:
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):
                    # Pillow would cut such pixels off at 255, which turns most of them white.
                    raise ValueError(f"its pixels are wider than 8 bits (mode {image.mode})")
                # By way of RGBA, because a palette with transparency has no direct way to RGB.
                full = image.convert("RGBA") if image.mode == "P" else image
                full = full.convert("RGB" if channels == 3 else "L")
            scale = max(height * _MARGIN / full.height, width * _MARGIN / full.width)
            top, left = down * (full.height - height / scale), across * (full.width - width / scale)
            box = (left, top, min(left + width / scale, full.width), min(top + height / scale, full.height))
            cropped = full.resize((width, height), Image.Resampling.BILINEAR, box)
            return np.asarray(cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cropped)
        # Decoders meet bad bytes with whatever exception comes first, so that no list of them would be complete.
        except Exception as error:
            raise DataError(f"cannot decode image {path}: {error}; replace or remove the file") from error


def is_image_folder(directory: Path) -> bool:
    """Whether the directory has class folders with images, or `train` with class folders."""
    root = directory / "train" if (directory / "train").is_dir() else directory
    return any(_images(folder) for folder in _class_folders(root))


def open_image_folder(directory: Path, input_shape: Shape, *, seed: int = 0, augment: bool = True) -> Data:
    """Folders of images, one per class; or `train` with such folders, and `val` or `test` with the same ones.

    Without a test folder, a stratified tenth of the images is held out. Training images are augmented on request, test
    images never. Raises DataError where Pillow is missing, a class has no image, or a test class is unknown.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError(f"{directory}: image folders need Pillow; pip install 'minidnn[images]'") from None
    root = directory / "train" if (directory / "train").is_dir() else directory
    names = tuple(folder.name for folder in _class_folders(root))
    train = _scan(root, names, ImageFolder((), (), names, input_shape, augment, seed))
    for name in ("val", "test") if root != directory else ():
        if (directory / name).is_dir():
            plain = replace(train, augment=False)
            return Data(directory.name, train, _scan(directory / name, names, plain))
    kept, held_out = holdout(np.array(train.labels, np.int64), len(train) // 10)
    if not len(held_out):
        return Data(directory.name, train)
    return Data(directory.name, _subset(train, kept), replace(_subset(train, held_out), augment=False))


def _class_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """All images below. Raises DataError for a folder that cannot be read, which rglob would take for an empty one."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; make that folder readable, or name another")

    below = (Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(path for path in below if path.suffix.lower() in SUFFIXES and path.is_file())


def _scan(root: Path, names: tuple[str, ...], like: ImageFolder) -> ImageFolder:
    """`like` with the images below `root`."""
    paths: list[str] = []
    labels: list[int] = []
    for folder in _class_folders(root):
        if folder.name not in names:
            raise DataError(f"{folder} is no class of the training images; it must be one of {', '.join(names)}")
        found = _images(folder)
        if not found:
            raise DataError(f"{folder} has no images; add some ({' '.join(sorted(SUFFIXES))}) or remove the folder")
        paths += map(str, found)
        labels += [names.index(folder.name)] * len(found)
    if not paths:
        raise DataError(f"{root} has no class folders with images; it needs one folder of images per class")
    return replace(like, paths=tuple(paths), labels=tuple(labels))


def _subset(images: ImageFolder, rows: Indices) -> ImageFolder:
    chosen = rows.tolist()
    return replace(
        images, paths=tuple(images.paths[row] for row in chosen), labels=tuple(images.labels[row] for row in chosen)
    )

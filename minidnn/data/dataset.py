"""What a data set is, and the one kind that lies in arrays.

A data set fills buffers that somebody else owns: the loader hands it the batch slots of the device, and no batch is
ever copied twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from minidnn.arguments import LARGEST, count, is_count, shown
from minidnn.data.randomness import holdout
from minidnn.errors import ArgumentError, DataError

Shape = tuple[int, int, int]
Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]

# Where a source has no test set of its own, one sample in ten becomes it.
_HOLDOUT = 10
# Mean and deviation of the pixels come from at most this many training images, evenly spaced.
_STATISTICS_IMAGES = 4096


class Dataset(Protocol):
    """Samples that can be read by index. `read` may be called by several threads at once."""

    @property
    def input_shape(self) -> Shape:
        """(C, H, W) of one sample."""
        ...

    @property
    def classes(self) -> int | None:
        """Labels lie in 0..classes-1; None where they are no classes."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Indices, x_out: Floats, y_out: Labels) -> None:
        """Fill x_out float32 [rows, C, H, W] and y_out int64 [rows] with the samples of `indices` [rows]."""
        ...


@runtime_checkable
class Augmented(Dataset, Protocol):
    """A data set whose samples vary from epoch to epoch."""

    def at_epoch(self, epoch: int) -> Dataset:
        """The samples as epoch `epoch` sees them: a function of the data set, the epoch and the index."""
        ...


@dataclass(frozen=True)
class Data:
    """What a run needs: samples to train with and, where there are some, others to test with."""

    name: str
    train: Dataset
    test: Dataset | None = None

    def __post_init__(self) -> None:
        if self.test is not None and self.test.input_shape != self.train.input_shape:
            raise DataError(
                f"{self.name}: training images are {format_shape(self.train.input_shape)} and test images "
                f"{format_shape(self.test.input_shape)}; both must have the same shape"
            )

    @property
    def input_shape(self) -> Shape:
        """(C, H, W) of one sample."""
        return self.train.input_shape

    @property
    def classes(self) -> int | None:
        """Number of classes, or None."""
        return self.train.classes

    def split(self, name: Literal["train", "test"]) -> Dataset:
        """The samples of one split. Raises DataError where there are no test samples."""
        if name == "train":
            return self.train
        if name != "test":
            raise ArgumentError(f"split is {shown(name)}; it must be 'train' or 'test'")
        if self.test is None:
            raise DataError(f"{self.name} has no test samples; use split 'train'")
        return self.test


class Arrays:
    """Samples in arrays, in memory or memory-mapped.

    images [samples, C, H, W] of any real type; labels [samples] of any integer type; `rows` picks and orders the
    samples (default: all). `mean` and `std` [C] are in the units of the stored images: read gives (x - mean) / std.
    Raises DataError for no samples, other shapes and types, and labels outside 0..classes-1.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        *,
        classes: int | None = None,
        rows: Indices | None = None,
        mean: Floats | None = None,
        std: Floats | None = None,
        name: str = "data",
    ) -> None:
        _check_arrays(name, images, labels)
        channels = images.shape[1]
        for argument, values in (("mean", mean), ("std", std)):
            if values is not None and (np.shape(values) != (channels,) or not np.isfinite(values).all()):
                shape = list(np.shape(values))
                raise ArgumentError(f"{argument} has shape {shape}; it must be a finite number for each channel")
        if std is not None and not (np.asarray(std) > 0).all():
            raise ArgumentError(f"std is {np.asarray(std).tolist()}; each must be above 0")
        if rows is not None and len(rows) and not (np.min(rows) >= 0 and np.max(rows) < len(images)):
            raise ArgumentError(f"rows go from {np.min(rows)} to {np.max(rows)}; they must be 0 to {len(images) - 1}")
        self._images = images
        self._labels = np.asarray(labels, np.int64)
        self._rows = np.arange(len(images)) if rows is None else rows
        self._mean = None if mean is None else np.asarray(mean, np.float32).reshape(-1, 1, 1)
        self._scale = None if std is None else (1 / np.asarray(std, np.float32)).reshape(-1, 1, 1)
        self.name = name
        self.classes = classes
        self.input_shape: Shape = (images.shape[1], images.shape[2], images.shape[3])
        if len(self._rows) == 0:
            raise DataError(f"{name} is empty; it needs at least one sample")
        if classes is not None:
            check_labels(name, self._labels, classes)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Indices, x_out: Floats, y_out: Labels) -> None:
        """See `Dataset.read`."""
        rows = self._rows[indices]
        y_out[...] = self._labels[rows]
        if self._images.dtype == x_out.dtype and self._images.flags.c_contiguous and x_out.flags.c_contiguous:
            # "clip" lets NumPy write to x_out directly; the indices were checked when they picked the rows.
            np.take(self._images, rows, axis=0, out=x_out, mode="clip")
        else:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and the loss with it
                x_out[...] = self._images[rows]
        if self._mean is not None:
            x_out -= self._mean
        if self._scale is not None:
            x_out *= self._scale


def from_arrays(
    name: str,
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]] | None = None,
    *,
    classes: int | None = None,
    test_samples: int | None = None,
) -> Data:
    """Data from (images [samples, C, H, W], labels [samples]), and from another such pair for testing.

    `classes` is by default one more than the largest label. Without a test pair a stratified choice of `test_samples`
    (default: a tenth) becomes the test set. Images of bytes are brought to mean 0 and deviation 1 per channel, over the
    training samples; other images are taken as they are. Raises DataError as `Arrays` does.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name is {shown(name)}; it must be a string, in front of the pairs of arrays")
    for argument, pair in (("train", train), ("test", test)):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2) and (pair is not None or argument == "train"):
            raise ArgumentError(f"{argument} is {type(pair).__name__}; it must be a pair of arrays, images and labels")
    images, labels = train
    pairs = [train] if test is None else [train, test]
    for pair in pairs:
        _check_arrays(name, *pair)
    classes = 1 + max(int(np.max(pair[1])) for pair in pairs) if classes is None else count(classes, "classes")
    train_rows, test_rows = np.arange(len(images)), None
    if test_samples is not None and not (is_count(test_samples, 0) and test_samples < len(images)):
        raise ArgumentError(f"test_samples is {shown(test_samples)}; it must be an int from 0 to {len(images) - 1}")
    if test is None:
        held_out = len(images) // _HOLDOUT if test_samples is None else test_samples
        train_rows, test_rows = holdout(np.asarray(labels, np.int64), held_out)
        test = train if len(test_rows) else None
    mean, std = _statistics(images, train_rows) if images.dtype == np.uint8 else (None, None)

    def split(pair: tuple[NDArray[Any], NDArray[Any]], rows: Indices | None, label: str) -> Arrays:
        return Arrays(*pair, classes=classes, rows=rows, mean=mean, std=std, name=label)

    return Data(name, split(train, train_rows, name), split(test, test_rows, f"{name} (test)") if test else None)


def check_labels(name: str, labels: Labels, classes: int) -> None:
    """Raises DataError where a label lies outside 0..classes-1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{name}: label {labels[wrong[0]]} of sample {wrong[0]} is out of range; "
            f"with {classes} classes it must be 0 to {classes - 1}"
        )


def format_shape(shape: tuple[int, ...]) -> str:
    """(3, 64, 64) -> `3x64x64`, as it is typed."""
    return "x".join(map(str, shape))


def _check_arrays(name: str, images: NDArray[Any], labels: NDArray[Any]) -> None:
    for content, array in (("images", images), ("labels", labels)):
        if not isinstance(array, np.ndarray):
            raise DataError(f"{name}: {content} are a {type(array).__name__}; they must be a NumPy array")
    if images.ndim != 4 or images.dtype.kind not in "buif" or 0 in images.shape[1:]:
        raise DataError(
            f"{name}: images are {images.dtype} of shape {list(images.shape)}; "
            "they must be real numbers of shape [samples, channels, height, width]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "bui":
        raise DataError(
            f"{name}: labels are {labels.dtype} of shape {list(labels.shape)}; "
            f"they must be whole numbers, one for each of the {len(images)} images"
        )
    if len(images) == 0:
        raise DataError(f"{name} is empty; it needs at least one sample")
    for sample in (int(labels.argmin()), int(labels.argmax())):
        if not 0 <= int(labels[sample]) < LARGEST:
            raise DataError(
                f"{name}: label {labels[sample]} of sample {sample} is out of range; labels must be 0 to {LARGEST - 1}"
            )


def _statistics(images: NDArray[np.uint8], rows: Indices) -> tuple[Floats, Floats]:
    """Mean and deviation [C] of the pixels: sums of integers, hence the same on every machine."""
    sample = rows[:: -(-len(rows) // _STATISTICS_IMAGES)]
    total = np.zeros(images.shape[1], np.int64)
    squares = np.zeros_like(total)
    for first in range(0, len(sample), 64):
        chunk = images[sample[first : first + 64]].astype(np.int32)
        total += chunk.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.square(chunk).sum(axis=(0, 2, 3), dtype=np.int64)
    count = len(sample) * images.shape[2] * images.shape[3]
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    # A channel that never changes says nothing; leave it at 0 instead of dividing by 0.
    return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)

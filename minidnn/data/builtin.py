"""Data that need no files of the user: random images that can be learned, and handwritten digits."""

from __future__ import annotations

from importlib import resources
from math import prod

import numpy as np

from minidnn.arguments import count, image_shape
from minidnn.data.dataset import Arrays, Data, Floats, Indices, Shape, from_arrays
from minidnn.data.randomness import Use, random_words
from minidnn.units import MiB

# Distinct synthetic images are made up to this size; longer data sets repeat them.
_POOL_BYTES = 256 * MiB
# A class pattern has at most this many cells each way: coarse enough to survive a network's pooling.
_CELLS = 4
# Of the 1797 digits; the rest, 1437, is for training.
_DIGITS_TEST = 360


def synthetic(shape: Shape, *, classes: int = 10, length: int = 512, seed: int = 0) -> Data:
    """Random images of any shape (C, H, W) that a network can learn to tell apart; a quarter more of them for testing.

    An image is the coarse pattern of its class plus noise of the same strength; pixels have mean 0 and deviation about
    1.4. Images are made beforehand, so that reading a batch costs one copy: up to 256 MiB of them, then they repeat.
    """
    classes, length = count(classes, "synthetic data: classes"), count(length, "synthetic data: length")
    channels, height, width = shape = image_shape(shape, "synthetic data: shape")
    cells = (min(_CELLS, height), min(_CELLS, width))
    patterns = _noise((classes, channels, *cells), seed, index=0)
    # Which cell each pixel row and column belongs to.
    down, across = (np.arange(size) * parts // size for size, parts in zip((height, width), cells, strict=True))

    def images(samples: int, limit: int, index: int) -> tuple[Floats, Indices]:
        """Distinct images [distinct, C, H, W] and, per sample, which of them it is."""
        distinct = min(samples, max(1, limit // (4 * prod(shape))))
        x = _noise((distinct, *shape), seed, index)
        for label in range(min(classes, distinct)):
            x[label::classes] += patterns[label][:, down[:, None], across]
        return x, np.arange(samples) % distinct

    def split(name: str, samples: int, limit: int, index: int) -> Arrays:
        x, rows = images(samples, limit, index)
        return Arrays(x, np.arange(len(x)) % classes, classes=classes, rows=rows, name=name)

    return Data(
        "synthetic",
        split("synthetic", length, _POOL_BYTES, 1),
        split("synthetic (test)", -(-length // 4), _POOL_BYTES // 4, 2),
    )


def digits() -> Data:
    """The UCI handwritten digits: 1437 images 1x8x8 for training, 360 for testing, 10 classes.

    Source: E. Alpaydin, C. Kaynak (1998), UCI Machine Learning Repository, CC BY 4.0; see digits.txt beside this file.
    """
    with resources.files("minidnn.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    return from_arrays("digits", (x[:, None], y), classes=10, test_samples=_DIGITS_TEST)


def _noise(shape: tuple[int, ...], seed: int, index: int) -> Floats:
    """Independent float32 values with mean 0 and deviation 1, from one random byte each."""
    count = prod(shape)
    words = random_words(Use.SYNTHETIC, -(-count // 8), seed=seed, index=index)
    values = words.astype("<u8", copy=False).view(np.uint8)[:count].reshape(shape).astype(np.float32)
    values -= 127.5
    values *= ((256**2 - 1) / 12) ** -0.5  # one over the deviation of a uniform byte
    return values

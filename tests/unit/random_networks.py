"""Seeded random convolutional chains and their vDNN traces: what placement meets beyond the papers' networks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from minidnn.memory.trace import Trace

from ..paper.reference_trace import Row, Shape, vdnn_trace


def random_rows(rng: random.Random, layers: int) -> Sequence[Row]:
    """Up to `layers` conv and pool layers of any width and batch, then one to three FC and the softmax."""
    batch = rng.choice((1, 2, 4, 8, 16, 32, 64, 100, 128, 256))
    side = rng.choice((16, 28, 32, 56, 64, 112, 128, 224, 227))
    shape = Shape(batch, rng.choice((1, 3)), side, side)
    for _ in range(layers):
        if rng.random() < 0.75:
            kernel = rng.choice((1, 3, 5, 7))
            channels = rng.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, rng.randint(1, 300)))
            shape.conv(channels, kernel, stride=1 if rng.random() < 0.85 else 2, padding=kernel // 2)
        elif shape.h >= 6:
            shape.pool(rng.choice((2, 3)), 2)
    for _ in range(rng.randint(1, 3)):
        shape.fc(rng.choice((10, 100, 512, 1000, 4096)))
    shape.softmax()
    return shape.rows


def random_trace(seed: int, layers: int = 40) -> Trace:
    """The trace of a random network of 2 to `layers` layers; every mode, order and delay of releases comes up."""
    rng = random.Random(seed)
    rows = random_rows(rng, rng.randint(2, layers))
    mode = rng.choice(("all", "conv", "aconv", "none"))
    return vdnn_trace(rows, mode, rng.choice(("prefetch-first", "derivative-first")), delay=rng.choice((0, 0, 1, 2, 4)))

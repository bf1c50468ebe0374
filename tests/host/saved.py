"""A small training on the host, and all that a checkpoint of it must bring back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from minidnn import Trainer, nn, optim
from minidnn.data import Data, from_arrays
from minidnn.run.loop import FitResult

BATCH = 4


def network() -> nn.Sequential:
    """Statistics, dropout and momentum: all that a resumed run must find again."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(27, 3), input_shape=(1, 6, 6),
    )  # fmt: skip


def data(samples: int = 22, test: int = 6) -> Data:
    """Random images; the last batch of an epoch is partial."""
    rng = np.random.default_rng(1)
    return from_arrays(
        "noise", (rng.standard_normal((samples, 1, 6, 6)).astype(np.float32), np.arange(samples) % 3), test_samples=test
    )


def trainer(**options: Any) -> Trainer:
    """A trainer on the host."""
    settings = {"device": "host", "seed": 5, **options}
    return Trainer(network(), nn.CrossEntropyLoss(), settings.pop("optimizer", optim.Adam(0.01)), BATCH, **settings)


def state(opened: Trainer) -> dict[str, bytes]:
    """Weights, statistics and optimizer state."""
    return {name: value.tobytes() for name, value in (opened.state_dict() | opened.optimizer_state()).items()}


def finished(folder: Path, **options: Any) -> tuple[dict[str, bytes], list[dict[str, Any]], FitResult]:
    """State, log of the steps and result of a fit."""
    log = folder / "log.jsonl"
    settings = {"log": log, **options}
    with trainer() as opened:
        result = opened.fit(data(), **settings)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return state(opened), [r for r in records if "step" in r], result

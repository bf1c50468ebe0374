"""Training in every precision and layout on the host: the numbers that CUDA must come near to."""

from __future__ import annotations

import numpy as np
import pytest

from minidnn import nn, optim
from minidnn.data import open_data
from minidnn.device.host import HostDevice
from minidnn.run.trainer import Trainer


class LayoutHost(HostDevice):
    """A host that lays tensors out as CUDA does."""

    target = "native"

    def layout(self, target: str, precision: str) -> str:
        return "NHWC" if precision in ("bf16", "tf32") else "NCHW"


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64, 10),
        input_shape=(1, 8, 8),
    )  # fmt: skip


def losses(device: HostDevice, precision: str, memory: str, steps: int = 16) -> list[float]:
    data = open_data("digits").train
    x, y = np.empty((64, 1, 8, 8), np.float32), np.empty(64, np.int64)
    found = []
    with device, Trainer(
        network(), nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9), 64, memory=memory, device=device,
        precision=precision, seed=5,
    ) as trainer:  # fmt: skip
        for step in range(steps):
            data.read(np.arange(step * 64, step * 64 + 64), x, y)
            found.append(trainer.step(x, y).loss)
    return found


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("tf32", 1e-5), ("bf16", 4e-2), ("fp64", 1e-5)])
@pytest.mark.parametrize("memory", ["base", "vdnn++:all(m)"])
def test_each_precision_and_layout_follows_fp32(precision: str, limit: float, memory: str) -> None:
    reference = losses(HostDevice(), "fp32", "base")
    found = losses(LayoutHost(), precision, memory)
    assert reference[-1] < 0.6 * reference[0], "it learns"
    assert max(abs(a - b) for a, b in zip(reference, found, strict=True)) <= limit * reference[0]

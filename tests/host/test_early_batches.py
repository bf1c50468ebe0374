"""Batches that come early: whole runs with a partial last batch, evaluation, prediction and micro-batches are those of
a mode whose iterations begin with their batch, in every order of events."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.data import Data, from_arrays
from minidnn.device.host import HostDevice
from minidnn.schedule.actions import H2D, Alloc, Prefetch
from minidnn.schedule.check import check
from tests.host.runs import network

SAMPLES, BATCH = 15, 6  # the last batch of an epoch has 3
WAYS = [("lazy", 0), ("threads", 0), *(("random", seed) for seed in range(12))]


@lru_cache
def images() -> np.ndarray:
    """What is trained on, and 8 for testing."""
    return np.random.default_rng(3).standard_normal((SAMPLES + 8, 2, 11, 10)).astype(np.float32)


def data() -> Data:
    """Both with labels."""
    x, y = images(), np.random.default_rng(4).integers(0, 4, SAMPLES + 8)
    return from_arrays("noise", (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:]), classes=4)


def trained(
    memory: str, precision: str, micro_batch: int | None, interleaving: str = "eager", seed: int = 0
) -> tuple[dict[str, float], bytes, bytes]:
    """Two epochs with evaluations, then a prediction: metrics, weights and optimizer state, logits."""
    optimizer = optim.SGD(0.1, momentum=0.9, schedule=optim.StepLR(1, 0.9))
    with HostDevice(interleaving, seed) as device, Trainer(
        network(), nn.CrossEntropyLoss(), optimizer, BATCH, memory=memory, device=device, target="native", seed=5,
        precision=precision, micro_batch=micro_batch,
    ) as trainer:  # fmt: skip
        result = trainer.fit(data(), 2)
        logits = trainer.predict(images()[SAMPLES:])
        state = trainer.state_dict() | trainer.optimizer_state()
        for schedule in trainer.programs.schedules.values():
            assert not check(schedule)
            first = [a.buffer for a in schedule.actions if a.lane == H2D and isinstance(a, (Alloc, Prefetch))][:1]
            early = any(b.tensor == "input" and b in schedule.persistent for b in first)
            assert early == (memory in ("base", "keep"))
    return result.metrics, b"".join(state[name].tobytes() for name in sorted(state)), logits.tobytes()


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", ["base", "keep"])
def test_runs_are_those_of_vdnn_in_every_order_of_events(memory: str, precision: str, micro_batch: int | None) -> None:
    wanted = trained("vdnn:all", precision, micro_batch)
    for interleaving, seed in WAYS:
        assert trained(memory, precision, micro_batch, interleaving, seed) == wanted, (interleaving, seed)

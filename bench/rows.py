"""What the benches of whole iterations share: device memory while something runs, times, and rows that are kept.

A result file holds rows by key. It is written after every row, and a row that is there is not measured again: a table
grows over several runs on the same kind of card, and a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.environment import ROOT, describe
from minidnn.device.base import Device, Region
from minidnn.run.compare import iteration_times
from minidnn.run.trainer import Trainer

ENOUGH = 0.8
"""Share of a copy's rate that a kernel should reach."""
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("cupy-cuda13x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "torch", "torchvision", "triton")
WARM_UP = 3
SLOW_MS = 1000.0
"""An iteration that takes so long needs no more warming up."""
EVERY_S = 0.02


@dataclass
class Peak:
    """Device memory in use, from the driver."""

    before: int = 0
    most: int = 0

    @property
    def nbytes(self) -> int:
        """What was in use at most, less what was in use before."""
        return self.most - self.before


def in_use() -> int:
    """Bytes of device memory that the driver counts as taken, by anybody."""
    from cupy_backends.cuda.api import runtime

    free, total = runtime.memGetInfo()
    return int(total - free)


@contextmanager
def watched(used: Callable[[], int] = in_use, before: int | None = None) -> Iterator[Peak]:
    """Sample the memory in use while the block runs. `before`: what was in use before, where that is not now."""
    peak = Peak(used() if before is None else before)
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(EVERY_S):
            peak.most = max(peak.most, used())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.most = max(peak.most, used())


@contextmanager
def pinned_again(device: Device) -> Iterator[None]:
    """While it is entered, pinned memory that is given back serves the next who wants no more: taking it costs up to
    0.4 s per GiB, each time the same."""
    take, give_back = device.pinned, device.give_back
    lent: dict[int, Region] = {}
    spare: list[Region] = []

    def lend(nbytes: int) -> Region:
        fitting = [region for region in spare if region.nbytes >= nbytes]
        while not fitting and spare:  # they make room for what is larger
            give_back(spare.pop())
        region = min(fitting, key=lambda region: region.nbytes) if fitting else take(nbytes)
        if fitting:
            spare.remove(region)
        lent[region.address] = region
        assert region.array is not None
        return Region(nbytes, region.address, region.array[:nbytes])

    def keep(region: Region) -> None:
        if region.address in lent:
            spare.append(lent.pop(region.address))
        else:
            give_back(region)

    try:
        with patch.object(device, "pinned", lend), patch.object(device, "give_back", keep):
            yield
    finally:
        for region in spare:
            give_back(region)


def fill(trainer: Trainer) -> None:
    """Invented images and labels in all batch slots."""
    rng = np.random.default_rng(0)
    classes = trainer._output_shape[1]
    for slot in trainer._slots:
        images, labels = slot.batch.array("input"), slot.batch.array("labels")
        images[...] = rng.random(images.shape, np.float32) - 0.5
        labels[...] = rng.integers(0, classes, labels.shape)


def timed(trainer: Trainer, seconds: float, steps: tuple[int, int], warming: float = 0.0) -> dict[str, Any]:
    """Iterations for so many seconds, at least and at most so many `steps`: their times, and the host's for each.
    `warming`: seconds of iterations before."""
    (rough,) = iteration_times(trainer, 1)
    if rough < SLOW_MS:
        rough = statistics.median(iteration_times(trainer, steps_for(rough, warming, (WARM_UP, sys.maxsize))))
    issued: list[float] = []
    times = iteration_times(trainer, steps_for(rough, seconds, steps), issued)
    return {**summary(times, trainer.batch), "host_ms": statistics.median(issued)}


def steps_for(ms: float, seconds: float, steps: tuple[int, int]) -> int:
    """How many steps to time when one takes about `ms`."""
    return int(min(max(seconds * 1e3 / max(ms, 1e-3), steps[0]), steps[1]))


def summary(times: Sequence[float], batch: int) -> dict[str, Any]:
    """Median, spread, throughput."""
    ms = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [ms] * 3
    return {
        "ms": ms, "ms_quartiles": [quartiles[0], quartiles[2]], "steps": len(times), "images_per_s": batch / ms * 1e3
    }  # fmt: skip


@dataclass
class Rows:
    """Rows by key in `out`/`name`. What the project's own results have of that name is taken over at the start.

    `deadline` is a time of the monotonic clock; no row is begun that would end behind it, if it took as long as the
    longest so far.
    """

    name: str
    out: Path
    again: bool = False
    deadline: float | None = None
    rows: dict[str, Any] = field(default_factory=dict)
    longest: float = 0.0
    done: set[str] = field(default_factory=set)
    head: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in dict.fromkeys((RESULTS, self.out)):
            path = folder / self.name
            if path.exists():
                self.rows |= json.loads(path.read_text(encoding="utf-8"))["rows"]
        self.out.mkdir(parents=True, exist_ok=True)

    def wanted(self, key: str) -> bool:
        """Whether the row is to be measured now."""
        return key not in self.done and (self.again or key not in self.rows)

    @property
    def late(self) -> bool:
        """Whether there is no time for another row."""
        return self.deadline is not None and time.monotonic() + self.longest > self.deadline

    def measure(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do the work and keep its row, with where it was made."""
        began = time.monotonic()
        row = work()
        row["took_s"] = time.monotonic() - began
        self.longest = max(self.longest, row["took_s"])
        self.rows[key] = {**row, "environment": describe(*PACKAGES)}
        self.done.add(key)
        self.save()
        return row

    def save(self) -> None:
        """Write the file: whoever reads it sees the old one or the new one."""
        part = self.out / f"{self.name}.part"
        part.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(self.out / self.name)


def card_of(name: str) -> str:
    """A card's name as files have it."""
    return name.replace(" ", "-").replace("/", "-")

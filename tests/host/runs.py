"""Training runs of a small network in every memory mode, for the tests that compare them bit by bit."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations

import numpy as np

from minidnn import Trainer, nn, optim
from minidnn.device.host import HostDevice
from minidnn.errors import BudgetError
from minidnn.memory.fit import FITS
from minidnn.plan.plan import ORDERS
from minidnn.plan.registry import PLANNERS
from minidnn.schedule.check import check

STEPS = 5
ROWS = (6, 6, 4, 6, 1)
"""Rows of each step: whole batches, a partial one, a single sample."""
SETS = ("all", "conv", "aconv", "none", "features.0+features.5+features.9")
MODES = (
    *(f"{family}({rule})" for family in ("base", "keep") for rule in "pmg"),
    *(f"{family}:{chosen}({rule})" for family in ("vdnn", "vdnn++") for chosen in SETS for rule in "pmg"),
    *("vdnn:dyn", "vdnn++:dyn"),
    *sorted(PLANNERS),
)
DIMENSIONS: Mapping[str, Sequence[str]] = {
    "memory": MODES,
    "order": ORDERS,
    "fit": ("placed", *FITS),
    "interleaving": ("eager", "lazy", "random", "threads"),
    "target": ("paper", "native"),
    "placement": ("planned", "live"),
    "budget": ("none", "smallest", "half as much again"),
    "update": ("each", "clipped", "micro"),
    "precision": ("fp32", "bf16"),
    "compress": ("off", "all", "auto"),
}


def network() -> nn.Sequential:
    """A layer of each kind that memory modes treat apart: fused and plain ReLU, dropout, pools, norms, a flatten."""
    return nn.Sequential(
        {
            "features": nn.Sequential(
                nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 3, padding=1, bias=False),
                nn.LocalResponseNorm(3), nn.Conv2d(6, 6, 3, padding=1), nn.LeakyReLU(0.1), nn.Dropout(0.2),
                nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU(),
            ),
            "flatten": nn.Flatten(),
            "head": nn.Sequential(nn.Linear(36, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4)),
        },
        input_shape=(2, 11, 10),
    )  # fmt: skip


@lru_cache
def batches() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The batches of a run."""
    rng = np.random.default_rng(7)
    return tuple((rng.standard_normal((n, 2, 11, 10)).astype(np.float32), rng.integers(0, 4, n)) for n in ROWS)


@dataclass(frozen=True)
class Case:
    """One point of the product of all dimensions. `seed` is that of the interleaving."""

    memory: str = "base"
    order: str = "prefetch-first"
    fit: str = "placed"
    interleaving: str = "eager"
    target: str = "paper"
    placement: str = "planned"
    budget: str = "none"
    update: str = "each"
    precision: str = "fp32"
    compress: str = "off"
    seed: int = 0

    def trainer(self, device: HostDevice, budget: int | None = None) -> Trainer:
        """A trainer for this case."""
        return Trainer(
            network(), nn.CrossEntropyLoss(label_smoothing=0.1), optim.SGD(0.1, momentum=0.9, weight_decay=1e-3),
            max(ROWS), memory=self.memory, device=device, target=self.target, order=self.order,
            fit=None if self.fit == "placed" else self.fit, placement=self.placement, budget=budget, seed=11,
            micro_batch=4 if self.update == "micro" else None, max_norm=0.5 if self.update == "clipped" else None,
            precision=self.precision, compress=self.compress,
        )  # fmt: skip

    def needed(self) -> int:
        """Bytes of the smallest budget that works: what a refusal says."""
        return _needed(replace(self, interleaving="eager", budget="none", seed=0))


@cache
def _needed(case: Case) -> int:
    with HostDevice() as device:
        try:
            case.trainer(device, 1).close()
        except BudgetError as error:
            if error.needed is None:
                raise
            return error.needed
    raise AssertionError("a budget of 1 byte was accepted")


@dataclass(frozen=True)
class Outcome:
    """What must not depend on memory: gradients of all steps, losses, weights and optimizer state at the end."""

    gradients: str
    losses: tuple[float, ...]
    weights: str


def run(case: Case) -> Outcome:
    """Train for some steps; on the way assert what each run must keep."""
    budget = None
    if case.budget != "none":
        budget = case.needed() * (3 if case.budget == "half as much again" else 2) // 2
    device = HostDevice(case.interleaving, case.seed, memory=budget)
    try:
        with case.trainer(device, budget) as trainer:
            observer = trainer.observe_gradients()
            losses = tuple(trainer.step(x, y).loss for x, y in batches())
            state = trainer.state_dict() | trainer.optimizer_state()
            assert budget is None or trainer.peak_bytes <= budget
            assert device.memory_info().used == trainer.peak_bytes
            for schedule in trainer.programs.schedules.values():
                assert not check(schedule)
            gradients = observer.sha256
        info = device.memory_info()
        assert (info.used, info.pinned) == (0, 0)
    finally:
        device.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("lane")]
    weights = b"".join(state[name].tobytes() for name in sorted(state))
    return Outcome(gradients, losses, hashlib.sha256(weights).hexdigest())


@lru_cache
def reference(update: str, precision: str = "fp32") -> Outcome:
    """base, run eagerly: what every other case must give."""
    return run(Case(update=update, precision=precision))


def pairwise(dimensions: Mapping[str, Sequence[str]], seed: int) -> Iterator[dict[str, str]]:
    """Rows in which every pair of values of two dimensions comes up: greedy, the best of some random rows at a time."""
    rng = random.Random(seed)
    names = list(dimensions)
    missing = {
        (a, x, b, y) for a, b in combinations(names, 2) for x in dimensions[a] for y in dimensions[b]
    }  # fmt: skip

    def pairs(row: dict[str, str]) -> set[tuple[str, str, str, str]]:
        return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)} & missing

    while missing:
        a, x, b, y = min(missing)
        rows = [{n: rng.choice(dimensions[n]) for n in names} | {a: x, b: y} for _ in range(20)]
        best = max(rows, key=lambda row: len(pairs(row)))
        missing -= pairs(best)
        yield best

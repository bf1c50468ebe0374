"""Memory modes side by side: predicted by the simulator, or run for real and checked against `base`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from minidnn.device.base import Device
from minidnn.errors import BudgetError, MiniDnnError, OutOfDeviceMemory
from minidnn.graph.graph import Graph
from minidnn.nn.loss import Loss
from minidnn.nn.sequential import Sequential
from minidnn.optim import Optimizer
from minidnn.plan.compress import predicted
from minidnn.profile.profile import Profile
from minidnn.run.choose import Options, choose
from minidnn.run.record import Recorder
from minidnn.run.simulator import simulate
from minidnn.run.slot import Pending
from minidnn.run.timeline import Timeline
from minidnn.run.trainer import Trainer
from minidnn.schedule.actions import COMPUTE, Schedule
from minidnn.schedule.recompress import recompressed

SETS = ("all", "conv", "aconv")
DEFAULT_MODES = (
    "base(p)", "base(m)", "keep(p)",
    *(f"{family}:{chosen}({rule})" for rule in "pm" for chosen in SETS for family in ("vdnn", "vdnn++")),
    "vdnn:dyn", "vdnn++:dyn", "best",
)  # fmt: skip
"""The modes of the vDNN papers, `keep` beside `base`, and the planner that weighs them all."""


@dataclass
class ModeResult:
    """One mode. Times in ms (None where it does not fit), sizes in bytes; `peak_bytes` of a mode that does not fit is
    the smallest that it needs. `stall_ms` by cause: "offload", "prefetch", "memory", "codec"."""

    mode: str
    fits: bool
    peak_bytes: int
    iteration_ms: float | None = None
    stall_ms: Mapping[str, float] | None = None
    pool_bytes: int | None = None
    pinned_bytes: int | None = None
    offloaded_bytes: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    schedule: Schedule | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON and tables."""
        keys = (
            "mode", "iteration_ms", "stall_ms", "peak_bytes", "pool_bytes", "pinned_bytes", "offloaded_bytes", "fits"
        )
        return {key: getattr(self, key) for key in keys} | self.more


def predict(graph: Graph, modes: Sequence[str], profile: Profile, options: Options) -> Iterator[ModeResult]:
    """Simulate each mode with a profile that has times and a link.

    With compression `more` gets what `Trainer.compression` says, by `options.density`, and `uncompressed_ms`.
    """

    def time_of(schedule: Schedule) -> float:
        return simulate(schedule, profile, options.density).iteration_ms

    for mode in modes:
        try:
            schedule = choose(graph, mode, profile, options, score=time_of)
        except BudgetError as error:
            yield _refused(mode, error)
            continue
        found = simulate(schedule, profile, options.density)
        alive = not found.dead_end
        more: dict[str, Any] = {}
        if schedule.plan.compress:
            busy = sum(found.timeline.busy_ms(lane) for lane in schedule.lanes if lane.startswith("codec-"))
            more = {
                "pinned_raw_bytes": schedule.pinned_raw_bytes, **predicted(graph, schedule.plan, options.density),
                "cpu_share": busy / found.iteration_ms if alive else None,
                "uncompressed_ms": ms if alive and isfinite(ms := time_of(recompressed(schedule, ()))) else None,
            }  # fmt: skip
        yield ModeResult(
            mode, alive, found.peak_bytes, found.iteration_ms if alive else None, found.stall_ms if alive else None,
            schedule.pool_bytes, found.pinned_bytes, found.offloaded_bytes, more, found.timeline, schedule,
            found.dead_end,
        )  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """What `measure` runs: a fresh network per mode, the same batches, weights and seed for all."""

    network: Callable[[], Sequential]
    loss: Loss
    optimizer: Optimizer
    batches: Sequence[tuple[np.ndarray, np.ndarray]]
    precision: str = "fp32"
    target: str | None = None
    seed: int = 0


def measure(
    experiment: Experiment, modes: Sequence[str], device: Callable[[], Device], options: Options, timed_steps: int = 3
) -> Iterator[ModeResult]:
    """Run each mode on a device of its own for all batches, then `timed_steps` more for the times.

    `more` gets `loss` (of the last batch), `gradient_sha256` (fp32, PyTorch's layout, parameter order, all steps) and
    `matches_base`: whether that digest is the one of base with the same algorithms, None where base does not fit the
    device. Of a mode that compresses also what `Trainer.compression` says, and `uncompressed_ms`: its time in a run
    without.
    """
    reference: dict[tuple[tuple[str, str], ...], str | None] = {}
    for mode in modes:
        try:
            result = _run(experiment, mode, device, options, timed_steps)
        except (BudgetError, OutOfDeviceMemory) as error:
            yield _refused(mode, error)
            continue
        assert result.schedule is not None
        if result.schedule.plan.compress:
            plain = _run(experiment, mode, device, replace(options, compress="off"), timed_steps)
            result.more["uncompressed_ms"] = plain.iteration_ms
        algorithms = tuple(sorted((name, a.name) for name, a in result.schedule.plan.algorithms.items()))
        if algorithms not in reference:
            reference[algorithms] = _reference(experiment, mode, result, device)
        expected = reference[algorithms]
        result.more["matches_base"] = None if expected is None else result.more["gradient_sha256"] == expected
        yield result


def _run(
    experiment: Experiment, mode: str, device: Callable[[], Device], options: Options, timed_steps: int
) -> ModeResult:
    with device() as opened, _trainer(experiment, mode, opened, options) as trainer:
        observer = trainer.observe_gradients()
        losses = [trainer.step(x, y).loss for x, y in experiment.batches]
        digest = observer.sha256
        trainer.programs.forget(observer)
        _spread(trainer)
        began, codec_s = time.perf_counter(), trainer.programs.codec_s
        times = iteration_times(trainer, timed_steps)
        seconds = time.perf_counter() - began
        compression = trainer.compression(seconds, codec_s) if trainer.schedule.plan.compress else {}
        timeline, schedule = recorded(trainer), trainer.schedule
        return ModeResult(
            mode, True, schedule.peak_bytes, float(np.median(times)), timeline.stall_ms, schedule.pool_bytes,
            schedule.pinned_bytes, schedule.offloaded_bytes,
            {"loss": losses[-1], "gradient_sha256": digest, **compression}, timeline, schedule,
        )  # fmt: skip


def iteration_times(trainer: Trainer, steps: int, issued: list[float] | None = None) -> list[float]:
    """Milliseconds of `steps` training iterations over the full batches that lie in the trainer's slots.

    They are the intervals between the ends of consecutive iterations on the device, after one more iteration; a batch
    is in flight while the next is issued, as in `fit`. `issued` gets what each costs the host.
    """
    device, compute = trainer.device, trainer.device.stream(COMPUTE)
    stamps: list[object] = []
    pending: list[Pending] = []
    for step in range(steps + 1):
        slot = trainer._slots[step % len(trainer._slots)].batch
        began = time.perf_counter()
        pending.append(trainer.issue(slot, trainer.batch))
        if issued is not None:
            issued.append((time.perf_counter() - began) * 1e3)
        stamps.append(device.stamp(compute))
        if len(pending) > 1:
            trainer.settle(pending.pop(0))
    trainer.settle(pending.pop(0))
    device.host_sync(compute)
    return [device.elapsed_ms(begin, end) for begin, end in pairwise(stamps)]


def recorded(trainer: Trainer) -> Timeline:
    """The timeline of one training iteration over the full batch that lies in the trainer's first slot."""
    recorder = Recorder(trainer.executor(trainer.batch))
    recorder.begin()
    trainer.settle(trainer.issue(trainer._slots[0].batch, trainer.batch))
    return recorder.end()


def _spread(trainer: Trainer) -> None:
    """All slots hold the batch of the first one: steps that are timed read no data."""
    first, *others = (slot.batch for slot in trainer._slots)
    for other in others:
        for name in ("input", "labels"):
            other.array(name)[...] = first.array(name)


def _trainer(experiment: Experiment, mode: str, device: Device, options: Options) -> Trainer:
    return Trainer(
        experiment.network(), experiment.loss, experiment.optimizer, len(experiment.batches[0][0]), memory=mode,
        budget=options.budget, device=device, precision=experiment.precision, target=experiment.target,
        order=options.order, fit=options.fit, placement=options.placement, seed=experiment.seed,
        algorithms=options.algorithms, compress=options.compress,
    )  # fmt: skip


def _reference(
    experiment: Experiment, mode: str, result: ModeResult, device: Callable[[], Device]
) -> str | None:
    """The digest of base with the algorithms of a mode's plan; None where base does not fit the device."""
    if mode.startswith("base"):
        return str(result.more["gradient_sha256"])
    assert result.schedule is not None
    fixed = Options(algorithms=result.schedule.plan.algorithms)
    try:
        with device() as opened, _trainer(experiment, "base(m)", opened, fixed) as trainer:
            observer = trainer.observe_gradients()
            for x, y in experiment.batches:
                trainer.step(x, y)
            return observer.sha256
    except OutOfDeviceMemory as error:
        if error.needed is None:
            raise
        return None


def _refused(mode: str, error: BudgetError | OutOfDeviceMemory) -> ModeResult:
    if error.needed is None:
        raise error
    return ModeResult(mode, False, error.needed, reason=str(error))


def mismatches(results: Sequence[ModeResult]) -> list[str]:
    """Modes whose gradients are not those of base, bit for bit."""
    return [r.mode for r in results if r.more.get("matches_base") is False]


def unverified(results: Sequence[ModeResult]) -> list[str]:
    """Modes that ran where base with their algorithms does not fit."""
    return [r.mode for r in results if r.fits and r.more.get("matches_base") is None]


class GradientMismatch(MiniDnnError):
    """A memory mode computed other gradients than base with the same algorithms."""

"""Timing schedules on a device: the profile passes of `dyn` (vDNN++, section II-B)."""

from __future__ import annotations

from math import inf
from statistics import median
from time import perf_counter

from minidnn.device.base import Device, Region
from minidnn.errors import ArgumentError, OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.profile.profile import Profile
from minidnn.run.live import executor_for
from minidnn.run.simulator import simulate
from minidnn.run.slot import BatchSlot, slot_fields
from minidnn.schedule.actions import Action, Schedule

PASSES = 3
"""Timed iterations, after one that warms up; the median counts."""
SLOW_MS = 300.0
"""One timed iteration is enough where it takes so long: noise is in milliseconds."""
BEHIND = 1.15
"""A candidate predicted this far behind the fastest that was timed is not timed: the simulator is seldom 5 % off."""


class Timer:
    """Times schedules one after the other; call it with each. A context manager.

    The pinned slab of the largest so far is kept until the end, since taking one is what costs most; candidates that
    do the same work are timed once, and those that the profile puts clearly behind another not at all.
    """

    def __init__(self, device: Device, profile: Profile) -> None:
        self._device = device
        self._profile = profile
        self._slab: Region | None = None
        self._known: list[tuple[tuple[Action, ...], int, float]] = []

    def __call__(self, schedule: Schedule) -> float:
        """Milliseconds of one iteration, predicted where that is clearly more than another's; infinite for a schedule
        that the device has no room for."""
        for actions, pool, ms in self._known:
            if (actions, pool) == (schedule.actions, schedule.pool_bytes):
                return ms
        predicted = self._predicted(schedule)
        if predicted > BEHIND * min((ms for *_, ms in self._known), default=inf):
            return predicted
        try:
            ms = time_schedule(self._device, schedule, self._slab_for(schedule.pinned_bytes))
        except (OutOfDeviceMemory, OutOfPinnedMemory):
            ms = inf
        self._known.append((schedule.actions, schedule.pool_bytes, ms))
        return ms

    def _predicted(self, schedule: Schedule) -> float:
        try:
            return simulate(schedule, self._profile).iteration_ms
        except ArgumentError:  # the profile has no times
            return 0.0

    def _slab_for(self, nbytes: int) -> Region | None:
        if self._slab is None or self._slab.nbytes < nbytes:
            self.close()
            self._slab = self._device.pinned(nbytes) if nbytes else None
        return self._slab

    def close(self) -> None:
        """Give the slab back."""
        if self._slab is not None:
            self._device.give_back(self._slab)
            self._slab = None

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def time_schedule(device: Device, schedule: Schedule, slab: Region | None) -> float:
    """Milliseconds of one iteration on a batch of zeros, in an arena of its own that is given back at the end.

    `slab` is pinned memory of at least the size that the schedule needs. Weights are whatever lies in the arena: no
    result is looked at.
    """
    graph = schedule.graph
    labels = graph.tensors["labels"]
    slot = BatchSlot(device, slot_fields(graph, labels.shape, labels.dtype, graph.batch, 1))
    regions = [slot.region]
    try:
        for name in slot.fields:
            slot.array(name).fill(0)
        slot.array("scalars").fill(1)  # optimizers divide by some of them
        arena = device.arena(schedule.peak_bytes)
        regions.append(arena)
        executor = executor_for(device, schedule, arena, slab)
        times: list[float] = []
        while len(times) < 2 or (len(times) <= PASSES and times[-1] < SLOW_MS):
            began = perf_counter()
            executor.run(slot)
            executor.finish()
            times.append((perf_counter() - began) * 1e3)
        return median(times[1:])
    finally:
        device.abandon()
        for region in regions:
            device.give_back(region)

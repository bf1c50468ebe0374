"""Timing schedules on a device: the profile passes of `dyn` (vDNN++, section II-B)."""

from __future__ import annotations

from math import inf
from statistics import median
from time import perf_counter

from minidnn.device.base import Device
from minidnn.errors import OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.run.live import executor_for
from minidnn.run.slot import BatchSlot, slot_fields
from minidnn.schedule.actions import Schedule

PASSES = 3
"""Timed iterations, after one that warms up; the median counts."""


def time_if_it_fits(device: Device, schedule: Schedule) -> float:
    """Milliseconds of one iteration; infinite for a schedule that the device has no room for."""
    try:
        return time_schedule(device, schedule)
    except (OutOfDeviceMemory, OutOfPinnedMemory):
        return inf


def time_schedule(device: Device, schedule: Schedule) -> float:
    """Milliseconds of one iteration on a batch of zeros, in memory of its own that is given back at the end.

    Weights are whatever lies there: no result is looked at.
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
        pinned = device.pinned(schedule.pinned_bytes) if schedule.pinned_bytes else None
        regions += [pinned] if pinned else []
        executor = executor_for(device, schedule, arena, pinned)
        times = []
        for _ in range(PASSES + 1):
            began = perf_counter()
            executor.run(slot)
            executor.finish()
            times.append((perf_counter() - began) * 1e3)
        return median(times[1:])
    finally:
        device.abandon()
        for region in regions:
            device.give_back(region)

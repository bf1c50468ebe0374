"""An iteration as one CUDA graph: captured once per batch slot, then issued by one call.

Only schedules in which the host does nothing can be captured: `base`, `keep`, and offloading without host waits.
"""

from __future__ import annotations

from functools import partial

from minidnn.device.base import Device, Launcher, Region
from minidnn.errors import ArgumentError, raise_at
from minidnn.run.executor import Executor
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import COMPUTE, HOST, Schedule


class CapturedExecutor(Executor):
    """Runs a schedule from captured graphs; while someone watches its steps (an observer, a recorder), step by step.

    The first iteration runs step by step too: libraries take what they need at first use, which cannot be captured.
    Raises ArgumentError for a schedule that needs the host.
    """

    def __init__(self, device: Device, schedule: Schedule, arena: Region, pinned: Region | None) -> None:
        lanes = [lane for lane in schedule.lanes if lane not in (HOST, COMPUTE)]
        if any(a.lane == HOST for a in schedule.actions) or any(lane.startswith("release") for lane in lanes):
            raise ArgumentError(
                f"memory mode {schedule.plan.mode} needs the host in every iteration; a CUDA graph holds base and keep"
            )
        super().__init__(device, schedule, arena, pinned)
        self._plain = list(self.steps)
        self._streams = [device.stream(lane) for lane in (COMPUTE, *lanes)]
        self._graphs: dict[tuple[BatchSlot, int, int], Launcher] = {}
        self._warm = False

    def run(self, slot: BatchSlot) -> None:
        """Issue one iteration over the batch in `slot`; see `Executor.run`."""
        if not self._warm or self.steps != self._plain:
            super().run(slot)
            self._warm = True
            return
        key = (slot, slot.part, slot.first_row)  # a graph's copies have fixed addresses in the slot
        if key not in self._graphs:
            self._graphs[key] = self.device.capture(self._streams, partial(super().run, slot))
        try:
            self.device.mark("graph")
            self._graphs[key]()
        except BaseException as error:
            self.device.abandon()
            raise_at(error, "graph")

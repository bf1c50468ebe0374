"""An iteration as one CUDA graph: captured once per batch slot, then issued by one call.

Only schedules in which the host does nothing can be captured: `base`, `keep`, and offloading without host waits.
"""

from __future__ import annotations

from functools import partial

from minidnn.device.base import Device, Launcher, Region
from minidnn.errors import ArgumentError, raise_at
from minidnn.run.executor import Executor
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import COMPUTE, H2D, HOST, Launch, Schedule, Wait


class CapturedExecutor(Executor):
    """Runs a schedule from captured graphs; while someone watches its steps (an observer, a recorder), step by step.

    The first iteration runs step by step too: libraries take what they need at first use, which cannot be captured. So
    does the head of each iteration whose batch comes early: a graph begins when all that was issued before it has
    ended. Raises ArgumentError for a schedule that needs the host.
    """

    def __init__(self, device: Device, schedule: Schedule, arena: Region, pinned: Region | None) -> None:
        lanes = [lane for lane in schedule.lanes if lane not in (HOST, COMPUTE)]
        if any(a.lane == HOST for a in schedule.actions) or any(lane.startswith("release") for lane in lanes):
            raise ArgumentError(
                f"memory mode {schedule.plan.mode} needs the host in every iteration; a CUDA graph holds base, keep "
                "and the planners' modes"
            )
        super().__init__(device, schedule, arena, pinned)
        self._plain = list(self.steps)
        self._streams = [device.stream(lane) for lane in (COMPUTE, *lanes)]
        self._graphs: dict[tuple[BatchSlot, int, int], Launcher] = {}
        self._warm = False
        self._read, head = self._until_read()
        self._head = self._plain[:head]
        known = {action.signal for action, _, _ in self._head}
        # The graph comes behind the whole head: it needs no waits for it, and could not have any.
        self._body = [s for s in self._plain[head:] if not (isinstance(s[0], Wait) and known.issuperset(s[0].waits))]

    def _until_read(self) -> tuple[int, int]:
        """The token that an early batch has been read, and the number of steps until it is signalled; -1 and 0 where
        no batch comes early, or more than one op reads it."""
        for action in reversed(self.schedule.actions if self.schedule.early else ()):
            if isinstance(action, Wait) and action.lane == H2D:
                (read,) = action.waits
                at = next(i for i, (step, _, _) in enumerate(self._plain) if step.signal == read)
                if sum(isinstance(step, Launch) for step, _, _ in self._plain[:at]) == 1:
                    return read, at + 1
                break
        return -1, 0

    def run(self, slot: BatchSlot) -> None:
        """Issue one iteration over the batch in `slot`; see `Executor.run`."""
        if not self._warm or self.steps != self._plain:
            super().run(slot)
            self._warm = True
            return
        key = (slot, slot.part, slot.first_row)  # a graph's copies have fixed addresses in the slot
        if key not in self._graphs:
            self._graphs[key] = self.device.capture(self._streams, partial(self.issue, slot, self._body))
        self.issue(slot, self._head)
        device, (compute, *others) = self.device, self._streams
        if self._head:
            copies = device.stream(H2D)
            device.wait(compute, device.record(copies))  # labels and scalars
            device.wait(copies, self.events[self._read])
            others.remove(copies)
        try:
            device.mark("graph")
            self._graphs[key]()
        except BaseException as error:
            device.abandon()
            raise_at(error, "graph")
        done = device.record(compute)
        for stream in others:  # whatever is issued next need not be a graph
            device.wait(stream, done)

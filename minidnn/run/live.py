"""`placement=live`: the paper's run-time pool. Offsets are found while the iteration runs, frees come when they come.

An allocation that finds no room waits for the oldest release that is under way, tries again, and so on; with none under
way it raises OutOfDeviceMemory. Copy-outs share one lane, so releases end in the order in which they were issued, and
waiting for the oldest is waiting for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from minidnn.codec import PackedMemory
from minidnn.device.base import Device, Event, Region
from minidnn.errors import ArgumentError
from minidnn.graph.graph import Graph
from minidnn.memory.place import lower_bound
from minidnn.memory.pool import Allocator, Block, Pool
from minidnn.memory.sizing import smallest_pool
from minidnn.plan.plan import Plan
from minidnn.run.captured import CapturedExecutor
from minidnn.run.executor import Executor, Step
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import ALIGNMENT, Action, Alloc, Buffer, Free, Launch, Release, Schedule
from minidnn.schedule.compress import plan_slab
from minidnn.schedule.lifetimes import lifetimes, pool_role, trace
from minidnn.schedule.lower import walk
from minidnn.schedule.timings import observe


def live_schedule(
    graph: Graph, plan: Plan, fit: str = "best-fit", budget: int | None = None,
    persistent: Mapping[str, int] | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of a plan without offsets, for a run-time pool with heuristic `fit`.

    The pool has what `budget` bytes of arena leave; without a budget the largest need observed over many release
    timings. Where the budget leaves too little, or the rare size that serves worse than a smaller one, it has what the
    paper's search finds with every release at its soonest; releases that come later may need more. A plan that orders
    its copies by offsets instead of host waits has none here.
    """
    draft = walk(graph, plan, None, persistent)
    draft = walk(graph, plan, None, persistent, plan_slab(graph, plan, draft.actions))
    requests = trace(graph, plan, draft.actions)
    nbytes = smallest_pool(requests, fit).nbytes
    room = 0 if budget is None else (budget - draft.persistent_bytes) // ALIGNMENT * ALIGNMENT
    if room > nbytes and smallest_pool(requests, fit, start=room).nbytes == room:
        nbytes = room
    schedule = Schedule(
        graph, plan, tuple(draft.actions), draft.persistent, draft.persistent_bytes, nbytes, draft.pinned, "live", fit,
        lower_bound(lifetimes(draft.actions), ALIGNMENT),
    )  # fmt: skip
    return schedule if budget is not None else replace(schedule, pool_bytes=observe(schedule, fit).nbytes)


class LiveExecutor(Executor):
    """Runs a schedule whose buffers have no offsets, in a pool behind the persistent region."""

    def __init__(
        self, device: Device, schedule: Schedule, arena: Region, pinned: Region | None, pool: Allocator,
        packed: PackedMemory | None = None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.blocks: dict[str, Block] = {}
        self.releasing: list[Event] = []
        self.fixed = {b.key: b.offset for b in schedule.persistent}
        super().__init__(device, schedule, arena, pinned, packed)

    def compile(self, action: Action) -> Step | None:
        if isinstance(action, Alloc):
            return partial(self._allocate, action.buffer)
        if isinstance(action, Launch):
            return partial(self._launch, action)
        return super().compile(action)

    def offset(self, buffer: Buffer) -> int:
        """Where the buffer's block lies now."""
        fixed = self.fixed.get(buffer.key)
        return self.schedule.persistent_bytes + self.blocks[buffer.key].address if fixed is None else fixed

    def _launch(self, action: Launch) -> None:
        self.launcher(action)()

    def _allocate(self, buffer: Buffer) -> None:
        role = pool_role(self.schedule.graph, self.schedule.plan, buffer)
        block = self.pool.try_allocate(buffer.nbytes, role, buffer.key)
        while block is None and self.releasing:
            self.device.host_wait(self.releasing.pop(0))
            block = self.pool.try_allocate(buffer.nbytes, role, buffer.key)
        # Nothing is under way now, so the pool can only serve the request or say why it cannot.
        self.blocks[buffer.key] = block if block is not None else self.pool.allocate(buffer.nbytes, role, buffer.key)

    def _free(self, action: Free) -> None:
        super()._free(action)
        for buffer in action.frees:
            self.pool.free(self.blocks.pop(buffer.key))

    def _release(self, action: Release) -> None:
        super()._release(action)
        assert action.signal is not None
        self.releasing.append(self.events[action.signal])

    def released(self, action: Release) -> None:
        super().released(action)
        for buffer in action.frees:
            self.pool.free(self.blocks[buffer.key])

    def run(self, slot: BatchSlot) -> None:
        """One iteration; what a failed one left in the pool is given back first."""
        self.releasing.clear()
        for block in list(self.pool.live()):
            self.pool.free(block)
        self.blocks.clear()
        super().run(slot)


def executor_for(
    device: Device, schedule: Schedule, arena: Region, pinned: Region | None, captured: bool = False,
    packed: PackedMemory | None = None,
) -> Executor:  # fmt: skip
    """The executor of a schedule: planned, or with a run-time pool of the schedule's size and heuristic; or, planned
    and `captured`, from CUDA graphs. Raises ArgumentError where these cannot be combined."""
    if captured:
        if schedule.placement == "live":
            raise ArgumentError("placement is 'live'; a CUDA graph needs fixed addresses: use 'planned'")
        return CapturedExecutor(device, schedule, arena, pinned)
    if schedule.placement == "live":
        return LiveExecutor(device, schedule, arena, pinned, Pool(schedule.pool_bytes, schedule.fit), packed)
    return Executor(device, schedule, arena, pinned, packed)

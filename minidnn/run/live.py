"""`placement=live`: the paper's run-time pool. Offsets are found while the iteration runs, frees come when they come.

An allocation that finds no room waits for the oldest release that is under way, tries again, and so on; with none under
way it raises OutOfDeviceMemory. Copy-outs share one lane, so releases end in the order in which they were issued, and
waiting for the oldest is waiting for the next.
"""

from __future__ import annotations

from functools import partial

from minidnn.device.base import Device, Event, Region
from minidnn.memory.pool import Allocator, Block
from minidnn.run.executor import Executor, Step
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import Action, Alloc, Buffer, Free, Launch, Release, Schedule
from minidnn.schedule.lifetimes import pool_role


class LiveExecutor(Executor):
    """Runs a schedule whose buffers have no offsets, in a pool behind the persistent region."""

    def __init__(
        self, device: Device, schedule: Schedule, arena: Region, pinned: Region | None, pool: Allocator
    ) -> None:
        self.pool = pool
        self.blocks: dict[str, Block] = {}
        self.releasing: list[Event] = []
        self.fixed = {b.key: b.offset for b in schedule.persistent}
        super().__init__(device, schedule, arena, pinned)

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

"""The executor: walks a schedule on a device.

A schedule is compiled once into a list of closures, one for each action; an iteration calls them in order. Everything
slow (binding kernels, building cuDNN plans) happens at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from minidnn.codec import PackedMemory
from minidnn.device.base import Device, Event, Operand, Region, by_argument
from minidnn.errors import DeviceError, raise_at
from minidnn.graph.tensor import Tensor
from minidnn.run.packing import Packer
from minidnn.run.slot import BatchSlot
from minidnn.schedule.actions import (
    Action,
    Alloc,
    AwaitReleases,
    Buffer,
    Compress,
    Copy,
    Decompress,
    Free,
    HostRange,
    HostSync,
    HostWait,
    Launch,
    Offload,
    Prefetch,
    Record,
    Release,
    Schedule,
    Token,
    Wait,
)  # fmt: skip

Step = Callable[[], object]
OBSERVE = "observe "
"""How the labels of an observer's steps begin."""


class Executor:
    """Runs one planned schedule, over and over, in an arena, a pinned slab and packed memory that others own."""

    def __init__(
        self, device: Device, schedule: Schedule, arena: Region, pinned: Region | None,
        packed: PackedMemory | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.schedule = schedule
        self.arena = arena
        self.pinned = pinned
        self.packer = Packer(device, schedule.graph, pinned, packed)
        self.packs = {(a.host.name, a.part): a for a in schedule.actions if isinstance(a, Compress)}
        self.events: dict[Token, Event] = {}
        self.slot: BatchSlot | None = None
        self.steps: list[tuple[Action, str, Step]] = []
        for action in schedule.actions:
            step = self.compile(action)
            if step is not None:
                self.steps.append((action, action.label, step))

    def tap(self, look: Callable[[Action], Step | None]) -> None:
        """From now on issue, behind each action for which `look` gives a step, that step too (see run/observe.py)."""
        steps = self.steps
        self.steps = []
        for action, label, step in steps:
            self.steps.append((action, label, step))
            more = look(action)
            if more is not None:
                self.steps.append((action, OBSERVE + label, more))

    def untap(self) -> None:
        """Issue the schedule's own steps alone again."""
        self.steps = [step for step in self.steps if not step[1].startswith(OBSERVE)]

    def run(self, slot: BatchSlot) -> None:
        """Issue one iteration over the batch in `slot`. Device work may still be running on return.

        Raises DeviceError naming the action that failed; minidnn's own errors and KeyboardInterrupt pass with the
        action as a note. What was issued before may still run then: see `Device.abandon`.
        """
        self.issue(slot, self.steps)

    def issue(self, slot: BatchSlot, steps: Sequence[tuple[Action, str, Step]]) -> None:
        """Issue some of the steps; see `run`."""
        self.slot = slot
        self.packer.begin()
        label = "start"
        try:
            with self.device.guard():
                for _, label, step in steps:
                    self.device.mark(label)
                    step()
        except BaseException as error:
            self.packer.begin()
            raise_at(error, label)

    def finish(self) -> None:
        """Wait for everything that the iteration issued."""
        for lane in self.schedule.lanes[1:]:
            if not lane.startswith(("release-", "codec-")):
                self.device.host_sync(self.device.stream(lane))

    # -- one action ------------------------------------------------------------------------------------------------

    def compile(self, action: Action) -> Step | None:
        """The closure that executes an action; None for those that only plan."""
        if isinstance(action, Launch):
            return self.launcher(action)
        if isinstance(action, Alloc):
            return partial(self._await, action.waits) if action.waits else None
        if isinstance(action, Release):
            return partial(self._release, action)
        if isinstance(action, Free):
            return partial(self._free, action)
        if isinstance(action, Compress):
            return partial(self._compress, action)
        if isinstance(action, Decompress):
            return partial(self._decompress, action, self.packs[action.host.name, action.part])
        stream = self.device.stream(action.lane) if action.lane != "host" else None
        if isinstance(action, Copy):
            return partial(self._copy, action, stream)
        if isinstance(action, Record):
            return partial(self._record, action.signal, stream)
        if isinstance(action, Wait):
            return partial(self._wait, stream, action.waits)
        if isinstance(action, (HostWait, AwaitReleases)):
            return partial(self._await, action.waits)
        if isinstance(action, HostSync):
            return partial(self.device.host_sync, self.device.stream(action.of))
        raise DeviceError(f"executor must know every action, and does not know {action.label}")

    def offset(self, buffer: Buffer) -> int:
        """Where a buffer lies in the arena."""
        return buffer.offset

    def launcher(self, action: Launch) -> Step:
        """Bind a launch to memory."""
        operands = bind(action, self.schedule.graph.tensors, self.offset)
        space = action.workspace
        workspace = (self.offset(space), space.nbytes) if space else None
        stream = self.device.stream(action.lane)
        return self.device.launcher(
            self.schedule.graph, action.launch, action.algorithm, operands, workspace, self.arena, stream
        )

    def _copy(self, action: Copy, stream: object) -> None:
        place = action.host
        region, at = self._host_place(place)
        if isinstance(action, Prefetch):
            self.packer.looked(place.name)
        copy = self.device.copy_out if isinstance(action, Offload) else self.device.copy_in
        copy(self.arena, self.offset(action.buffer), region, at, place.nbytes, stream)  # type: ignore[arg-type]
        plain = place.kind == "pinned" and place.name not in self.schedule.plan.compress
        if isinstance(action, Offload) and plain and self.packer.sampling:
            self.packer.sample(place, stream)  # type: ignore[arg-type]

    def _host_place(self, place: HostRange) -> tuple[Region, int]:
        if place.kind == "pinned":
            assert self.pinned is not None
            return self.pinned, place.offset
        assert self.slot is not None
        return self.slot.region, self.slot.place(place.name)

    def _record(self, token: Token | None, stream: object) -> None:
        assert token is not None
        self.events[token] = self.device.record(stream)  # type: ignore[arg-type]

    def _wait(self, stream: object, tokens: tuple[Token, ...]) -> None:
        for token in tokens:
            self.device.wait(stream, self.events[token])  # type: ignore[arg-type]

    def _await(self, tokens: tuple[Token, ...]) -> None:
        for token in tokens:
            self.device.host_wait(self.events[token])

    def _free(self, action: Free) -> None:
        stream = None if action.lane == "host" else self.device.stream(action.lane)
        for buffer in action.frees:
            self.device.discard(self.arena, self.offset(buffer), buffer.nbytes, stream)

    def _release(self, action: Release) -> None:
        (copied,) = action.waits
        assert action.signal is not None
        self.events[action.signal] = self.device.after(action.lane, self.events[copied], partial(self.released, action))

    def _compress(self, action: Compress) -> None:
        (copied,) = action.waits
        assert action.signal is not None
        self.events[action.signal] = self.packer.compress(action, self.events[copied])

    def _decompress(self, action: Decompress, packed: Compress) -> None:
        """Where nothing has been packed yet the tensor is still in its place: whoever waits, waits for its copy-out."""
        waits = tuple(self.events[token] for token in action.waits)
        done = self.packer.decompress(action, packed.host == action.host, waits)
        assert action.signal is not None
        self.events[action.signal] = done or self.events[packed.waits[0]]

    def released(self, action: Release) -> None:
        """On the release worker, after the copy-out: the bytes are free."""
        for buffer in action.frees:
            self.device.discard(self.arena, self.offset(buffer), buffer.nbytes, None)


def bind(
    action: Launch, tensors: Mapping[str, Tensor], offset: Callable[[Buffer], int]
) -> dict[str, Operand | list[Operand]]:
    """The operands of a launch."""
    return by_argument((argument, Operand(tensors[b.tensor], offset(b))) for argument, b in action.operands)

"""The simulator: walks a schedule's actions in virtual time. It touches no arrays and starts no threads.

Every dependency of a schedule points to an earlier action, so one pass in tuple order suffices: an action on a lane
starts when the host has issued it, the lane is free, its tokens have been signalled and, for a copy, the link is free.
The host pays `Profile.launch_ms` for each launch and copy and `Profile.action_ms` for any other action that it
executes, as a release worker does for each release; where it had to wait for something, it goes on `Profile.wake_ms`
later.
What copies lose to computations beside them (`Algorithm.shares`) is known from the iteration before.
Codec workers have a core each, with the rates that `simulate` is given; memory bandwidth is not shared out.
Copies of one direction share the link; without duplex both directions do, and copies take it in order of issue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from minidnn.codec.rates import MEASURED, CodecRates
from minidnn.errors import ArgumentError, OutOfDeviceMemory
from minidnn.memory.pool import Block, Pool
from minidnn.plan.compress import TYPICAL
from minidnn.profile.profile import Link, Profile, Shares
from minidnn.run.loads import Loads
from minidnn.run.timeline import Span, Timeline
from minidnn.schedule.actions import (
    COMPUTE,
    HOST,
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
from minidnn.schedule.lifetimes import pool_role

MOST, SETTLED = 8, 1e-3
"""Where computations slow copies, each iteration knows better than the one before what runs beside them: at most so
many follow each other, until none of these computations moves by more than that share of the time."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule would do: times in ms, sizes in bytes.

    `iteration_ms` is that of the last of two iterations in sequence, or of more where computations slow copies;
    infinite where a live pool ends in a request that nothing pending can serve (`dead_end` says which). `peak_bytes` is
    the arena's need.
    """

    iteration_ms: float
    timeline: Timeline
    peak_bytes: int
    pinned_bytes: int
    offloaded_bytes: int
    dead_end: str = ""

    @property
    def stall_ms(self) -> Mapping[str, float]:
        """Cause ("offload", "prefetch", "memory", "codec") -> ms in which nothing computed because of it."""
        return self.timeline.stall_ms


def simulate(
    schedule: Schedule, profile: Profile, density: Mapping[str, float] | None = None, rates: CodecRates = MEASURED
) -> Simulation:
    """Predict an iteration. `density`: share of values that are not zero, of compressed tensors by name.

    Raises ArgumentError when the profile lacks the link or the time of an op.
    """
    if profile.link is None:
        raise ArgumentError(f"profile ({profile.source}) has no link rates; use a measured profile or name a GPU")
    clock = _Clock(schedule, profile, profile.link, _Codecs(rates, density or {}))
    dead_end = ""
    try:
        took = [clock.iterate(), clock.iterate()]
        while len(took) < MOST and not clock.loads.near(clock.before, SETTLED * took[-1]):
            took.append(clock.iterate())
    except OutOfDeviceMemory as error:
        dead_end = str(error)
    if not dead_end and not isfinite(took[-1]):
        raise ArgumentError(f"profile ({profile.source}) has times of no real machine; use one that was measured")
    return Simulation(
        inf if dead_end else took[-1], clock.timeline(), clock.peak_bytes, schedule.pinned_bytes,
        schedule.offloaded_bytes, dead_end,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moment:
    """When something is done, and what it is to whoever waits for it: the cause of a stall, and a label."""

    ms: float
    cause: str = ""
    label: str = ""


class _Clock:
    """Virtual time of every lane. `last` is the work done last on each."""

    def __init__(self, schedule: Schedule, profile: Profile, link: Link, codecs: _Codecs) -> None:
        self.schedule = schedule
        self.codecs = codecs
        self.profile = profile
        self.link = link
        self.at: dict[str, float] = dict.fromkeys(schedule.lanes, 0.0)
        self.last: dict[str, _Moment] = dict.fromkeys(schedule.lanes, _Moment(0.0))
        self.link_free: dict[bool, float] = {False: 0.0, True: 0.0}  # by direction: whether to the host
        self.done: dict[Token, _Moment] = {}
        self.costs: dict[tuple[str, str], tuple[float, Shares]] = {}
        self.started = 0.0
        self.loads, self.before, self.beside = Loads(), Loads(), Loads()
        self.spans: list[Span] = []
        self.changes: list[tuple[float, int]] = []
        self.pool = _LivePool(schedule) if schedule.placement == "live" else None
        self.handlers: Mapping[type[Action], Callable[[Any], None]] = {
            Launch: self.launch, Offload: self.copy, Prefetch: self.copy, Record: self.record, Wait: self.wait,
            Alloc: self.allocate, Free: self.free, Release: self.release,
            Compress: self.compress, Decompress: self.decompress,
            HostWait: self.await_tokens, AwaitReleases: self.await_tokens, HostSync: self.await_lane,
        }  # fmt: skip

    # -- iterations

    @property
    def now(self) -> float:
        """When everything issued so far is done."""
        return max(self.at.values())

    @property
    def peak_bytes(self) -> int:
        return self.schedule.persistent_bytes + self.pool.peak if self.pool else self.schedule.peak_bytes

    def iterate(self) -> float:
        """Walk the schedule once, from when the iteration before has ended; return how long it took, in ms. Raises
        OutOfDeviceMemory at a dead end of a live pool."""
        self.done.clear()
        self.codecs.packing.clear()
        self.codecs.copied.clear()
        self.spans.clear()
        self.changes.clear()
        self.loads, self.before, self.beside = Loads(), self.loads, self.loads.repeated(self.now - self.started)
        self.started = self.now
        for action in self.schedule.actions:
            self.handlers[type(action)](action)
        return self.now - self.started

    def timeline(self) -> Timeline:
        """What the iteration recorded. An early batch was copied before: it is drawn where the next one's copy
        runs, beside this iteration."""
        started, spans = self.started, []
        for s in self.spans:
            early = s.start_ms < s.end_ms <= started
            begin = started - (self.now - started) if early else started
            if s.end_ms > begin:
                spans.append(Span(s.lane, s.label, max(s.start_ms - begin, 0.0), s.end_ms - begin, s.stall))
        used = self.schedule.persistent_bytes
        memory = [(0.0, used)]
        for ms, change in sorted(self.changes):  # of changes at the same time, frees come first
            used += change
            memory.append((max(ms - started, 0.0), used))
        return Timeline(tuple(spans), tuple(memory))

    # -- time

    def issue(self, action: Action) -> float:
        """The host executes the action."""
        launched = isinstance(action, (Launch, Copy))
        self.at[HOST] += self.profile.launch_ms if launched else self.profile.action_ms
        return self.at[HOST]

    def ready(self, action: Action) -> float:
        """When the lane of an action may start it."""
        return max(self.issue(action), self.at[action.lane])

    def work(self, action: Action, start: float, ms: float, cause: str = "") -> None:
        """The lane is busy with the action."""
        self.at[action.lane] = start + ms
        self.last[action.lane] = _Moment(start + ms, cause, action.label)
        self.spans.append(Span(action.lane, action.label, start, start + ms))

    def pause(self, lane: str, until: _Moment, cause: str = "") -> None:
        """The lane waits."""
        if until.ms > self.at[lane]:
            if (cause or until.cause) and lane in (HOST, COMPUTE):
                self.spans.append(Span(lane, f"wait for {until.label}", self.at[lane], until.ms, cause or until.cause))
            self.at[lane] = until.ms

    def latest(self, tokens: tuple[Token, ...]) -> _Moment:
        """The last of the tokens to be signalled."""
        return max((self.done[t] for t in tokens), key=lambda moment: moment.ms)

    # -- actions

    def launch(self, action: Launch) -> None:
        key = (action.launch.name, action.algorithm)
        if key not in self.costs:
            self.costs[key] = self.profile.cost(self.schedule.graph, action.launch, action.algorithm)
        ms, shares = self.costs[key]
        rows = action.rows
        start, ms = self.ready(action), ms * ((rows[1] - rows[0]) / self.schedule.graph.batch if rows else 1.0)
        self.work(action, start, ms)
        self.loads.add(start - self.started, start + ms - self.started, shares)

    def copy(self, action: Copy) -> None:
        out = isinstance(action, Offload)
        start = max(self.ready(action), self.link_free[out])
        ms = self.beside.copy_ms(start - self.started, self.link.ms(action.host.nbytes, out), out)
        self.work(action, start, ms, "offload" if out else "prefetch")
        self.link_free[out] = self.at[action.lane]
        if not self.link.duplex:
            self.link_free[not out] = self.at[action.lane]

    def record(self, action: Record) -> None:
        assert action.signal is not None
        last = self.last[action.lane]
        self.done[action.signal] = _Moment(self.ready(action), last.cause, last.label)

    def wait(self, action: Wait) -> None:
        self.at[action.lane] = self.ready(action)
        self.pause(action.lane, self.latest(action.waits))

    def wake(self, before: float) -> None:
        """The host, which was at that time before it waited, goes on."""
        if self.at[HOST] > before:
            self.at[HOST] += self.profile.wake_ms

    def await_tokens(self, action: HostWait | AwaitReleases) -> None:
        before = self.issue(action)
        cause = "offload" if isinstance(action, AwaitReleases) else ""
        copies = tuple(self.codecs.copied[t] for t in action.waits if t in self.codecs.copied)
        if copies:  # a codec is to blame only from when it could begin
            self.pause(HOST, max(copies, key=lambda moment: moment.ms))
        self.pause(HOST, self.latest(action.waits), cause)
        self.wake(before)

    def await_lane(self, action: HostSync) -> None:
        before = self.issue(action)
        last = self.last[action.of]
        self.pause(HOST, _Moment(self.at[action.of], last.cause, last.label))
        self.wake(before)

    def allocate(self, action: Alloc) -> None:
        if action.lane == HOST:
            self.issue(action)
        before = self.at[action.lane]
        if action.waits:
            self.pause(action.lane, self.latest(action.waits), "memory")
        if self.pool:
            self.pause(action.lane, self.pool.allocate(action.buffer, self.at[action.lane]))
        if action.lane == HOST:
            self.wake(before)
        self.changes.append((self.at[action.lane], action.buffer.nbytes))

    def free(self, action: Free) -> None:
        if action.lane == HOST:
            self.issue(action)
        at = self.at[action.lane]
        self.last[action.lane] = _Moment(at, "memory", action.label)
        self.release_bytes(action, at)

    def release(self, action: Release) -> None:
        assert action.signal is not None
        start = max(self.ready(action), self.latest(action.waits).ms)
        self.work(action, start, self.profile.action_ms, "memory")
        self.done[action.signal] = self.last[action.lane]
        self.release_bytes(action, self.at[action.lane])

    def compress(self, action: Compress) -> None:
        copied = self.latest(action.waits)
        start = max(self.ready(action), copied.ms)
        packing = self.codecs.packing.setdefault(action.host.name, _Packing(action.host, copied))
        packing.parts[action.lane] = start, self.at[action.lane], self.last[action.lane]
        self.work(action, start, self.codecs.ms(action), "codec")
        assert action.signal is not None
        self.done[action.signal] = self.last[action.lane]
        self.codecs.copied[action.signal] = copied

    def decompress(self, action: Decompress) -> None:
        """Where no worker has begun to pack the tensor by now, and it comes back in place, nothing needs to be done."""
        start = max(self.ready(action), self.latest(action.waits).ms)
        packing = self.codecs.packing[action.host.name]
        if packing.cancelled is None:
            soonest = min(begun for begun, _, _ in packing.parts.values())
            packing.cancelled = packing.host == action.host and soonest > self.at[HOST]
            if packing.cancelled:
                label = f"compress {action.host.name}"
                self.spans = [s for s in self.spans if s.label != label]
                for lane, (_, at, last) in packing.parts.items():
                    if self.last[lane].label == label:
                        self.at[lane], self.last[lane] = at, last
        assert action.signal is not None
        if packing.cancelled:
            self.done[action.signal] = packing.copied
        else:
            self.work(action, start, self.codecs.ms(action), "codec")
            self.done[action.signal] = self.last[action.lane]

    def release_bytes(self, action: Free, at: float) -> None:
        """The buffers' bytes are free from `at` on."""
        for buffer in action.frees:
            self.changes.append((at, -buffer.nbytes))
            if self.pool:
                self.pool.free(buffer, at, action.label)


@dataclass(slots=True)
class _Packing:
    """One tensor: its place, when it is there, and per worker when packing began and what the worker did before."""

    host: HostRange
    copied: _Moment
    parts: dict[str, tuple[float, float, _Moment]] = field(default_factory=dict)
    cancelled: bool | None = None


class _Codecs:
    """What is known of compression: rates, densities, and what is packed in this iteration."""

    def __init__(self, rates: CodecRates, density: Mapping[str, float]) -> None:
        self.rates, self.density = rates, density
        self.packing: dict[str, _Packing] = {}
        self.copied: dict[Token, _Moment] = {}  # by the token of a packing: when its bytes were there

    def ms(self, action: Compress | Decompress) -> float:
        """Time of one part."""
        work = self.rates.pack_ms if isinstance(action, Compress) else self.rates.unpack_ms
        return work(action.stop - action.start, self.density.get(action.host.name, TYPICAL))


class _LivePool:
    """The run-time pool in virtual time: frees take effect when their time has come."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.pool = Pool(schedule.pool_bytes, schedule.fit)
        self.blocks: dict[str, Block] = {}
        self.pending: list[tuple[float, int, Block, str]] = []  # a heap: when, a serial number, what, why
        self.issued = 0
        self.peak = 0

    def allocate(self, buffer: Buffer, at: float) -> _Moment:
        """Take a block; return when there was room. Raises OutOfDeviceMemory when nothing pending makes any."""
        role = pool_role(self.schedule.graph, self.schedule.plan, buffer)
        moment = _Moment(at)
        while self.pending and self.pending[0][0] <= at:
            self._settle()
        block = self.pool.try_allocate(buffer.nbytes, role, buffer.key)
        while block is None and self.pending:
            moment = self._settle()
            block = self.pool.try_allocate(buffer.nbytes, role, buffer.key)
        if block is None:
            block = self.pool.allocate(buffer.nbytes, role, buffer.key)  # raises, and says why
        self.blocks[buffer.key] = block
        self.peak = max(self.peak, block.address + block.nbytes)
        return moment

    def free(self, buffer: Buffer, at: float, label: str) -> None:
        """The buffer's block is free from `at` on."""
        self.issued += 1
        heapq.heappush(self.pending, (at, self.issued, self.blocks.pop(buffer.key), label))

    def _settle(self) -> _Moment:
        at, _, block, label = heapq.heappop(self.pending)
        self.pool.free(block)
        return _Moment(at, "memory", label)

"""A measured timeline: time stamps around what an executor issues, without changing its order or waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter

from minidnn.device.base import Stream
from minidnn.run.executor import Executor, Step
from minidnn.run.timeline import Span, Timeline
from minidnn.schedule.actions import (
    COMPUTE,
    D2H,
    H2D,
    HOST,
    MEMORY,
    Action,
    Alloc,
    AwaitReleases,
    Copy,
    HostSync,
    HostWait,
    Launch,
    Offload,
    PartAction,
    Prefetch,
    Record,
    Token,
    Wait,
)  # fmt: skip
from minidnn.schedule.lifetimes import changes

COPYING = frozenset({MEMORY, D2H, H2D})
_WORK = (Launch, Offload, Prefetch)
_WAITS = (HostWait, HostSync, AwaitReleases, Alloc)


class Recorder:
    """Records one iteration at a time of the executor that it is attached to."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.device = executor.device
        self._work: list[tuple[Action, str, object, object]] = []
        self._waits: list[tuple[Action, str, float, float]] = []
        self._pauses: list[tuple[Wait, object]] = []
        self._behind = _copies_behind(executor.schedule.actions)
        self._plain = executor.steps
        self._origin: tuple[object, float] | None = None
        parts = [a for a in executor.schedule.actions if isinstance(a, PartAction)]
        self._codec = {a.signal: a.host.name for a in parts if a.signal is not None}

    def begin(self) -> None:
        """From the next iteration on, record. The device is idle at this moment."""
        self._work.clear()
        self._waits.clear()
        self._pauses.clear()
        self.executor.finish()
        stream = self.device.stream(COMPUTE)
        stamp = self.device.stamp(stream)
        self.device.host_sync(stream)
        self._origin = (stamp, perf_counter())
        self.executor.steps = [(a, label, self._timed(a, label, step)) for a, label, step in self._plain]

    def end(self) -> Timeline:
        """Stop recording; the timeline of what was issued since `begin`."""
        self.executor.finish()
        self.executor.steps = self._plain
        assert self._origin is not None
        stamp, host = self._origin
        spans = [
            Span(a.lane, label, self.device.elapsed_ms(stamp, start), self.device.elapsed_ms(stamp, stop))
            for a, label, start, stop in self._work
        ]
        spans += [
            Span(lane, label, (start - host) * 1e3, (stop - host) * 1e3)
            for lane, label, start, stop in self.executor.packer.spans
        ]
        spans += self._paused_spans(stamp)
        copies = sorted((s for s in spans if s.lane in COPYING), key=lambda s: s.end_ms)
        for action, label, start_s, stop_s in self._waits:
            start, stop = (start_s - host) * 1e3, (stop_s - host) * 1e3
            cause = _cause(action, [s for s in copies if s.end_ms <= stop])
            packed = {f"offload {self._codec[token]}" for token in action.waits if token in self._codec}
            if packed:  # a codec is to blame only from when it could begin
                copied = max((s.end_ms for s in copies if s.label in packed), default=start)
                if start < copied < stop:
                    spans.append(Span(HOST, label, start, copied, "offload"))
                    start = copied
                cause = "codec"
            if cause:
                spans.append(Span(HOST, label, start, stop, cause))
        spans.sort(key=lambda s: s.start_ms)
        return Timeline(tuple(spans), self._memory(self._launched(stamp)))

    def _paused_spans(self, stamp: object) -> Iterator[Span]:
        """Where the compute lane itself waited for copies: until the last of them was done."""
        ends = {id(a): self.device.elapsed_ms(stamp, stop) for a, _, _, stop in self._work if isinstance(a, Copy)}
        for action, begun in self._pauses:
            copies = [self._behind[token] for token in action.waits if token in self._behind]
            last = max(copies, key=lambda copy: ends[id(copy)])
            start, end = self.device.elapsed_ms(stamp, begun), ends[id(last)]
            if end > start:
                cause = "offload" if isinstance(last, Offload) else "prefetch"
                yield Span(COMPUTE, f"wait for {last.label}", start, end, cause)

    def _launched(self, stamp: object) -> dict[int, float]:
        return {a.op: self.device.elapsed_ms(stamp, s) for a, _, s, _ in self._work if isinstance(a, Launch)}

    def _memory(self, starts: dict[int, float]) -> tuple[tuple[float, int], ...]:
        """Bytes in use as each op starts: the pool's changes at the time of the op that they serve."""
        schedule = self.executor.schedule
        used, now = schedule.persistent_bytes, 0.0
        samples = [(0.0, used)]
        for change in changes(schedule.actions):
            op = schedule.actions[min(change.at, len(schedule.actions) - 1)].op
            now = max(now, starts.get(op, now))
            used += change.buffer.nbytes if change.begins else -change.buffer.nbytes
            samples.append((now, used))
        return tuple(samples)

    def _timed(self, action: Action, label: str, step: Step) -> Step:
        if isinstance(action, _WORK):
            return partial(self._stamped, action, label, step, self.device.stream(action.lane))
        if isinstance(action, _WAITS):
            return partial(self._waited, action, label, step)
        if isinstance(action, Wait) and action.lane == COMPUTE and not self._behind.keys().isdisjoint(action.waits):
            return partial(self._paused, action, step)
        return step

    def _paused(self, action: Wait, step: Callable[[], object]) -> None:
        self._pauses.append((action, self.device.stamp(self.device.stream(COMPUTE))))
        step()

    def _stamped(self, action: Action, label: str, step: Callable[[], object], stream: Stream) -> None:
        start = self.device.stamp(stream)
        step()
        self._work.append((action, label, start, self.device.stamp(stream)))

    def _waited(self, action: Action, label: str, step: Callable[[], object]) -> None:
        start = perf_counter()
        step()
        self._waits.append((action, label, start, perf_counter()))


def _copies_behind(actions: Iterable[Action]) -> dict[Token, Copy]:
    """The copy that is done last of those before a `Record`, by the record's token."""
    last: dict[str, Copy] = {}
    behind: dict[Token, Copy] = {}
    for action in actions:
        if isinstance(action, Copy):
            last[action.lane] = action
        elif isinstance(action, Record) and action.lane in last:
            assert action.signal is not None
            behind[action.signal] = last[action.lane]
    return behind


def _cause(action: Action, done: list[Span]) -> str:
    """What a host wait was for: a stall counts only while nothing computes (see Timeline)."""
    if isinstance(action, AwaitReleases):
        return "offload"
    if isinstance(action, HostWait):
        return "prefetch"
    if isinstance(action, Alloc):
        return "memory"
    if isinstance(action, HostSync) and action.of != COMPUTE and done:
        return done[-1].label.partition(" ")[0]
    return ""

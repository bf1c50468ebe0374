"""What happened when: spans on lanes and the memory in use. The same type whether measured or simulated.

A span is work (an op, a copy, a release) or, with `stall` set, a wait and what it was for. An iteration stalls while a
wait lasts and nothing computes; causes are "offload" (a copy-out must end), "prefetch" (a copy-in must), "memory" (an
allocation needs bytes that are not free yet), "codec" (a pinned slot must be emptied, or a tensor unpacked).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minidnn.schedule.actions import COMPUTE

CAUSES = ("offload", "prefetch", "memory", "codec")


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a lane from `start_ms` to `end_ms`; a wait where `stall` names its cause."""

    lane: str
    label: str
    start_ms: float
    end_ms: float
    stall: str = ""


@dataclass(frozen=True)
class Timeline:
    """One iteration from 0 to `end_ms`. `memory`: (ms, bytes in use from then on), in order of time."""

    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...] = ()

    @cached_property
    def end_ms(self) -> float:
        """When the last span ends."""
        return max((s.end_ms for s in self.spans), default=0.0)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Lanes that have spans, in order of appearance."""
        return tuple(dict.fromkeys(s.lane for s in self.spans))

    def busy_ms(self, lane: str) -> float:
        """How long the lane worked (waits do not count)."""
        return sum(end - start for start, end in _union([s for s in self.spans if s.lane == lane and not s.stall]))

    @cached_property
    def stall_ms(self) -> Mapping[str, float]:
        """Cause -> how long a wait for it lasted while nothing computed. Where two waits overlap, the first counts."""
        found = dict.fromkeys(CAUSES, 0.0)
        for _, cause, start, end in self.stalls():
            found[cause] += end - start
        return found

    def stalls(self) -> Iterator[tuple[str, str, float, float]]:
        """(label, cause, start, end) of every stretch of a wait in which nothing computed, in order of time."""
        computing = _union([s for s in self.spans if s.lane == COMPUTE and not s.stall])
        counted, at = 0.0, 0  # up to when, and up to which computation, all is accounted for
        for wait in sorted((s for s in self.spans if s.stall), key=lambda s: s.start_ms):
            start = max(wait.start_ms, counted)
            while start < wait.end_ms:
                while at < len(computing) and computing[at][1] <= start:
                    at += 1
                begin, end = computing[at] if at < len(computing) else (wait.end_ms, wait.end_ms)
                idle = min(begin, wait.end_ms)
                if idle > start:
                    yield wait.label, wait.stall, start, idle
                start = max(end, idle)
            counted = max(counted, wait.end_ms)

    def trace_events(self, name: str = "minidnn", process: int = 0) -> list[dict[str, Any]]:
        """Events of the Trace Event Format that chrome://tracing and Perfetto read: lanes are threads of a process."""
        events: list[dict[str, Any]] = [_metadata("process_name", process, 0, name)]
        threads = {lane: i for i, lane in enumerate(self.lanes)}
        events += [_metadata("thread_name", process, i, lane) for lane, i in threads.items()]
        events += [
            {
                "ph": "X", "pid": process, "tid": threads[s.lane], "name": s.label,
                "cat": f"wait for {s.stall}" if s.stall else s.lane,
                "ts": s.start_ms * 1e3, "dur": (s.end_ms - s.start_ms) * 1e3,
            }
            for s in self.spans
        ]  # fmt: skip
        events += [
            {"ph": "C", "pid": process, "name": "device memory", "ts": ms * 1e3, "args": {"bytes": nbytes}}
            for ms, nbytes in self.memory
        ]
        return events


def save_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write timelines by name as one Chrome / Perfetto trace: a process each."""
    events = [e for i, (name, line) in enumerate(timelines.items()) for e in line.trace_events(name, i)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _union(spans: list[Span]) -> list[tuple[float, float]]:
    """The stretches that the spans cover together, in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start_ms):
        if found and span.start_ms <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_ms))
        else:
            found.append((span.start_ms, span.end_ms))
    return found

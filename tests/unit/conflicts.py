"""A second opinion on schedules, by brute force: happens-before as sets, conflicts as pairs, random orders of events.

Nothing here is shared with the checker.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minidnn.graph.tensor import Role
from minidnn.schedule.actions import (
    H2D,
    HOST,
    Action,
    Alloc,
    Free,
    HostRange,
    HostSync,
    Launch,
    Offload,
    Prefetch,
    Release,
    Schedule,
)

ITERATIONS = 2
FRESH = {Role.SCALARS, Role.LABEL, Role.LOSS}
"""Roles of tensors with a fixed place whose value is each iteration's own."""


@dataclass(frozen=True)
class Event:
    """An action in one of the iterations; `action` None is whatever comes on the lane after both."""

    iteration: int
    lane: str
    action: Action | None


def events(actions: Sequence[Action]) -> list[Event]:
    """Two iterations in issue order, then an unknown action on every lane of the device."""
    found = [Event(iteration, a.lane, a) for iteration in range(ITERATIONS) for a in actions]
    lanes = dict.fromkeys(a.lane for a in actions if a.lane != HOST)
    return found + [Event(ITERATIONS, lane, None) for lane in lanes]


def ancestors(found: Sequence[Event]) -> list[int]:
    """Per event the set, as bits, of all events that are done before it starts."""
    before: list[int] = []
    for i, event in enumerate(found):
        bits = 0
        for j in range(i - 1, -1, -1):
            if bits >> j & 1:
                continue
            other = found[j]
            ordered = other.lane in (HOST, event.lane)
            if event.action is not None and other.action is not None:
                signal = other.action.signal
                ordered |= signal in event.action.waits and signal is not None and other.iteration == event.iteration
                ordered |= isinstance(event.action, HostSync) and other.lane == event.action.of
            if ordered:
                bits |= before[j] | 1 << j
        before.append(bits)
    return before


Access = tuple[tuple[object, ...], int, int, bool]
"""Which memory, from byte, to byte, whether the bytes change."""


def accesses(schedule: Schedule, event: Event) -> Iterator[Access]:
    """The bytes that an event touches. An allocation counts: its bytes become another buffer's."""
    action = event.action
    if action is None:
        return
    planned = schedule.placement == "planned"
    for buffers, changes in ((action.reads, False), (action.writes, True), (action.frees, True)):
        for b in buffers:
            fixed = planned or b in schedule.persistent
            yield (("arena",), b.offset, b.end, changes) if fixed else (("stay", b.key), 0, b.nbytes, changes)
    if isinstance(action, Alloc):
        b = action.buffer
        yield (("arena",), b.offset, b.end, True) if planned else (("stay", b.key), 0, b.nbytes, True)
    if isinstance(action, (Offload, Prefetch)):
        host = action.host
        memory = ("slab",) if host.kind == "pinned" else ("slot", event.iteration, host.name)
        yield memory, host.offset, host.offset + host.nbytes, isinstance(action, Offload)


def conflicts(schedule: Schedule, found: Sequence[Event]) -> list[tuple[int, int]]:
    """Pairs of events, by index, that must be ordered: they touch a byte that one of them changes.

    What comes after the iteration conflicts with everything in it; where batches come early, what comes in then is the
    next one, and conflicts with who uses the batch's place. A run-time pool hands out what was freed in issue
    order, so there a free (a release worker's excepted: the pool learns of it when it is done) conflicts with every
    later allocation.
    """
    touched = [list(accesses(schedule, event)) for event in found]
    tensors = schedule.graph.tensors
    early = {b for b in schedule.persistent if tensors[b.tensor].role is Role.INPUT}
    pairs = []
    for j, event in enumerate(found):
        for i in range(j):
            first, then = found[i].action, event.action
            if then is None:
                clash = first is not None and bool(touched[i]) and not isinstance(first, Alloc)
                if early and event.lane == H2D:
                    clash = first is not None and bool(early.intersection((*first.reads, *first.writes)))
            else:
                clash = any(
                    a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[3] or b[3])
                    for a in touched[i] for b in touched[j]
                )  # fmt: skip
            if schedule.placement == "live" and isinstance(then, Alloc):
                clash |= isinstance(first, Free) and not isinstance(first, Release)
            if clash:
                pairs.append((i, j))
    return pairs


def replay(schedule: Schedule, rng: random.Random) -> list[str]:
    """Two iterations in a random order of events that happens-before allows; what ops read wrongly, by op name.

    Freed bytes become poison when the free takes effect, and nothing else marks the life of a buffer. Each lane has a
    pace of its own, from equal to far apart.
    """
    found = events(schedule.actions)[: ITERATIONS * len(schedule.actions)]
    before = ancestors(found)
    memory = Bytes(schedule)
    pace = {event.lane: 10 ** rng.uniform(-4, 0) for event in found}
    done, waiting, wrong = 0, list(range(len(found))), []
    while waiting:
        ready = [i for i in waiting if before[i] & ~done == 0]
        (chosen,) = rng.choices(ready, [pace[found[i].lane] for i in ready])
        waiting.remove(chosen)
        done |= 1 << chosen
        if not memory.carry_out(found[chosen]):
            action = found[chosen].action
            assert action is not None
            wrong.append(action.label)
    return wrong


class Bytes:
    """Device and host memory as cells between all borders; a cell holds (tensor, iteration, version, place in it)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.graph = schedule, schedule.graph
        self.cells: dict[tuple[object, ...], object] = {}
        spans = [a for event in events(schedule.actions) for a in accesses(schedule, event)]
        spans += [(("arena",), b.offset, b.end, True) for b in schedule.persistent]
        self.borders = sorted({border for _, start, end, _ in spans for border in (start, end)})
        for b in schedule.persistent:
            if self.graph.tensors[b.tensor].role not in FRESH:
                self.write(("arena",), b.offset, b.end, (b.tensor, "weights", 0))

    def span(self, memory: tuple[object, ...], start: int, end: int) -> Iterator[tuple[tuple[object, ...], int]]:
        for border in self.borders:
            if start <= border < end:
                yield (*memory, border), border - start

    def write(self, memory: tuple[object, ...], start: int, end: int, value: object) -> None:
        for cell, place in self.span(memory, start, end):
            self.cells[cell] = None if value is None else (value, place)

    def holds(self, memory: tuple[object, ...], start: int, end: int, value: object) -> bool:
        return all(self.cells.get(cell) == (value, place) for cell, place in self.span(memory, start, end))

    def value(self, name: str, op: int, iteration: int) -> object:
        """What the graph wants the tensor to hold before an op (index) runs."""
        writers = [i for i, o in enumerate(self.graph.ops) if any(n == name for _, n in o.writes)]
        version = sum(i < op for i in writers)
        if self.graph.is_persistent(name) and self.graph.tensors[name].role not in FRESH:
            return (name, "weights", version + iteration * len(writers))
        return (name, iteration, version)

    def carry_out(self, event: Event) -> bool:
        """Do what the action does; False where it read something else than the graph says."""
        action, it = event.action, event.iteration
        if isinstance(action, Launch):
            good = all(
                self.holds(("arena",), b.offset, b.offset + self.graph.tensors[b.tensor].nbytes,
                           self.value(b.tensor, action.op, it))
                for b in action.reads
            )  # fmt: skip
            for b in action.writes:
                known = b.tensor in self.graph.tensors
                self.write(("arena",), b.offset, b.end, self.value(b.tensor, action.op + 1, it) if known else None)
            return good
        if isinstance(action, Prefetch):
            self.copy(self.host(action.host, it), (("arena",), action.buffer.offset), action.host.nbytes)
        elif isinstance(action, Offload):
            self.copy((("arena",), action.buffer.offset), self.host(action.host, it), action.host.nbytes)
        elif isinstance(action, Free):
            for b in action.frees:
                self.write(("arena",), b.offset, b.end, None)
        return True

    def host(self, host: HostRange, iteration: int) -> tuple[tuple[object, ...], int]:
        if host.kind == "pinned":
            return ("slab",), host.offset
        return ("slot", iteration, host.name), 0

    def copy(self, source: tuple[tuple[object, ...], int], target: tuple[tuple[object, ...], int], nbytes: int) -> None:
        """Whole tensors are copied: one value, or none where the source is torn."""
        memory, start = source
        if memory[0] == "slot":
            value: object = (memory[2], memory[1], 0)
        else:
            held = [self.cells.get(cell) for cell, _ in self.span(memory, start, start + nbytes)]
            first = held[0][0] if held and isinstance(held[0], tuple) else None
            value = first if first and self.holds(memory, start, start + nbytes, first) else None
        self.write(*target, target[1] + nbytes, value)

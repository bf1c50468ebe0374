"""How much a run-time pool needs when frees come at times that nobody planned (`placement=live`).

A release ends some time after its copy-out was issued, in the order of issue, and at the latest when an allocation has
to wait for it or the host awaits all. Which free block an allocation finds depends on that, so the same trace can fit
at one timing and end in a request that nothing pending can serve at another, even in a pool in which the planned
placement runs. What is reported here is observed over many timings, not proved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from minidnn.errors import BudgetError
from minidnn.memory.fit import Fit, named_fit
from minidnn.memory.freelist import FreeList
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import GRANULARITY
from minidnn.schedule.actions import Alloc, AwaitReleases, Free, Schedule
from minidnn.schedule.lifetimes import pool_role, trace
from minidnn.units import round_up

TIMINGS = 1000

Ends = Callable[[], bool]
"""Asked at each allocation, until it says no: does the oldest pending release end now?"""


@dataclass(frozen=True, slots=True)
class Observed:
    """`nbytes`: the largest need over all timings tried. `dead_ends`: how many of them fail in a pool of `searched`
    bytes, which suffices where every release comes at once (the paper's search)."""

    nbytes: int
    searched: int
    dead_ends: int
    timings: int


def _timing(number: int) -> Ends:
    """Timing 0 is eager (each release ends at once), 1 lazy (only when somebody waits); the others are random, each
    with a pace of its own, so that some keep up with the copies and some fall far behind."""
    if number < 2:
        return lambda: number == 0
    draw = Random(number)
    pace = draw.random()
    return lambda: draw.random() < pace


def observe(schedule: Schedule, fit: str, timings: int = TIMINGS) -> Observed:
    """Replay the schedule's allocations at many release timings, in pools with heuristic `fit`.

    Raises BudgetError where the heuristic serves the trace, or one of the timings, from no size of pool.
    """
    searched = need = smallest_pool(trace(schedule.graph, schedule.plan, schedule.actions), fit).nbytes
    replay = _Replay(schedule, named_fit(fit))
    count = timings + 2 if replay.waits else 1
    dead_ends = sum(replay.missing(searched, _timing(number)) > 0 for number in range(count))
    number, served = 0, 0 if dead_ends else count
    while served < count:  # in a row: a larger pool may fail where a smaller one served
        missing = replay.missing(need, _timing(number))
        if missing:
            if replay.missing(replay.enough, _timing(number)):
                raise BudgetError(
                    f"{fit} serves memory mode {schedule.plan.mode} from no size of pool when releases are late; "
                    "choose another fit"
                )
            need, served = round_up(need + missing, GRANULARITY), 0
        else:
            number, served = (number + 1) % count, served + 1
    return Observed(need, searched, dead_ends, count)


class _Take(NamedTuple):
    """An allocation of the pool; bytes as the pool rounds them."""

    key: str
    nbytes: int
    role: str


class _Give(NamedTuple):
    """Buffers that go back: now, or `late`, with their release."""

    keys: tuple[str, ...]
    late: bool


class _Replay:
    """A schedule's allocations, as `Pool` would serve them, thousands of times: what they have in common is worked out
    once, and a list of free blocks is all that a replay needs of a pool."""

    def __init__(self, schedule: Schedule, fit: Fit) -> None:
        self.fit = fit
        self.events: list[_Take | _Give | None] = []  # None: all releases are awaited
        self.nbytes: dict[str, int] = {}
        for action in schedule.actions:
            if isinstance(action, Alloc):
                key, nbytes = action.buffer.key, round_up(action.buffer.nbytes, GRANULARITY)
                self.nbytes[key] = nbytes
                self.events.append(_Take(key, nbytes, pool_role(schedule.graph, schedule.plan, action.buffer)))
            elif isinstance(action, Free):
                self.events.append(_Give(tuple(b.key for b in action.frees), action.until >= 0))
            elif isinstance(action, AwaitReleases):
                self.events.append(None)
        self.enough = 2 * sum(self.nbytes.values())
        """What fails where all requests have room side by side, twice, fails in a pool of any size: `smallest_pool`."""
        self.waits = any(isinstance(event, _Give) and event.late for event in self.events)

    def missing(self, nbytes: int, ends: Ends) -> int:
        """Bytes that were missing at a dead end; 0 where the iteration runs through."""
        free = FreeList()
        free.add_chunk(0, nbytes)
        choose, places, pending = self.fit.choose, dict[str, int](), deque[str]()

        def give(key: str) -> None:
            free.give(places.pop(key), self.nbytes[key])

        for event in self.events:
            if isinstance(event, _Take):
                while pending and ends():
                    give(pending.popleft())
                address = choose(free, event.nbytes, event.role)
                while address is None and pending:
                    give(pending.popleft())
                    address = choose(free, event.nbytes, event.role)
                if address is None:
                    return max(event.nbytes - self.fit.reach(free, event.role), GRANULARITY)
                free.cut(address, event.nbytes)
                places[event.key] = address
            elif event is None:
                while pending:
                    give(pending.popleft())
            elif event.late:
                pending.extend(event.keys)
            else:
                for key in event.keys:
                    give(key)
        return 0

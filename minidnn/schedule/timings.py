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

from minidnn.memory.pool import Block, Pool
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

    Raises BudgetError where the heuristic serves the trace from no size of pool.
    """
    searched = need = smallest_pool(trace(schedule.graph, schedule.plan, schedule.actions), fit).nbytes
    releases = any(isinstance(a, Free) and a.until >= 0 for a in schedule.actions)
    count = timings + 2 if releases else 1
    dead_ends = sum(_missing(schedule, fit, searched, _timing(number)) > 0 for number in range(count))
    grown = dead_ends > 0
    while grown:  # a larger pool may fail where a smaller one served, so all timings are tried again
        grown = False
        for number in range(count):
            while missing := _missing(schedule, fit, need, _timing(number)):
                need, grown = round_up(need + missing, GRANULARITY), True
    return Observed(need, searched, dead_ends, count)


def _missing(schedule: Schedule, fit: str, nbytes: int, ends: Ends) -> int:
    """Bytes that were missing at a dead end; 0 where the iteration runs through."""
    pool = Pool(nbytes, fit)
    blocks: dict[str, Block] = {}
    pending: deque[str] = deque()

    def settle() -> None:
        pool.free(blocks.pop(pending.popleft()))

    for action in schedule.actions:
        if isinstance(action, Alloc):
            while pending and ends():
                settle()
            buffer = action.buffer
            role = pool_role(schedule.graph, schedule.plan, buffer)
            block = pool.try_allocate(buffer.nbytes, role, buffer.key)
            while block is None and pending:
                settle()
                block = pool.try_allocate(buffer.nbytes, role, buffer.key)
            if block is None:
                return max(round_up(buffer.nbytes, GRANULARITY) - pool.reach(role), GRANULARITY)
            blocks[buffer.key] = block
        elif isinstance(action, Free) and action.until >= 0:
            pending.extend(b.key for b in action.frees)
        elif isinstance(action, Free):
            for buffer in action.frees:
                pool.free(blocks.pop(buffer.key))
        elif isinstance(action, AwaitReleases):
            while pending:
                settle()
    return 0

"""How late a release may be: an offloaded buffer is freed some time after its copy-out was issued (vDNN++'s release
workers, or the copy lane itself). How long that may take before somebody must wait is the room that the pool leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from minidnn.errors import BudgetError
from minidnn.schedule.actions import ALIGNMENT, Alloc, Free, Schedule
from minidnn.schedule.lifetimes import changes
from minidnn.schedule.lower import lower
from minidnn.units import round_up

CAPS = (16, 8, 6, 5, 4, 3, 2, 1)
"""Stages of delay tried where not every release can have all that the live bytes would allow."""
EFFORT = 20_000
"""Of each placement tried: a tenth of what a placement that must succeed gets."""


def delay_releases(
    schedule: Schedule, limit: int, fit: str | None = None, persistent: Mapping[str, int] | None = None
) -> Schedule:
    """The same plan with every release as late as a pool of `limit` bytes allows.

    The releases are delayed in rounds, one stage each in forward order, for as long as the live bytes stay within the
    limit: all get about the same time, which is what a copy-out needs. Should the placement of all of them together
    not fit (fragmentation), the longest delays are capped until it does; with none it is the schedule itself.
    """
    graph, plan = schedule.graph, schedule.plan
    last = graph.forward_ops if plan.sync == "compute" else len(graph.ops)  # vDNN++ awaits all after forward
    starts = [start for start, _ in plan.stages if start < last] + [len(graph.ops)]
    peaks = _stage_peaks(schedule, starts, last)
    released = [a for a in schedule.actions if isinstance(a, Free) and a.until >= 0]
    sizes = {a.frees[0].tensor: round_up(a.frees[0].nbytes, ALIGNMENT) for a in released}
    soonest = {a.frees[0].tensor: next(i for i, start in enumerate(starts) if start >= a.until) for a in released}
    latest = dict(soonest)
    waiting = list(latest)
    while waiting:
        waiting = [t for t in waiting if latest[t] < len(starts) - 1 and peaks[latest[t]] + sizes[t] <= limit]
        for t in waiting:
            if peaks[latest[t]] + sizes[t] <= limit:
                peaks[latest[t]] += sizes[t]
                latest[t] += 1
    for cap in (len(starts), *CAPS):
        free_before = {t: starts[min(latest[t], first + cap)] for t, first in soonest.items()}
        later = replace(plan, free_before=free_before)
        with suppress(BudgetError):  # a fit heuristic may serve it in no pool at all
            delayed = lower(graph, later, fit=fit, limit=limit, effort=EFFORT, persistent=persistent)
            if delayed.pool_bytes <= limit:
                return delayed
    return schedule


def _stage_peaks(schedule: Schedule, starts: list[int], last: int) -> list[int]:
    """Largest live bytes while each stage of `starts` runs; ops from `last` on do not count."""
    peaks = [0] * len(starts)
    live, stage = 0, 0
    for change in changes(schedule.actions):
        size = round_up(change.buffer.nbytes, ALIGNMENT)
        live += size if change.begins else -size
        op = schedule.actions[min(change.at, len(schedule.actions) - 1)].op
        while stage < len(starts) - 2 and op >= starts[stage + 1]:
            stage += 1
        if op < last:
            peaks[stage] = max(peaks[stage], live)
    return peaks


def stage_room(schedule: Schedule, limit: int) -> dict[int, int]:
    """Per stage (by its first op) the bytes that a workspace may take beside what is live, within `limit`."""
    room: dict[int, int] = {}
    live = 0
    for change in changes(schedule.actions):
        size = round_up(change.buffer.nbytes, ALIGNMENT)
        live += size if change.begins else -size
        action = schedule.actions[min(change.at, len(schedule.actions) - 1)]
        if isinstance(action, Alloc):
            space = size if change.buffer.tensor.startswith("workspace@") else 0
            room[action.op] = min(room.get(action.op, limit), limit - live + space)
    return {start: room.get(start, limit) for start, _ in schedule.plan.stages}



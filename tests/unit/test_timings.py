"""Replays of a schedule's allocations at many release timings: what they say is what a pool says."""

from __future__ import annotations

from collections import deque

import pytest

from minidnn.errors import BudgetError
from minidnn.graph.graph import Target
from minidnn.memory.fit import FITS, named_fit
from minidnn.memory.pool import Block, Pool
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import GRANULARITY, KEPT
from minidnn.profile.model import modelled
from minidnn.run.choose import Options, choose
from minidnn.schedule import timings
from minidnn.schedule.actions import Alloc, AwaitReleases, Free, Schedule
from minidnn.schedule.lifetimes import pool_role, trace
from minidnn.schedule.timings import Ends, _Give, _Replay, _Take, _timing, observe
from minidnn.units import round_up

from .simulated import graph_of


def live(mode: str, fit: str) -> Schedule:
    graph = graph_of("smallvgg", 4)
    return choose(graph, mode, modelled(graph, "k40"), Options(placement="live", fit=fit, budget=2**40))


def missing(schedule: Schedule, fit: str, nbytes: int, ends: Ends) -> int:
    """The same with a pool, as an executor uses it."""
    pool, blocks, pending = Pool(nbytes, fit), dict[str, Block](), deque[str]()
    for action in schedule.actions:
        if isinstance(action, Alloc):
            while pending and ends():
                pool.free(blocks.pop(pending.popleft()))
            role = pool_role(schedule.graph, schedule.plan, action.buffer)
            block = pool.try_allocate(action.buffer.nbytes, role)
            while block is None and pending:
                pool.free(blocks.pop(pending.popleft()))
                block = pool.try_allocate(action.buffer.nbytes, role)
            if block is None:
                return max(round_up(action.buffer.nbytes, GRANULARITY) - pool.reach(role), GRANULARITY)
            blocks[action.buffer.key] = block
        elif isinstance(action, Free) and action.until >= 0:
            pending.extend(b.key for b in action.frees)
        elif isinstance(action, Free):
            for buffer in action.frees:
                pool.free(blocks.pop(buffer.key))
        elif isinstance(action, AwaitReleases):
            while pending:
                pool.free(blocks.pop(pending.popleft()))
    return 0


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("mode", ["vdnn++:all(m)", "vdnn++:conv(p)", "vdnn:all(m)"])
def test_a_replay_misses_what_a_pool_misses(mode: str, fit: str) -> None:
    schedule = live(mode, fit)
    searched = smallest_pool(trace(schedule.graph, schedule.plan, schedule.actions), fit).nbytes
    replay = _Replay(schedule, named_fit(fit))
    for number in range(60):
        nbytes = round_up(searched * (number % 10 + 3) // 10, GRANULARITY)
        assert replay.missing(nbytes, _timing(number)) == missing(schedule, fit, nbytes, _timing(number))


@pytest.mark.parametrize("fit", ["best-fit", "first-fit"])
def test_the_observed_size_serves_every_timing(fit: str) -> None:
    schedule = live("vdnn++:all(m)", fit)
    found = observe(schedule, fit, timings=100)
    assert found.dead_ends == sum(missing(schedule, fit, found.searched, _timing(n)) > 0 for n in range(102)) > 0
    assert not any(missing(schedule, fit, found.nbytes, _timing(n)) for n in range(102))


def test_a_size_must_serve_all_timings_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger pool may fail where a smaller one served."""
    schedule = live("vdnn++:all(m)", "best-fit")
    searched = smallest_pool(trace(schedule.graph, schedule.plan, schedule.actions), "best-fit").nbytes
    fails = {(searched, 1), (searched + GRANULARITY, 0)}
    monkeypatch.setattr(timings, "_timing", lambda number: number)
    monkeypatch.setattr(_Replay, "missing", lambda replay, nbytes, number: GRANULARITY * ((nbytes, number) in fails))
    found = observe(schedule, "best-fit", timings=3)
    assert (found.nbytes, found.dead_ends) == (searched + 2 * GRANULARITY, 1)


def test_timings_that_no_pool_serves_are_refused() -> None:
    graph = graph_of("smallnet", 4, Target("native", "bf16"))
    profile = modelled(graph, "h100")
    with pytest.raises(BudgetError, match=r"high-end serves memory mode vdnn\+\+:conv\(p\) from no size of pool when"):
        choose(graph, "vdnn++:conv(p)", profile, Options(placement="live", fit="high-end"))


def test_what_a_heuristic_cannot_reach_is_missing() -> None:
    """`high-end` looks at the rightmost free block alone when it places what is kept, however large the others are."""
    replay = _Replay(live("vdnn++:all(m)", "high-end"), named_fit("high-end"))
    unit = GRANULARITY
    replay.nbytes = {"left": 6 * unit, "middle": 2 * unit, "kept": 4 * unit}
    replay.events = [
        _Take("left", 6 * unit, "gradient"), _Take("middle", 2 * unit, "gradient"), _Give(("left",), False),
        _Take("kept", 4 * unit, KEPT),
    ]  # fmt: skip
    assert replay.missing(10 * unit, _timing(0)) == 2 * unit

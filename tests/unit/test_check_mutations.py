"""Mutations of lowered schedules: any one action or token taken away; what the checker accepts is proved redundant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from minidnn.schedule.actions import (
    Action,
    Alloc,
    AwaitReleases,
    Free,
    HostSync,
    HostWait,
    Launch,
    Offload,
    Prefetch,
    Record,
    Schedule,
    Wait,
)
from minidnn.schedule.check import check

from . import conflicts
from .lowered import graph_of, lowered

ORDERING = (Record, Wait, HostWait, HostSync, AwaitReleases)
WORK = (Alloc, Free, Launch, Offload, Prefetch)
MALFORMED = {"token", "lane", "binding"}

Case = tuple[str, str, str, str, str | None, str]
"""Network, target, mode, order, fit, placement."""

CASES: list[Case] = [
    ("tiny", "paper", "vdnn:all(p)", "prefetch-first", None, "planned"),
    ("tiny", "paper", "vdnn++:all(p)", "prefetch-first", None, "planned"),
    ("tiny", "paper", "vdnn++:all(m)", "derivative-first", "best-fit", "planned"),
    ("tiny", "native-bf16-nhwc", "vdnn++:conv(m)", "prefetch-first", None, "planned"),
    ("tiny", "paper", "no-wait:all(p)", "prefetch-first", None, "planned"),
    ("tiny", "native", "no-wait:all(m)", "derivative-first", None, "planned"),
    ("tiny", "paper", "base(p)", "prefetch-first", None, "planned"),
    ("tiny", "native", "keep(p)", "prefetch-first", None, "planned"),
    ("tiny", "native-bf16-nhwc", "base(p)", "prefetch-first", None, "planned"),
    ("tiny", "paper", "vdnn++:all(p)", "prefetch-first", None, "live"),
    ("tiny", "paper", "keep(m)", "prefetch-first", None, "live"),
    ("plain", "paper", "vdnn++:all(m)", "prefetch-first", None, "planned"),
    ("plain", "native", "no-wait:conv(m)", "prefetch-first", None, "planned"),
]


def name(case: Case) -> str:
    return "-".join(part for part in case if part)


@dataclass(frozen=True)
class Mutant:
    """A schedule with a piece taken away. `kept` are the indices, in the original, of the actions that remain."""

    what: str
    removed: Action
    schedule: Schedule
    kept: tuple[int, ...]


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """Each action removed; each token taken out of each wait; each signal silenced."""
    actions = schedule.actions
    everything = tuple(range(len(actions)))
    for i, action in enumerate(actions):
        kept = everything[:i] + everything[i + 1 :]
        yield Mutant(f"remove {i} {action.label}", action, with_actions(schedule, actions[:i], actions[i + 1 :]), kept)
        changed = [replace(action, waits=tuple(t for t in action.waits if t != token)) for token in action.waits]
        if action.signal is not None:
            changed.append(replace(action, signal=None))
        for other in changed:
            mutated = with_actions(schedule, actions[:i], (other,), actions[i + 1 :])
            yield Mutant(f"weaken {i} {action.label}", action, mutated, everything)


def with_actions(schedule: Schedule, *parts: tuple[Action, ...]) -> Schedule:
    return replace(schedule, actions=sum(parts, ()))


def pairs_lost(original: list[tuple[int, int]], schedule: Schedule, mutant: Mutant) -> list[tuple[int, int]]:
    """The conflicting pairs of the original that happens-before no longer orders in the mutant."""
    events = conflicts.events(mutant.schedule.actions)
    before = conflicts.ancestors(events)
    count, left = len(schedule.actions), len(mutant.kept)
    place = {i + it * count: at + it * left for it in range(conflicts.ITERATIONS) for at, i in enumerate(mutant.kept)}
    ends = len(conflicts.events(schedule.actions)) - conflicts.ITERATIONS * count
    place |= {conflicts.ITERATIONS * count + k: conflicts.ITERATIONS * left + k for k in range(ends)}
    return [(i, j) for i, j in original if not before[place[j]] >> place[i] & 1]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_mutant_is_rejected_or_redundant(case: Case) -> None:
    network, target, mode, order, fit, placement = case
    schedule = lowered(graph_of(network, target), mode, order, fit, placement)
    assert check(schedule) == ()
    events = conflicts.events(schedule.actions)
    before = conflicts.ancestors(events)
    original = conflicts.conflicts(schedule, events)
    assert all(before[j] >> i & 1 for i, j in original), "the checker accepts a race"

    rejected = survived = 0
    for mutant in mutants(schedule):
        found = check(mutant.schedule)
        rejected += bool(found)
        if isinstance(mutant.removed, WORK) and len(mutant.kept) < len(schedule.actions):
            assert found, f"{mutant.what}: accepted without it"
        elif not MALFORMED & {f.rule for f in found}:
            lost = pairs_lost(original, schedule, mutant)
            assert bool(found) == bool(lost), f"{mutant.what}: found {found[:1]}, lost {lost[:3]}"
            survived += not found
    assert rejected > survived


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] == "planned"], ids=name)
def test_an_accepted_schedule_reads_right_in_every_order_of_events(case: Case) -> None:
    network, target, mode, order, fit, _ = case
    schedule = lowered(graph_of(network, target), mode, order, fit)
    for seed in range(5):
        assert conflicts.replay(schedule, random.Random(seed)) == []

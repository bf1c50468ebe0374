"""Policies at many budgets: time over the lower bound, throughput, and the rematerialization of the same chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from minidnn.errors import BudgetError
from minidnn.graph.graph import Graph
from minidnn.plan.outline import Outline, layers_of
from minidnn.plan.registry import parse_mode
from minidnn.plan.rematerialize import SLOTS, rematerialized_ms
from minidnn.profile.profile import Profile
from minidnn.run.bound import iteration_bound, paper_bound
from minidnn.run.choose import Options, choose, smallest
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import Schedule
from minidnn.schedule.region import region_bytes

EXACT = 1e-9
LEVELS = 6
"""Choices of algorithms that rematerialization is computed for."""


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at a budget: ms (None where it does not fit), bytes of the arena, and how long planning took."""

    ms: float | None
    peak_bytes: int | None
    plan_s: float


@dataclass(frozen=True)
class Sweep:
    """`points[policy][i]` belongs to `budgets[i]`, as do the bounds and the rematerialized times (ms)."""

    budgets: tuple[int, ...]
    bound_ms: tuple[float, ...]
    paper_bound_ms: tuple[float, ...]
    rematerialized_ms: tuple[float | None, ...]
    points: dict[str, list[Point]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        policies = {
            name: {
                "ms": [p.ms for p in points], "peak_bytes": [p.peak_bytes for p in points],
                "plan_s": [round(p.plan_s, 3) for p in points],
            }
            for name, points in self.points.items()
        }  # fmt: skip
        return {
            "budgets": list(self.budgets), "lower_bound_ms": list(self.bound_ms),
            "paper_bound_ms": list(self.paper_bound_ms), "rematerialized_ms": list(self.rematerialized_ms),
            "policies": policies,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Sweep:
        """From JSON."""
        points = {
            name: [Point(*row) for row in zip(p["ms"], p["peak_bytes"], p["plan_s"], strict=True)]
            for name, p in found["policies"].items()
        }
        return cls(
            tuple(found["budgets"]), tuple(found["lower_bound_ms"]), tuple(found["paper_bound_ms"]),
            tuple(found["rematerialized_ms"]), points,
        )  # fmt: skip

    def faults(self) -> list[str]:
        """What no sweep may show, a sentence each: a policy below the lower bound, above its budget, or faster than
        `best` where that is among them."""
        found = []
        for i, (budget, bound) in enumerate(zip(self.budgets, self.bound_ms, strict=True)):
            best = self.points["best"][i].ms if "best" in self.points else 0.0
            for name, points in self.points.items():
                ms, peak = points[i].ms, points[i].peak_bytes
                if ms is None or peak is None:
                    continue
                if ms < bound * (1 - EXACT):
                    found.append(f"{name} takes {ms} ms at {budget} bytes, below the bound of {bound} ms")
                if peak > budget:
                    found.append(f"{name} takes {peak} bytes of {budget}")
                if best is None or ms < best * (1 - EXACT):
                    found.append(f"{name} takes {ms} ms at {budget} bytes, best {best}")
        return found


def budgets_of(graph: Graph, profile: Profile, count: int) -> tuple[int, ...]:
    """So many budgets, evenly apart: from the least that a planner works with to what the fastest plan needs."""
    least = smallest(graph, parse_mode("best"), profile, Options()).peak_bytes
    most = max(least, choose(graph, "best", profile).peak_bytes)
    return tuple(least + (most - least) * k // max(count - 1, 1) for k in range(count))


def sweep(
    graph: Graph, profile: Profile, policies: Sequence[str], budgets: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
) -> Sweep:  # fmt: skip
    """Plan every policy for every budget, smallest first.

    A plan for a smaller budget stays a candidate for a larger one of the same policy, so no curve rises.
    """
    points: dict[str, list[Point]] = {name: [] for name in policies}
    for name in policies:
        kept: Schedule | None = None
        kept_ms = inf
        for budget in budgets:
            began = time.process_time()
            found = kept
            with suppress(BudgetError):
                found = choose(graph, name, profile, Options(budget=budget), score=_scoring(profile))
            seconds = time.process_time() - began
            if found is not None and (ms := simulate(found, profile).iteration_ms) <= kept_ms:
                kept, kept_ms = found, ms
            points[name].append(Point(kept_ms, kept.peak_bytes, seconds) if kept else Point(None, None, seconds))
            progress(f"{name} {budget}")
    bounds = tuple(iteration_bound(graph, profile, budget).ms(2) for budget in budgets)
    papers = tuple(paper_bound(graph, profile, budget) for budget in budgets)
    return Sweep(tuple(budgets), bounds, papers, rematerialization(graph, profile, budgets), points)


def _scoring(profile: Profile) -> Callable[[Schedule], float]:
    return lambda schedule: simulate(schedule, profile).iteration_ms


def rematerialization(graph: Graph, profile: Profile, budgets: Sequence[int]) -> tuple[float | None, ...]:
    """Per budget the ms of the optimal rematerialization of the graph as a chain, over some choices of algorithms."""
    outline = Outline.of(graph, profile)
    persistent = region_bytes(graph, profile.scratch_bytes)
    most = max(budgets) - persistent
    best = [inf] * len(budgets)
    for level in outline.levels(LEVELS):
        chain, _ = layers_of(outline, outline.within(level), most)
        times = rematerialized_ms(chain)
        for i, budget in enumerate(budgets):
            slot = int((budget - persistent) * SLOTS // most) if most > 0 else -1
            if slot >= 0:
                best[i] = min(best[i], float(times[slot]) + outline.load_ms)
    return tuple(ms if ms < inf else None for ms in best)


def at_bandwidth(profile: Profile, factor: float) -> Profile:
    """The profile with a link that is so many times faster."""
    assert profile.link is not None
    link = replace(profile.link, d2h=profile.link.d2h * factor, h2d=profile.link.h2d * factor)
    return replace(profile, link=link)

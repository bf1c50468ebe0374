"""From a mode to a schedule: lower and place what the policy proposes, drop what exceeds the budget, pick the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from minidnn.errors import ArgumentError, BudgetError
from minidnn.graph.graph import Graph
from minidnn.plan.mode import Mode, Request, parse_mode, policies
from minidnn.plan.plan import ORDERS, Plan, pick_algorithms
from minidnn.profile.profile import Algorithm, Profile
from minidnn.schedule.actions import Schedule
from minidnn.schedule.lower import lower
from minidnn.schedule.releases import delay_releases, stage_room
from minidnn.units import format_size

PLACEMENTS = ("planned", "live")

Score = Callable[[Schedule], float]
"""Milliseconds of one iteration: simulated, or timed on a device."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user decides about memory beside the mode. `budget` is bytes of the arena; None is no limit."""

    order: str = "prefetch-first"
    fit: str | None = None
    placement: str = "planned"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ArgumentError(f"order is {self.order!r}; it must be one of {', '.join(ORDERS)}")
        if self.placement not in PLACEMENTS:
            raise ArgumentError(f"placement is {self.placement!r}; it must be one of {', '.join(PLACEMENTS)}")


def choose(
    graph: Graph, mode: Mode | str, profile: Profile, options: Options = Options(), *,
    score: Score | None = None, persistent: Mapping[str, int] | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of a mode within the budget; among several candidates the one with the best score (or, without a
    score, the first). Raises BudgetError with the smallest budget that works when none fits."""
    mode = parse_mode(mode) if isinstance(mode, str) else mode
    fitting: list[Schedule] = []
    smallest: int | None = None
    for plan in policies()[mode.family](Request(graph, profile, mode, options.order)):
        schedule = schedule_of(graph, plan, profile, options, persistent)
        if options.budget is None or schedule.peak_bytes <= options.budget:
            fitting.append(schedule)
            if score is None:
                break
        smallest = min(schedule.peak_bytes, smallest or schedule.peak_bytes)
    if not fitting:
        assert smallest is not None and options.budget is not None
        raise BudgetError(
            f"memory mode {mode} at batch {graph.batch} needs at least {smallest} bytes ({format_size(smallest)}); "
            f"the budget is {options.budget} bytes ({format_size(options.budget)})"
        )
    return min(fitting, key=score) if score and len(fitting) > 1 else fitting[0]


def schedule_of(
    graph: Graph, plan: Plan, profile: Profile, options: Options, persistent: Mapping[str, int] | None = None
) -> Schedule:
    """Lower one plan: bound its workspaces (rule `g`) and delay its releases (vDNN++) by the room that there is."""
    lowered = lower(graph, plan, fit=options.fit, persistent=persistent)
    if plan.rule == "g" and options.budget is not None:
        plan = _bounded_workspaces(graph, plan, profile, options, persistent)
        lowered = lower(graph, plan, fit=options.fit, persistent=persistent)
    if plan.sync != "both" and plan.offload:
        # vDNN++ gets the pool that vDNN needs in the same mode, unless a budget gives it another.
        limit = lowered.pool_bytes if options.budget is None else options.budget - lowered.persistent_bytes
        if limit >= lowered.pool_bytes:
            lowered = delay_releases(lowered, limit, options.fit, persistent)
    return lowered


def _bounded_workspaces(
    graph: Graph, plan: Plan, profile: Profile, options: Options, persistent: Mapping[str, int] | None
) -> Plan:
    """Rule `g`: per stage the fastest algorithms whose workspace fits beside what is live there."""
    assert options.budget is not None
    least = replace(plan, algorithms=pick_algorithms(graph, profile, "m"))
    lowered = lower(graph, least, fit=options.fit, persistent=persistent)
    room = stage_room(lowered, options.budget - lowered.persistent_bytes)
    chosen: dict[str, Algorithm] = {}
    for start, stop in plan.stages:
        for op in graph.ops[start:stop]:
            ways = [a for a in profile.algorithms(graph, op) if a.workspace <= room[start]]
            chosen[op.name] = ways[0] if ways else least.algorithm(op)
    return replace(plan, algorithms=chosen)

"""From a mode to a schedule: lower and place what the policy proposes, drop what breaks the budget, choose."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from minidnn.arguments import choice, failure, is_count, shown
from minidnn.errors import ArgumentError, BudgetError, MiniDnnError, ScheduleError
from minidnn.graph.graph import Graph
from minidnn.memory.fit import named_fit
from minidnn.plan.compress import COMPRESSION, compressed
from minidnn.plan.mode import Mode, Outcome, Proposals, Request
from minidnn.plan.plan import ORDERS, Plan, pick_algorithms
from minidnn.plan.registry import PLANNERS, POLICIES, parse_mode
from minidnn.profile.nominal import with_times
from minidnn.profile.profile import Algorithm, Profile
from minidnn.progress import bar
from minidnn.run.live import live_schedule
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import ALIGNMENT, Schedule
from minidnn.schedule.lower import lower
from minidnn.schedule.region import region_bytes
from minidnn.schedule.releases import delay_releases, stage_room
from minidnn.units import format_size

PLACEMENTS = ("planned", "live")

Score = Callable[[Schedule], float]
"""Milliseconds of one iteration: simulated, or timed on a device."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user decides about memory beside the mode.

    `budget` is bytes of the arena, `pinned` of the pinned slab; None is no limit. `algorithms` fixes those of some ops
    by name, whatever a mode's rule picks. `compress`: "off", "all", "auto", or offloaded tensors by name; `density`:
    what is known of the tensors' shares of values that are not zero.
    """

    order: str = "prefetch-first"
    fit: str | None = None
    placement: str = "planned"
    budget: int | None = None
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    pinned: int | None = None
    compress: str | tuple[str, ...] = "off"
    density: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice(self.order, "order", ORDERS)
        choice(self.placement, "placement", PLACEMENTS)
        named = isinstance(self.compress, tuple) and all(isinstance(name, str) for name in self.compress)
        if not named and not (isinstance(self.compress, str) and self.compress in COMPRESSION):
            raise ArgumentError(
                f"compress is {shown(self.compress)}; it must be one of {', '.join(COMPRESSION)}, or a tuple of "
                "tensors' names"
            )
        if not isinstance(self.algorithms, Mapping):
            raise ArgumentError(f"algorithms is {shown(self.algorithms)}; it must be a dict of Algorithm by op")
        for name, way in self.algorithms.items():
            if not (isinstance(way, Algorithm) and is_count(way.workspace, 0)):
                raise ArgumentError(
                    f"algorithms has {shown(way)} for {shown(name)}; it must be an Algorithm with a workspace of 0 or "
                    "more bytes"
                )
        if self.fit is not None:
            named_fit(self.fit)

    def check_names(self, graph: Graph) -> None:
        """Raises ArgumentError for an op or a tensor that a training graph does not have."""
        packed = self.compress if isinstance(self.compress, tuple) else ()
        _check_names("algorithms", self.algorithms, "op", {op.name for op in graph.ops}, graph.ops[0].name)
        _check_names("compress", packed, "tensor", graph.tensors, graph.layers[-1].x)

    def allow(self, schedule: Schedule) -> bool:
        """Whether a schedule keeps the limits."""
        return (self.budget is None or schedule.peak_bytes <= self.budget) and (
            self.pinned is None or schedule.pinned_bytes <= self.pinned
        )


def _check_names(argument: str, given: Iterable[str], what: str, known: Container[str], example: str) -> None:
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"{argument} names {shown(name)}, which is no {what} of this network; use names such as {example}"
            )


def offered(algorithms: Mapping[str, Algorithm], graph: Graph, profile: Profile) -> dict[str, Algorithm]:
    """Those of the fixed algorithms that there are for this graph, as it has them: for other rows than they were fixed
    for some need not exist, and others take a workspace of another size."""
    found = {op.name: {a.name: a for a in profile.algorithms(graph, op)} for op in graph.ops if op.name in algorithms}
    return {name: found[name][a.name] for name, a in algorithms.items() if a.name in found.get(name, ())}


def choose(
    graph: Graph, mode: Mode | str, profile: Profile, options: Options = Options(), *,
    score: Score | None = None, persistent: Mapping[str, int] | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of a mode within the budget; among several candidates the one with the best score (or, without a
    score, the first). Raises BudgetError with the smallest budget that works when none fits."""
    mode = parse_mode(mode) if isinstance(mode, str) else mode
    fitting: list[Schedule] = []
    predicted: list[float] = []
    for schedule, ms in _judged(graph, mode, profile, options, persistent):
        if options.allow(schedule):
            fitting.append(schedule)
            if ms is not None:
                predicted.append(ms)
            elif score is None:
                break
    if fitting and options.budget is not None and options.fit is not None and mode.family in PLANNERS:
        # As for rule `g` below: a heuristic may by chance need less for a plan that keeps more.
        least = smallest(graph, mode, profile, options, persistent)
        fitting = fitting if least.peak_bytes <= options.budget else []
    if not fitting:
        assert options.budget is not None
        least = smallest(graph, mode, profile, options, persistent)
        needed = least.peak_bytes
        if options.allow(least):  # the policy wanted to use more of the budget, and what it wanted could not be placed
            return least
        if needed <= options.budget:
            raise BudgetError(f"memory mode {mode} at {graph.batch} rows needs more than {options.pinned} pinned bytes")
        raise BudgetError(
            f"memory mode {mode} at batch {graph.batch} needs at least {needed} bytes ({format_size(needed)}); "
            f"the budget is {options.budget} bytes ({format_size(options.budget)})",
            needed,
        )
    if predicted:  # planners weigh predicted times, whatever could be measured
        return fitting[predicted.index(min(predicted))]
    return min(fitting, key=score) if score and len(fitting) > 1 else fitting[0]


def smallest(
    graph: Graph, mode: Mode, profile: Profile, options: Options, persistent: Mapping[str, int] | None = None
) -> Schedule:
    """The candidate of a mode with the smallest peak: that peak is the smallest budget with which `choose` succeeds."""
    found = candidates(graph, mode, profile, replace(options, budget=0), persistent)
    return min(found, key=lambda schedule: schedule.peak_bytes)


def check_placement(mode: Mode, placement: str) -> None:
    """Raises ArgumentError for a mode that cannot be placed so."""
    if mode.family in PLANNERS and placement == "live":
        raise ArgumentError(f"placement is 'live'; memory mode {mode} orders its copies by offsets: use 'planned'")


def candidates(
    graph: Graph, mode: Mode, profile: Profile, options: Options, persistent: Mapping[str, int] | None = None
) -> Iterator[Schedule]:
    """The schedules that a mode's policy proposes, in its order. Raises BudgetError where the fit heuristic serves none
    of them in a pool of any size."""
    for schedule, _ in _judged(graph, mode, profile, options, persistent):
        yield schedule


def _judged(
    graph: Graph, mode: Mode, profile: Profile, options: Options, persistent: Mapping[str, int] | None
) -> Iterator[tuple[Schedule, float | None]]:
    """The candidates; those of a planner that keep the limits with their predicted ms."""
    refused: BudgetError | None = None
    served = False
    planner = mode.family in PLANNERS
    check_placement(mode, options.placement)
    timed = with_times(graph, profile) if planner else profile
    pool = _pool(graph, profile, options, persistent)
    fixed = offered(options.algorithms, graph, profile)
    proposals = POLICIES[mode.family](Request(graph, timed, mode, options.order, pool))
    outcome: Outcome | None = None
    with bar(f"planning {mode}") as done:
        while (proposed := _next(proposals, outcome, mode, graph)) is not None:
            done.update()
            algorithms = {**proposed.algorithms, **options.algorithms, **fixed}
            packed = compressed(graph, proposed, options.compress, options.density)
            offsets = {} if options.algorithms else proposed.offsets  # those were for the proposed workspaces
            plan = replace(
                proposed, algorithms=algorithms, scratch=profile.scratch_bytes, compress=packed, offsets=offsets
            )
            try:
                # A planner's pool need not be smaller than the budget's; without one its smallest is wanted.
                limit = _pool(graph, profile, options, persistent, plan.early) or None if planner else None
                schedule = schedule_of(graph, plan, timed, options, persistent, limit=limit)
            except BudgetError as error:
                refused, outcome = error, Outcome(pool or 0, False, None)
                continue
            served = True
            fits = options.allow(schedule)
            ms = simulate(schedule, timed).iteration_ms if planner and fits else None
            outcome = Outcome(schedule.pool_bytes, fits, ms)
            yield schedule, ms
    if refused is not None and not served:
        raise refused
    if not served:
        raise ScheduleError(f"policy {mode.family} proposed no plan for {mode}; it must yield one at least")


def _next(proposals: Proposals, outcome: Outcome | None, mode: Mode, graph: Graph) -> Plan | None:
    """What a policy proposes next; None: nothing more. Raises ScheduleError for what is no plan of this graph."""
    if not hasattr(proposals, "send"):
        raise ScheduleError(f"policy {mode.family} returned {shown(proposals)}; it must be a generator of Plans")
    try:
        plan: object = proposals.send(outcome)
    except StopIteration:
        return None
    except (MiniDnnError, MemoryError):
        raise
    except Exception as error:
        raise ScheduleError(f"policy {mode.family} failed with {failure(error)}; mend the policy") from error
    if not isinstance(plan, Plan):
        raise ScheduleError(f"policy {mode.family} proposed {shown(plan)}; it must be a Plan")
    try:
        plan.check(graph, f"policy {mode.family}")
    except TypeError as error:
        raise ScheduleError(
            f"policy {mode.family} proposed a plan with {failure(error)} in it; it must have ops' numbers and "
            "tensors' names"
        ) from error
    return plan


def _pool(
    graph: Graph, profile: Profile, options: Options, persistent: Mapping[str, int] | None, early: bool = False
) -> int | None:
    """Bytes of the pool that the budget leaves beside what outlives an iteration; `early`: as the input does too."""
    if options.budget is None:
        return None
    taken = region_bytes(graph, profile.scratch_bytes, persistent, early)
    return max(options.budget - taken, 0) // ALIGNMENT * ALIGNMENT


def schedule_of(
    graph: Graph, plan: Plan, profile: Profile, options: Options, persistent: Mapping[str, int] | None = None,
    limit: int | None = None,
) -> Schedule:  # fmt: skip
    """Lower one plan: bound its workspaces (rule `g`) and delay its releases (vDNN++) by the room that there is. The
    search for a placement ends within `limit` bytes of the pool."""
    lowered = _lower(graph, plan, options, persistent, limit)
    if plan.rule == "g" and options.budget is not None:
        least = replace(plan, algorithms=pick_algorithms(graph, profile, "m"))
        lowered = tightest = _lower(graph, least, options, persistent, limit)
        # A fit heuristic may by chance need less for larger workspaces; what the smallest ones need counts all the
        # same, so that budgets are refused below one figure and accepted from it on.
        if tightest.peak_bytes <= options.budget:
            faster = _bounded_workspaces(graph, least, profile, tightest, options.budget)
            bounded = _lower(graph, faster, options, persistent, limit)
            if bounded.peak_bytes <= options.budget:  # else room for each workspace, but not in one piece
                lowered = bounded
    if options.placement == "planned" and lowered.plan.sync == "compute" and lowered.plan.offload:
        # vDNN++ gets the pool that vDNN needs in the same mode, unless a budget gives it another.
        room = lowered.pool_bytes if options.budget is None else options.budget - lowered.persistent_bytes
        if room >= lowered.pool_bytes:
            lowered = delay_releases(lowered, room, options.fit, persistent)
    return lowered


def _lower(
    graph: Graph, plan: Plan, options: Options, persistent: Mapping[str, int] | None, limit: int | None
) -> Schedule:
    if options.placement == "live":
        return live_schedule(graph, plan, options.fit or "best-fit", options.budget, persistent)
    return lower(graph, plan, fit=options.fit, limit=limit, persistent=persistent)


def _bounded_workspaces(graph: Graph, least: Plan, profile: Profile, tightest: Schedule, budget: int) -> Plan:
    """Rule `g`: per stage the fastest algorithms whose workspace fits beside what is live there.

    `least` is the plan with the least workspace everywhere, `tightest` its schedule.
    """
    room = stage_room(tightest, budget - tightest.persistent_bytes)
    chosen: dict[str, Algorithm] = {}
    for start, stop in least.stages:
        for op in graph.ops[start:stop]:
            ways = [a for a in profile.algorithms(graph, op) if a.workspace <= room[start]]
            chosen[op.name] = ways[0] if ways else least.algorithm(op)
    return replace(least, algorithms=chosen)

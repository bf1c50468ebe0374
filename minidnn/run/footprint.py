"""How much memory a mode needs: the papers' figures (aggregate peak, smallest sufficient pool) beside the placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import live_profile
from minidnn.plan.compress import compressed, predicted
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan
from minidnn.plan.registry import PLANNERS, POLICIES, parse_mode
from minidnn.plan.vdnn import offloaded_layers, prefetch_schedule
from minidnn.profile.profile import Profile
from minidnn.run.choose import Options, Score, choose
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import Schedule
from minidnn.schedule.lifetimes import changes, trace
from minidnn.schedule.lower import lower
from minidnn.units import MiB

DRIVER_GRANULE = 2 * MiB
"""What cudaMalloc takes at a time."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. Peaks are of the pool, without parameters; requests rounded to 512 bytes.

    `pool_bytes` is the smallest sufficient pool by the search of vDNN++ (section IV-B) with the named fit;
    `placed_bytes` what offline placement needs, never below `lower_bound_bytes`. `parameter_bytes` counts weights,
    biases and running statistics as the driver rounds them (in base their gradients too). `pinned_bytes` is what the
    mode pins, `offloaded_bytes` what it copies out in one iteration. `prefetch` holds pairs [m, i]: X of layer i comes
    in during the backward of layer m. `pinned_raw_bytes` is what it would pin without compression; `packed_bytes`,
    `density`, `ratio` and `compressed` (one object per tensor) are predicted, and None where nothing is compressed.
    """

    aggregate_peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    pool_bytes: int
    placed_bytes: int
    lower_bound_bytes: int
    parameter_bytes: int
    pinned_bytes: int
    offloaded_bytes: int
    prefetch: list[list[int]]
    pinned_raw_bytes: int
    packed_bytes: int | None
    density: float | None
    ratio: float | None
    compressed: list[dict[str, Any]]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def footprint(
    graph: Graph, mode: str, profile: Profile, *, order: str = "prefetch-first", fit: str = "best-fit",
    compress: str = "off", density: Mapping[str, float] | None = None, budget: int | None = None,
) -> tuple[Footprint, Schedule]:  # fmt: skip
    """The footprint of a mode and the schedule it was read from.

    `density`, by tensor, predicts what is compressed. `budget`: what planners, `dyn` and rule `g` plan for, in bytes of
    the device; raises BudgetError where they need more.
    """
    parsed = parse_mode(mode)
    if parsed.family in PLANNERS or "dyn" in (parsed.offload_set, parsed.rule) or parsed.rule == "g":
        proposed = choose(graph, parsed, profile, Options(order, budget=budget), score=_score(profile)).plan
    else:
        proposed = next(POLICIES[parsed.family](Request(graph, profile, parsed, order)))
    plan = replace(proposed, compress=compressed(graph, proposed, compress, density))
    schedule = lower(graph, plan)
    events = trace(graph, plan, schedule.actions)
    live = live_profile(events)
    forward = [change.at < _first_backward(schedule) for change in changes(schedule.actions)]
    return (
        Footprint(
            aggregate_peak_bytes=max(live, default=0),
            forward_peak_bytes=max((b for b, early in zip(live, forward, strict=True) if early), default=0),
            backward_peak_bytes=max((b for b, early in zip(live, forward, strict=True) if not early), default=0),
            pool_bytes=smallest_pool(events, fit).nbytes,
            placed_bytes=schedule.pool_bytes,
            lower_bound_bytes=schedule.lower_bound_bytes,
            parameter_bytes=driver_rounded(_parameters(graph, plan)),
            pinned_bytes=schedule.pinned_bytes,
            offloaded_bytes=schedule.offloaded_bytes,
            prefetch=[list(pair) for pair in _prefetch_pairs(graph, parsed.offload_set)],
            pinned_raw_bytes=schedule.pinned_raw_bytes,
            **predicted(graph, plan, density or {}),
        ),
        schedule,
    )


def _score(profile: Profile) -> Score | None:
    """Predicted ms, where times are known."""
    return (lambda schedule: simulate(schedule, profile).iteration_ms) if profile.link else None


def _first_backward(schedule: Schedule) -> int:
    actions = enumerate(schedule.actions)
    return next((at for at, a in actions if a.op >= schedule.graph.forward_ops), len(schedule.actions))


def _prefetch_pairs(graph: Graph, offload_set: str | None) -> list[tuple[int, int]]:
    if offload_set in (None, "dyn"):
        return []
    assert offload_set is not None
    return prefetch_schedule(graph, offloaded_layers(graph, offload_set))


def _parameters(graph: Graph, plan: Plan) -> Iterable[int]:
    for t in graph.parameters():
        yield t.nbytes
    if plan.lifetime == "iteration":
        gradients = (t for t in graph.tensors.values() if t.role is Role.WEIGHT_GRADIENT)
        yield from (t.nbytes for t in gradients if t.name not in plan.reserve)


def driver_rounded(sizes: Iterable[int]) -> int:
    """What cudaMalloc takes for separate requests: large ones are rounded up to 2 MiB each, small ones share 2 MiB."""
    requests = list(sizes)
    large = sum(-(-size // DRIVER_GRANULE) for size in requests if size >= MiB)
    small = -(-sum(size for size in requests if size < MiB) // DRIVER_GRANULE)
    return (large + small) * DRIVER_GRANULE

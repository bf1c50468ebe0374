"""Planners on whole graphs: what they propose is right, keeps the budget, and is no faster than can be."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from minidnn.errors import ArgumentError, BudgetError
from minidnn.graph.graph import Graph
from minidnn.graph.tensor import Role
from minidnn.plan import places
from minidnn.plan.greedy import greedy_options
from minidnn.plan.layout import lay_out
from minidnn.plan.mode import Request
from minidnn.plan.moments import arrange
from minidnn.plan.neighbours import Neighbourhood
from minidnn.plan.nowait import Search
from minidnn.plan.outline import Movable, Outline
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.plan.thresholds import threshold_options
from minidnn.profile.model import modelled
from minidnn.profile.nominal import with_times
from minidnn.profile.profile import Algorithm, Link, Profile
from minidnn.run.bound import in_core_peak, iteration_bound, paper_bound
from minidnn.run.choose import Options, candidates, choose, smallest
from minidnn.run.explain import decisions, slower_algorithms
from minidnn.run.simulator import simulate
from minidnn.run.sweep import Point, Sweep, budgets_of, sweep
from minidnn.run.whole_copies import whole_copies_ms
from minidnn.schedule.actions import COMPUTE, D2H, H2D, Alloc, Schedule
from minidnn.schedule.check import check
from minidnn.schedule.lower import lower
from minidnn.schedule.region import region_bytes

from . import lowered, simulated

NAMES = sorted(PLANNERS)


def least(graph: Graph, policy: str, profile: Profile) -> int:
    """Bytes of the smallest budget that the policy works with."""
    return smallest(graph, parse_mode(policy), profile, Options()).peak_bytes


def budgets(graph: Graph, policy: str, profile: Profile) -> list[int]:
    """From the smallest to one that is enough."""
    low, high = least(graph, policy, profile), choose(graph, policy, profile).peak_bytes
    return [low, (3 * low + high) // 4, (low + high) // 2, max(low, high)]


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("network", sorted(lowered.NETWORKS))
@pytest.mark.parametrize("target", ["paper", "native", "native-bf16-nhwc"])
def test_plans_are_right_and_keep_the_budget(policy: str, network: str, target: str) -> None:
    graph = lowered.graph_of(network, target)
    profile = with_times(graph, lowered.profile_of(graph))
    for budget in budgets(graph, policy, profile):
        for schedule in candidates(graph, parse_mode(policy), profile, Options(budget=budget)):
            assert not check(schedule)
        found = choose(graph, policy, profile, Options(budget=budget))
        assert found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(12))
def test_no_policy_beats_the_bound_and_best_is_best(seed: int) -> None:
    rng = random.Random(seed)
    graph = simulated.random_chain(rng)
    profile = with_times(graph, simulated.random_profile(graph, rng))
    for budget in budgets(graph, "best", profile):
        options, times = Options(budget=budget), {}
        bound = iteration_bound(graph, profile, budget).ms(2)
        for mode in (*NAMES, "keep(p)", "vdnn:conv(p)", "vdnn++:all(m)", "vdnn++:dyn", "vdnn:aconv(g)"):
            try:
                found = choose(graph, mode, profile, options, score=lambda s: simulate(s, profile).iteration_ms)
            except BudgetError:
                assert mode not in PLANNERS or mode == "tflms"
                continue
            times[mode] = simulate(found, profile).iteration_ms
            assert not check(found)
            assert times[mode] >= bound * (1 - 1e-9), mode
        assert times["best"] <= min(times.values()) * (1 + 1e-12)


@pytest.mark.parametrize("policy", NAMES)
def test_one_byte_below_the_minimum_is_refused_with_the_minimum(policy: str) -> None:
    graph = lowered.graph_of("plain")
    profile = lowered.profile_of(graph)
    needed = least(graph, policy, profile)
    assert choose(graph, policy, profile, Options(budget=needed)).peak_bytes == needed
    with pytest.raises(BudgetError, match=f"needs at least {needed} bytes") as refusal:
        choose(graph, policy, profile, Options(budget=needed - 1))
    assert refusal.value.needed == needed


def test_planners_reach_below_every_mode_of_the_papers() -> None:
    graph = lowered.graph_of("plain")
    profile = lowered.profile_of(graph)
    modes = ("keep(m)", "vdnn:all(m)", "vdnn++:all(m)", "vdnn:conv(m)")
    others = min(smallest(graph, parse_mode(mode), profile, Options()).peak_bytes for mode in modes)
    assert least(graph, "best", profile) <= others < choose(graph, "greedy", profile).peak_bytes


def test_without_a_budget_nothing_leaves() -> None:
    graph = lowered.graph_of("plain")
    for policy in NAMES:
        schedule = choose(graph, policy, lowered.profile_of(graph))
        assert schedule.plan.offload == ()
        assert schedule.peak_bytes == choose(graph, "keep(p)", lowered.profile_of(graph)).peak_bytes


def test_greedy_takes_the_first_activations() -> None:
    graph = simulated.graph_of("vgg11", 16)
    profile = modelled(graph, "v100")
    budget = (least(graph, "greedy", profile) + 2 * choose(graph, "greedy", profile).peak_bytes) // 3
    outline = Outline.of(graph, profile)
    order = [m.name for m in outline.worthwhile]
    plan = choose(graph, "greedy", profile, Options(budget=budget)).plan
    assert plan.offload
    assert set(plan.offload) <= set(order[: max(order.index(name) for name in plan.offload) + 1])
    assert plan.sync == "none"


def test_the_rule_says_which_algorithms() -> None:
    graph = lowered.graph_of("plain")
    profile = lowered.profile_of(graph)
    for rule, name in (("p", "fast"), ("m", "zero")):
        budget = least(graph, "greedy", profile) * 2
        plan = choose(graph, f"greedy({rule})", profile, Options(budget=budget)).plan
        used = {plan.algorithm(op).name for op in graph.ops if op.function.startswith("conv2d")}
        assert used == {name}


def test_more_workspace_competes_with_offloading() -> None:
    """Where the fastest algorithms do not fit beside all activations, some leave, or slower algorithms are taken."""
    graph = lowered.graph_of("plain")
    profile = with_times(graph, lowered.profile_of(graph))
    used = set()
    low, high = least(graph, "best", profile), choose(graph, "best", profile).peak_bytes
    for k in range(6):
        plan = choose(graph, "best", profile, Options(budget=low + (high - low) * k // 5)).plan
        used.add(tuple(plan.algorithm(op).name for op in graph.ops if op.function.startswith("conv2d")))
    assert len(used) > 2


@pytest.mark.parametrize("text", ["greedy:conv", "best:all(p)", "dynprog:none"])
def test_planners_take_no_offload_set(text: str) -> None:
    with pytest.raises(ArgumentError, match="takes no offload set"):
        parse_mode(text)


@pytest.mark.parametrize("budget", [0, 2**40, None])
@pytest.mark.parametrize("policy", sorted(PLANNERS))
def test_a_live_pool_is_refused(policy: str, budget: int | None) -> None:
    graph = lowered.graph_of("plain")
    with pytest.raises(ArgumentError, match=f"memory mode {policy} orders its copies by offsets: use 'planned'"):
        choose(graph, policy, lowered.profile_of(graph), Options(placement="live", budget=budget))


# -- moments and places ------------------------------------------------------------------------------------------------


def test_copies_in_come_in_the_order_of_need_and_frees_when_there_is_need() -> None:
    graph = simulated.graph_of("vgg11", 16)
    outline = Outline.of(graph, modelled(graph, "v100"))
    pool = outline.peak(outline.smallest, outline.without(outline.worthwhile)) * 11 // 10
    found = arrange(outline, outline.worthwhile, outline.smallest, pool)
    assert found is not None
    fetches = [found.fetch[m.name] for m in found.by_need]
    assert fetches == sorted(fetches)
    assert all(m.left < found.fetch[m.name] <= m.needed for m in found.offload)
    assert any(found.fetch[m.name] < m.needed for m in found.offload)
    for m in found.offload:
        assert m.left < found.free_before.get(m.name, m.left + 1) <= found.fetch[m.name]


def test_a_layout_may_shorten_stays_but_moves_no_use() -> None:
    graph = simulated.graph_of("vgg11", 16)
    outline = Outline.of(graph, modelled(graph, "v100"))
    pool = outline.peak(outline.smallest, outline.without(outline.worthwhile)) * 21 // 20
    found = arrange(outline, outline.worthwhile, outline.smallest, pool)
    assert found is not None
    placed = lay_out(found, pool)
    assert placed is not None
    for m in placed.offload:
        assert found.fetch[m.name] <= placed.fetch[m.name] <= m.needed
        assert m.left < placed.free_before.get(m.name, m.left + 1) <= placed.fetch[m.name]
    assert max(placed.offsets.values()) < pool


def test_the_network_input_is_never_copied_out() -> None:
    graph = lowered.graph_of("plain")
    profile = lowered.profile_of(graph)
    schedule = choose(graph, "best", profile, Options(budget=least(graph, "best", profile)))
    inputs = [t.name for t in graph.tensors.values() if t.role is Role.INPUT]
    assert set(inputs) & set(schedule.plan.offload)
    assert not set(inputs) & set(schedule.pinned)


# -- bounds, sweeps, explanations --------------------------------------------------------------------------------------


def test_bounds_fall_with_memory_and_reach_the_time_of_all_ops() -> None:
    graph = simulated.graph_of("vgg16", 64)
    profile = modelled(graph, "v100")
    peak = in_core_peak(graph, profile)
    budgets = [peak * k // 8 for k in range(1, 13)]
    ours = [iteration_bound(graph, profile, budget).ms(2) for budget in budgets]
    for values in (ours, [paper_bound(graph, profile, budget) for budget in budgets]):
        assert values == sorted(values, reverse=True)
        assert values[0] > 1.2 * values[-1]
    free = iteration_bound(graph, profile, None)
    assert iteration_bound(graph, profile, 4 * peak).ms(2) == pytest.approx(free.compute_ms + free.load_ms)


def test_what_is_away_during_an_op_leaves_before_and_returns_after() -> None:
    graph = simulated.graph_of("vgg116", 32)
    profile = modelled(graph, "v100")
    bound = iteration_bound(graph, profile, in_core_peak(graph, profile) // 3)
    assert bound.phases_ms > max(bound.compute_ms, bound.offload_ms, bound.prefetch_ms)


def test_a_sweep_never_rises_and_stays_above_the_bound() -> None:
    graph = simulated.graph_of("smallvgg", 64)
    profile = modelled(graph, "k40")
    found = sweep(graph, profile, ("best", "greedy", "keep(p)"), budgets_of(graph, profile, 5))
    for points in found.points.values():
        times = [p.ms for p in points if p.ms is not None]
        assert times == sorted(times, reverse=True)
    for point, bound, budget in zip(found.points["best"], found.bound_ms, found.budgets, strict=True):
        assert point.ms is not None
        assert point.peak_bytes is not None
        assert point.ms >= bound
        assert point.peak_bytes <= budget
    assert found.points["keep(p)"][0].ms is None
    assert found.rematerialized_ms[-1] is not None


def test_in_a_sweep_a_plan_for_less_stays_a_candidate() -> None:
    graph = simulated.graph_of("smallvgg", 32)
    profile = modelled(graph, "k40")
    budgets = budgets_of(graph, profile, 12)
    schedules = [choose(graph, "vdnn-threshold", profile, Options(budget=budget)) for budget in budgets]
    alone = [simulate(schedule, profile).iteration_ms for schedule in schedules]
    swept = [p.ms for p in sweep(graph, profile, ("vdnn-threshold",), budgets).points["vdnn-threshold"]]
    assert alone != sorted(alone, reverse=True)
    assert swept == [min(alone[: i + 1]) for i in range(len(alone))]


def explained(budget_share: float) -> tuple[Schedule, Profile, int]:
    graph = simulated.graph_of("vgg11", 16)
    profile = modelled(graph, "v100")
    low, high = least(graph, "greedy", profile), choose(graph, "greedy", profile).peak_bytes
    budget = int(low + (high - low) * budget_share)
    return choose(graph, "greedy", profile, Options(budget=budget)), profile, budget


def test_a_plan_says_of_every_activation_what_becomes_of_it_and_why() -> None:
    schedule, profile, budget = explained(0.2)
    found = {d.tensor: d for d in decisions(schedule, profile, budget - schedule.persistent_bytes)}
    outline = Outline.of(schedule.graph, profile)
    assert set(found) == {m.name for m in outline.movable}
    assert {name for name, d in found.items() if d.offloaded} == set(schedule.plan.offload)
    leaving = [d for d in found.values() if d.offloaded]
    assert any("lacks" in d.why for d in leaving)
    order = {op.name: i for i, op in enumerate(schedule.graph.ops)}
    for d in leaving:
        assert d.gone_before is not None
        assert d.back_before is not None
        assert order[d.gone_before] <= order[d.back_before] <= order[d.needed]


def test_a_plan_says_which_ops_are_slower_for_want_of_memory() -> None:
    schedule, profile, _ = explained(0.0)
    found = slower_algorithms(schedule, profile)
    fastest = sum(profile.algorithms(schedule.graph, op)[0].ms or 0.0 for op in schedule.graph.ops)
    chosen = sum(schedule.plan.algorithm(op).ms or 0.0 for op in schedule.graph.ops)
    assert found
    assert sum(slower.more_ms for slower in found) == pytest.approx(chosen - fastest)
    assert all(slower.workspace > 0 for slower in found)


def test_every_buffer_lies_where_the_plan_says() -> None:
    schedule, _, _ = explained(0.2)
    buffers = [a.buffer for a in schedule.actions if isinstance(a, Alloc)]
    places = {b.key: b.offset - schedule.persistent_bytes for b in buffers}
    assert places == dict(schedule.plan.offsets)


def test_only_lanes_order_a_planned_schedule() -> None:
    schedule, _, _ = explained(0.2)
    assert set(schedule.lanes) == {"host", COMPUTE, D2H, H2D}
    assert not [a for a in schedule.actions if a.lane == "host"]


def test_requests_of_policies_are_values() -> None:
    graph = lowered.graph_of("tiny")
    request = Request(graph, lowered.profile_of(graph), parse_mode("greedy"))
    assert request.pool is None
    assert parse_mode("greedy").rule == "g"
    assert parse_mode("keep").rule == "p"


@pytest.mark.parametrize(("model", "batch", "share"), [("vgg11", 16, 0.1), ("vgg11", 16, 0.3), ("alexnet", 64, 0.2)])
def test_the_clock_of_a_placed_arrangement_is_the_simulator(model: str, batch: int, share: float) -> None:
    graph = simulated.graph_of(model, batch)
    profile = modelled(graph, "v100")
    low, high = least(graph, "best", profile), choose(graph, "best", profile).peak_bytes
    pool = (int(low + (high - low) * share) - region_bytes(graph, profile.scratch_bytes)) // 512 * 512
    search = Search(Request(graph, profile, parse_mode("best"), pool=pool), pool)
    for options in (greedy_options, threshold_options):
        search.over(options)
    assert search.leaders
    for arrangement in search.leaders:
        found = simulate(lower(graph, arrangement.plan(search.request)), profile)
        assert found.iteration_ms == pytest.approx(arrangement.ms, rel=1e-9)
        assert found.peak_bytes <= pool + region_bytes(graph, profile.scratch_bytes)


def test_more_effort_never_makes_a_layout_slower() -> None:
    graph = simulated.graph_of("vgg11", 16)
    outline = Outline.of(graph, modelled(graph, "v100"))
    pool = outline.peak(outline.smallest, outline.without(outline.worthwhile)) * 11 // 10
    found = arrange(outline, outline.worthwhile, outline.smallest, pool)
    assert found is not None
    placed = [lay_out(found, pool, effort) for effort in (0, 10**6, 10**7)]
    times = [p.ms for p in placed if p is not None]
    assert times == sorted(times, reverse=True)
    assert found.ms <= times[-1] < times[0]


def test_local_search_ends_where_no_change_of_one_tensor_gains() -> None:
    graph = simulated.graph_of("vgg11", 16)
    outline = Outline.of(graph, modelled(graph, "v100"))
    pool = outline.peak(outline.smallest, outline.without(outline.worthwhile)) * 5 // 4
    start = arrange(outline, outline.worthwhile, outline.smallest, pool)
    assert start is not None
    found = Neighbourhood(outline, pool).improve(start)
    assert found is not None
    assert found.ms < start.ms
    for m in outline.worthwhile:
        offload = [o for o in found.offload if o != m] if m in found.offload else [*found.offload, m]
        other = arrange(outline, offload, found.algorithms, pool)
        assert other is None or other.ms >= found.ms - 1e-6


def test_a_tensor_without_room_beside_an_op_crosses_whole_between_the_ops_around_it() -> None:
    """Three ops of 1 ms after a tensor of 10 bytes is made; the middle one leaves 9 bytes. A byte takes 1 ms."""
    ops = (1.0, 1.0, 1.0, 1.0)
    ways = tuple((Algorithm(ms=ms),) for ms in ops)
    tensor = Movable("x", 10, 10, 10, 0, 0, 3)
    graph = cast(Graph, SimpleNamespace(forward_ops=2))
    outline = Outline(graph, Link(1e3, 1e3, 0.0), (10, 11, 10, 10), (tensor,), ways, 0.0, 1)
    assert whole_copies_ms(outline, 11) == 4.0
    assert whole_copies_ms(outline, 10) == 1 + 10 + 1 + 10 + 1  # one byte too many: all ten leave after op 0
    both = replace(outline, movable=(tensor, Movable("y", 6, 6, 6, 0, 0, 3)))
    assert whole_copies_ms(both, 10) == 1 + 6 + 1 + 6 + 1  # then the smaller one leaves


def test_a_forced_copy_ends_before_the_first_op_that_needs_it() -> None:
    """x has no room beside op 1 and is needed by op 2, which takes long; y, needed after that, may stay."""
    tensors = (Movable("x", 10, 10, 10, 0, 0, 2), Movable("y", 6, 6, 6, 0, 0, 3))
    ways = tuple((Algorithm(ms=ms),) for ms in (1.0, 1.0, 20.0, 1.0))
    graph = cast(Graph, SimpleNamespace(forward_ops=2))
    outline = Outline(graph, Link(1e3, 1e3, 0.0), (9, 17, 9, 6), tensors, ways, 0.0, 1)
    assert whole_copies_ms(outline, 9) == 1 + 10 + 1 + 10 + 20 + 1


def test_a_copy_in_waits_for_the_copy_out_whose_bytes_it_takes() -> None:
    """Stays 0 and 1 are the first and second of tensor 0, 2 and 3 those of tensor 1; 3 begins in the place of 0."""
    nbytes, first, last = (np.array(column, np.int64) for column in ((4, 4, 4, 4), (0, 8, 1, 5), (1, 9, 2, 7)))
    low, none = np.array((0, 8, 4, 0), np.int64), np.array((-1, -1), np.int64)
    out, back = np.array((0, 2), np.int64), np.array((1, 3), np.int64)
    until, fetch = np.array((3, 4), np.int64), np.array((8, 5), np.int64)
    waits, behind = places.reused(nbytes, first, last, low, out, back, until, fetch)
    assert waits.tolist() == none.tolist()  # no op takes bytes of either
    assert behind.tolist() == [-1, 0]
    assert until.tolist() == [5, 5]


def test_a_sweep_says_where_it_shows_what_cannot_be() -> None:
    fine = {
        "best": [Point(10.0, 5, 0.0)],
        "greedy": [
            Point(11.0, 5, 0.0),
        ],
    }
    sweeps = Sweep((5,), (9.0,), (9.0,), (None,), fine)
    assert sweeps.faults() == []
    assert Sweep.from_dict(json.loads(json.dumps(sweeps.as_dict()))) == sweeps
    wrong = (
        (Point(9.5, 5, 0.0), "best 10.0"),
        (Point(8.0, 5, 0.0), "the bound"),
        (Point(12.0, 6, 0.0), "6 bytes of 5"),
    )
    for other, words in wrong:
        found = replace(sweeps, points={**fine, "tflms": [other]}).faults()
        assert any(words in fault for fault in found), found
    nothing = replace(sweeps, points={**fine, "best": [Point(None, None, 0.0)]})
    assert any("best None" in fault for fault in nothing.faults())

"""The simulator: times that can be worked out by hand, what vDNN++ gains over vDNN, and what a live pool may end in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn import nn, optim
from minidnn.errors import ArgumentError
from minidnn.graph.build import build
from minidnn.graph.graph import Graph
from minidnn.plan.mode import Request
from minidnn.plan.registry import POLICIES, parse_mode
from minidnn.profile.model import modelled
from minidnn.profile.profile import Algorithm, Link, Profile, op_key
from minidnn.profile.published import table1
from minidnn.run.choose import Options, choose
from minidnn.run.simulator import Simulation, simulate
from minidnn.schedule.actions import Launch, Offload, Prefetch, Schedule
from minidnn.schedule.lower import lower
from minidnn.schedule.timings import observe

from .simulated import graph_of, random_chain, random_profile

MODES = ("base(m)", "keep(p)", "vdnn:all(p)", "vdnn:conv(m)", "vdnn++:all(p)", "vdnn++:aconv(m)", "vdnn++:none")
SETS = ("all", "conv", "aconv", "none")


@pytest.fixture(scope="module")
def alexnet() -> tuple[Graph, Profile]:
    graph = graph_of("alexnet", 256)
    return graph, modelled(graph, "gtx1080ti")


def run(graph: Graph, mode: str, profile: Profile, options: Options = Options()) -> tuple[Schedule, Simulation]:
    schedule = choose(graph, mode, profile, options)
    return schedule, simulate(schedule, profile)


def searched(graph: Graph, mode: str, profile: Profile) -> Options:
    """A live pool of the size that the paper's search finds with every release at its soonest."""
    generous = choose(graph, mode, profile, Options(placement="live"))
    budget = generous.persistent_bytes + observe(generous, generous.fit, timings=0).searched
    return Options(placement="live", budget=budget)


# -- section V-A


def test_table_ones_times_show_the_gain_of_section_v_a() -> None:
    """Table III's network at batch 32: the published relative improvement (at another batch) is 57.5 %."""
    graph = graph_of("table3", 32)
    profile = table1(graph)
    base, vdnn, vdnnpp = (run(graph, mode, profile)[1] for mode in ("base(m)", "vdnn:conv(m)", "vdnn++:conv(m)"))
    gain = (vdnn.iteration_ms - vdnnpp.iteration_ms) / (vdnn.iteration_ms - base.iteration_ms)
    assert 0.5 < gain < 0.7
    # In forward each 1x1 convolution (19 ms) waits for its copy-out (62 ms) in vDNN and hides it in vDNN++.
    assert vdnn.stall_ms["offload"] == pytest.approx(5 * (62 - 19), rel=0.01)
    assert vdnnpp.stall_ms["offload"] < 0.1


def test_alexnets_published_time_is_near() -> None:
    """Section V-C: 377 ms for AlexNet(128), all(m), vDNN++ on a GTX 1080 Ti."""
    graph = graph_of("alexnet", 128)
    assert run(graph, "vdnn++:all(m)", modelled(graph, "gtx1080ti"))[1].iteration_ms == pytest.approx(377, rel=0.05)


@given(seed=st.integers(0, 2**32 - 1))
def test_vdnnpp_is_never_slower_than_vdnn(seed: int) -> None:
    """With vDNN's own offsets, and with the later releases that vDNN's pool leaves room for."""
    rng = random.Random(seed)
    graph = random_chain(rng)
    profile = random_profile(graph, rng)
    offload_set, order = rng.choice(SETS), rng.choice(("prefetch-first", "derivative-first"))
    vdnn, vdnnpp = (
        choose(graph, f"{family}:{offload_set}", profile, Options(order)) for family in ("vdnn", "vdnn++")
    )
    plan = next(POLICIES["vdnn++"](Request(graph, profile, parse_mode(f"vdnn++:{offload_set}"), order)))
    soonest = lower(graph, plan)
    slow, fast, same = (simulate(s, profile).iteration_ms for s in (vdnn, vdnnpp, soonest))
    assert fast <= slow + 1e-9
    if offsets(soonest) == offsets(vdnn):
        assert same <= slow + 1e-9


def offsets(schedule: Schedule) -> Mapping[str, int]:
    return {b.key: b.offset for a in schedule.actions for b in (*a.reads, *a.writes, *a.frees)}


@pytest.mark.parametrize("model", ["alexnet", "vgg16"])
def test_vdnn_and_vdnnpp_can_have_the_same_offsets(model: str) -> None:
    """So that the property above is not empty."""
    graph = graph_of(model, 8)
    profile = modelled(graph, "gtx970")
    plan = next(POLICIES["vdnn++"](Request(graph, profile, parse_mode("vdnn++:all(m)"))))
    assert offsets(lower(graph, plan)) == offsets(choose(graph, "vdnn:all(m)", profile))


# -- by hand


HAND_MS = {  # forward 10, 2, 4, 1, 1; backward 1, 1, 3, 3, 3 ms; a copy of an activation takes 6 ms
    "features.0:forward": 10, "features.2:forward": 2, "features.4:forward": 4, "fc:forward": 1, "loss:loss": 1,
    "loss:backward_data": 1, "fc:backward_data": 1, "features.4:backward_data": 3, "features.2:backward_data": 3,
    "features.0:backward_filter": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def by_hand() -> tuple[Graph, Profile]:
    features = nn.Sequential(
        nn.Conv2d(1, 1, 5, padding=2), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.ReLU(),
        nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(),
    )  # fmt: skip
    net = nn.Sequential({"features": features, "flatten": nn.Flatten(), "fc": nn.Linear(250000, 1)})
    graph = build(net, nn.CrossEntropyLoss(), (1, 1, 500, 500), optimizer=optim.SGD(0.1))
    entries = {op_key(graph, op): (Algorithm(ms=HAND_MS.get(op.name, 0)),) for op in graph.ops}
    assert set(HAND_MS) <= {op.name for op in graph.ops}
    return graph, Profile("by hand", entries, Link(1e9 / 6, 1e9 / 6, 0.0), launch_ms=0.0, action_ms=0.0)


@pytest.mark.parametrize(
    ("mode", "iteration_ms", "offload", "prefetch"),
    [
        ("base", 35, 0, 6),  # the batch comes in, then all ops
        # The batch, 6; forward 10, 6, 6, 1, 1: the second and third layer wait for copy-outs. Backward 1; then three
        # layers wait for the next one's copy-in, 6 each; 3.
        ("vdnn:conv", 52, 4 + 2, 6 + 5 + 3 + 3),
        # Forward is done at 24, its copy-outs at 28. Backward: the loss until 29, fc until 30; copy-ins end at 35, 41
        # and 47, and 3 ms follow each.
        ("vdnn++:conv", 50, 4, 6 + 5 + 3 + 3),
    ],
)
def test_iterations_that_were_worked_out_by_hand(
    by_hand: tuple[Graph, Profile], mode: str, iteration_ms: float, offload: float, prefetch: float
) -> None:
    graph, profile = by_hand
    simulation = run(graph, mode, profile)[1]
    assert simulation.iteration_ms == pytest.approx(iteration_ms, abs=0.01)
    stalls = {"offload": offload, "prefetch": prefetch, "memory": 0, "codec": 0}
    assert simulation.stall_ms == pytest.approx(stalls, abs=0.01)


def test_each_direction_has_its_rate(by_hand: tuple[Graph, Profile]) -> None:
    graph, profile = by_hand
    faster_in = replace(profile, link=Link(1e9 / 6, 1e9 / 3, 0.0))
    assert run(graph, "base", faster_in)[1].iteration_ms == pytest.approx(35 - 3, abs=0.01)
    # Forward as before, 30 with 3 less for the batch; backward 1, three copy-ins of 3, 3.
    assert run(graph, "vdnn:conv", faster_in)[1].iteration_ms == pytest.approx(27 + 1 + 9 + 3, abs=0.01)


def test_a_steady_iteration_does_not_show_what_the_host_issues_ahead(by_hand: tuple[Graph, Profile]) -> None:
    """Without host waits the host issues the next iteration while this one computes; the first one had to wait."""
    graph, profile = by_hand
    slow = replace(profile, launch_ms=0.5, action_ms=0.5)
    assert run(graph, "keep", slow)[1].iteration_ms == pytest.approx(35, abs=0.01)


def test_a_host_that_is_slow_makes_the_iteration() -> None:
    graph = graph_of("smallnet", 2)
    profile = replace(modelled(graph, "h100"), launch_ms=50.0, action_ms=50.0)
    schedule, simulation = run(graph, "vdnn:all", profile)
    assert simulation.iteration_ms == pytest.approx(50.0 * len(schedule.actions), rel=0.01)


def test_launches_and_copies_cost_the_host_more_than_other_actions() -> None:
    graph = graph_of("smallnet", 2)
    profile = replace(modelled(graph, "h100"), launch_ms=50.0, action_ms=20.0)
    schedule, simulation = run(graph, "vdnn:all", profile)
    launched = sum(isinstance(a, (Launch, Offload, Prefetch)) for a in schedule.actions)
    others = len(schedule.actions) - launched
    assert min(launched, others) > 10
    assert simulation.iteration_ms == pytest.approx(50.0 * launched + 20.0 * others, rel=0.01)


def test_a_host_that_had_to_wait_goes_on_later(by_hand: tuple[Graph, Profile]) -> None:
    graph, profile = by_hand
    slow = replace(profile, wake_ms=0.5)
    assert run(graph, "keep", slow)[1].iteration_ms == run(graph, "keep", profile)[1].iteration_ms
    # Waits that hold up the iteration: for the batch; forward for four layers and the loss, of which two wait longer
    # for their copy than for their op; backward for the loss and four layers, of which three do; for the loss's copy.
    late = run(graph, "vdnn:conv", slow)[1].iteration_ms - run(graph, "vdnn:conv", profile)[1].iteration_ms
    assert late == pytest.approx((1 + 5 + 5 + 1) * 0.5)


def test_allocations_and_frees_on_device_lanes_cost_the_host_nothing() -> None:
    graph = graph_of("smallnet", 2)
    profile = replace(modelled(graph, "h100"), launch_ms=50.0, action_ms=50.0)
    schedule, simulation = run(graph, "keep", profile)
    executed = [a for a in schedule.actions if type(a).__name__ not in ("Alloc", "Free")]
    assert len(executed) < len(schedule.actions)
    assert simulation.iteration_ms == pytest.approx(50.0 * len(executed), rel=0.01)


def test_one_copy_engine_serves_one_direction_at_a_time(by_hand: tuple[Graph, Profile]) -> None:
    graph, full = by_hand
    schedule = choose(graph, "vdnn:conv", full)
    (out, back) = (next(a for a in schedule.actions if isinstance(a, kind) and a.buffer.tensor == "features.0.y")
                   for kind in (Offload, Prefetch))  # fmt: skip
    both = replace(schedule, actions=(replace(out, lane="d2h"), replace(back, lane="h2d")))
    half = replace(full, link=Link(1e9 / 6, 1e9 / 6, 0.0, duplex=False))
    assert simulate(both, full).iteration_ms == pytest.approx(6)
    assert simulate(both, half).iteration_ms == pytest.approx(12)
    one_lane = replace(schedule, actions=(out, back))
    assert simulate(one_lane, full).iteration_ms == pytest.approx(12)


def overlap(spans: list[tuple[float, float]]) -> float:
    return sum(max(0.0, first[1] - second[0]) for first, second in pairwise(spans))


# -- what holds for all


@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
def test_every_iteration_adds_up(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng)
    profile = random_profile(graph, rng)
    schedule, simulation = run(graph, mode, profile)
    line, total = simulation.timeline, sum(simulation.stall_ms.values())
    busy = line.busy_ms("compute")
    assert busy == pytest.approx(sum(profile.algorithms(graph, op)[0].ms or 0.0 for op in graph.ops))
    assert busy + total <= simulation.iteration_ms + 1e-6
    if profile.launch_ms == 0:
        assert busy + total == pytest.approx(simulation.iteration_ms)
    assert min(s.start_ms for s in line.spans) >= 0
    assert line.end_ms <= simulation.iteration_ms + 1e-6
    assert max(nbytes for _, nbytes in line.memory) <= simulation.peak_bytes == schedule.peak_bytes
    assert line.memory[-1][1] == schedule.persistent_bytes
    assert simulation.pinned_bytes == schedule.pinned_bytes
    assert simulation.offloaded_bytes == schedule.offloaded_bytes
    for lane in line.lanes:
        assert overlap(sorted((s.start_ms, s.end_ms) for s in line.spans if s.lane == lane)) == pytest.approx(0)


@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(MODES))
def test_no_op_starts_before_its_prefetch_has_ended(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng)
    schedule, simulation = run(graph, mode, random_profile(graph, rng))
    work = [s for s in simulation.timeline.spans if not s.stall]
    started = {s.label: s.start_ms for s in work if s.lane == "compute"}
    ended = [s.end_ms for s in work if s.label.startswith("prefetch ")]
    fetched = [a for a in schedule.actions if isinstance(a, Prefetch)]
    assert len(fetched) == len(ended)
    for action, end in zip(fetched, ended, strict=True):
        readers = [a for a in schedule.actions if isinstance(a, Launch) and action.buffer in a.reads]
        assert all(started[a.label] >= end - 1e-9 for a in readers)


@pytest.mark.parametrize("mode", MODES)
def test_a_faster_link_is_never_slower(alexnet: tuple[Graph, Profile], mode: str) -> None:
    graph, profile = alexnet
    schedule = choose(graph, mode, profile)
    times = [simulate(schedule, replace(profile, link=Link(r, r))).iteration_ms for r in (1e9, 4e9, 16e9, 64e9)]
    assert times == sorted(times, reverse=True)


def test_later_releases_wait_for_memory_where_the_pool_is_tight() -> None:
    """Copies fall far behind, so that allocations wait for the releases that hold their bytes."""
    graph = graph_of("vgg16", 64)
    profile = replace(modelled(graph, "gtx1080ti"), link=Link(1e9, 1e9))
    simulation = run(graph, "vdnn++:all(m)", profile)[1]
    assert simulation.stall_ms["memory"] > 100
    waits = [s for s in simulation.timeline.spans if s.stall == "memory"]
    assert all(s.label.startswith("wait for release ") for s in waits)
    assert ends_of_releases(simulation) >= {s.end_ms for s in waits}


def ends_of_releases(simulation: Simulation) -> set[float]:
    return {s.end_ms for s in simulation.timeline.spans if s.lane.startswith("release")}


# -- live placement


def test_a_live_pool_can_end_in_a_dead_end(alexnet: tuple[Graph, Profile]) -> None:
    graph, profile = alexnet
    schedule, simulation = run(graph, "vdnn++:all(m)", profile, searched(graph, "vdnn++:all(m)", profile))
    assert simulation.iteration_ms == inf
    assert simulation.dead_end.startswith("no room for 283.6 MiB (gradient features.0.dy#0)")
    assert simulation.peak_bytes <= schedule.peak_bytes


def test_a_live_pool_with_more_memory_goes_on(alexnet: tuple[Graph, Profile]) -> None:
    graph, profile = alexnet
    planned = run(graph, "vdnn++:all(m)", profile)[1]
    live = run(graph, "vdnn++:all(m)", profile, Options(placement="live", budget=2**31))[1]
    assert not live.dead_end
    assert live.iteration_ms <= planned.iteration_ms + 1e-6
    assert planned.peak_bytes <= live.peak_bytes <= 2**31
    assert max(nbytes for _, nbytes in live.timeline.memory) <= live.peak_bytes


def test_live_vdnn_frees_before_it_allocates_and_needs_what_the_search_found(alexnet: tuple[Graph, Profile]) -> None:
    graph, profile = alexnet
    schedule, live = run(graph, "vdnn:all(m)", profile, Options(placement="live"))
    assert live.iteration_ms == pytest.approx(run(graph, "vdnn:all(m)", profile)[1].iteration_ms)
    assert live.peak_bytes == schedule.peak_bytes
    assert live.stall_ms["memory"] == 0


def test_a_live_allocation_waits_until_a_release_in_virtual_time_frees_enough() -> None:
    """VGG-16's offloaded tensors are larger than the pool, and the link is far too slow."""
    graph = graph_of("vgg16", 16)
    slow = replace(modelled(graph, "gtx1080ti"), link=Link(5e8, 5e8))
    simulation = run(graph, "vdnn++:all(m)", slow, searched(graph, "vdnn++:all(m)", slow))[1]
    waits = [s for s in simulation.timeline.spans if s.stall == "memory"]
    assert waits
    assert ends_of_releases(simulation) >= {s.end_ms for s in waits}


# -- bad input


def test_a_profile_without_a_link_is_refused(alexnet: tuple[Graph, Profile]) -> None:
    graph, profile = alexnet
    with pytest.raises(ArgumentError, match="has no link rates; use a measured profile or name a GPU"):
        run(graph, "base(m)", replace(profile, link=None))


def test_a_profile_without_times_is_refused(alexnet: tuple[Graph, Profile]) -> None:
    graph, profile = alexnet
    with pytest.raises(ArgumentError, match=r"has no time for features.0:forward with algorithm default"):
        run(graph, "base(m)", replace(profile, entries={}))


@pytest.mark.parametrize(
    "changes", [{"link": Link(1e-308, 1e-308, 0.0, True)}, {"launch_ms": 1e308}, {"action_ms": 1e308}]
)
def test_times_beyond_all_numbers_are_refused(alexnet: tuple[Graph, Profile], changes: dict[str, object]) -> None:
    graph, profile = alexnet
    schedule = choose(graph, "vdnn:all(p)", profile)
    with pytest.raises(ArgumentError, match="has times of no real machine; use one that was measured"):
        simulate(schedule, replace(profile, **changes))  # type: ignore[arg-type]

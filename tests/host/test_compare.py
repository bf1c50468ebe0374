"""Modes side by side on the host: digests, refusals, measured timelines, the choice of `dyn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minidnn import nn, optim
from minidnn.cli.compare import Batches
from minidnn.data import from_arrays
from minidnn.device.base import Device, Region
from minidnn.device.host import HostDevice
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, BudgetError, ScheduleError
from minidnn.graph.build import build
from minidnn.models import create
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan, stages_by_op
from minidnn.plan.registry import POLICIES, parse_mode
from minidnn.profile.model import modelled
from minidnn.profile.profile import Link, Profile, op_key
from minidnn.run import compare
from minidnn.run.bound import in_core_peak, iteration_bound
from minidnn.run.choose import Options, candidates, choose
from minidnn.run.compare import Experiment, measure, mismatches, unverified
from minidnn.run.footprint import driver_rounded, footprint
from minidnn.run.record import Recorder
from minidnn.run.simulator import simulate
from minidnn.run.timing import Timer
from minidnn.run.trainer import Trainer
from minidnn.schedule.actions import Launch, Offload, Prefetch, Schedule

MiB = 2**20


def experiment(steps: int = 2) -> Experiment:
    draw = np.random.default_rng(1)
    batches = [
        (draw.standard_normal((8, 1, 8, 8), dtype=np.float32), draw.integers(0, 10, 8)) for _ in range(steps)
    ]
    return Experiment(partial(create, "smallvgg"), nn.CrossEntropyLoss(), optim.SGD(0.05, momentum=0.9), batches)


def test_all_modes_have_one_digest_and_finite_times() -> None:
    results = list(measure(experiment(), ("base(p)", "vdnn:all(m)", "vdnn++:dyn"), HostDevice, Options()))
    assert len({r.more["gradient_sha256"] for r in results}) == 1
    assert not mismatches(results)
    assert all(r.iteration_ms is not None and r.iteration_ms > 0 for r in results)


def test_a_mode_with_other_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_reference", lambda *_: "another digest")
    results = list(measure(experiment(1), ("keep(m)",), HostDevice, Options(), timed_steps=1))
    assert mismatches(results) == ["keep(m)"]


def test_other_data_give_another_digest() -> None:
    one, two = (next(measure(experiment(n), ("base(m)",), HostDevice, Options(), 1)) for n in (1, 2))
    assert one.more["gradient_sha256"] != two.more["gradient_sha256"]


def test_all_memory_returns_after_a_comparison() -> None:
    devices: list[HostDevice] = []

    def opener() -> HostDevice:
        devices.append(HostDevice())
        return devices[-1]

    list(measure(experiment(1), ("base(m)", "vdnn++:all(p)", "vdnn:dyn"), opener, Options(), 1))
    assert devices
    assert all((d.memory_info().used, d.memory_info().pinned) == (0, 0) for d in devices)


def test_a_measured_timeline_has_every_launch_and_copy_once_and_peaks_where_planned() -> None:
    test = experiment(1)
    x, y = test.batches[0]
    with HostDevice() as device, Trainer(
        test.network(), test.loss, test.optimizer, 8, memory="vdnn++:all(m)", device=device
    ) as trainer:  # fmt: skip
        executor = trainer.executor(8)
        before = list(executor.steps)
        recorder = Recorder(executor)
        recorder.begin()
        trainer.step(x, y)
        timeline = recorder.end()
        assert executor.steps == before, "recording leaves the executor as it was"
    work = [a.label for a in executor.schedule.actions if isinstance(a, (Launch, Offload, Prefetch))]
    assert sorted(s.label for s in timeline.spans if not s.stall) == sorted(work)
    assert {s.lane for s in timeline.spans} >= {"compute", "memory"}
    assert max(nbytes for _, nbytes in timeline.memory) <= executor.schedule.peak_bytes
    assert timeline.memory[-1][1] == executor.schedule.persistent_bytes


@pytest.mark.parametrize("mode", ["base", "keep", "vdnn:all(m)", "vdnn:aconv", "vdnn++:all(m)", "vdnn++:conv"])
@pytest.mark.parametrize("interleaving", ["eager", "lazy", "random"])
def test_simulator_and_emulator_agree_on_offsets_peak_and_order(mode: str, interleaving: str) -> None:
    """One schedule serves both: the same bytes, and on every lane the same work in the same order."""
    test = experiment(1)
    x, y = test.batches[0]
    with HostDevice(interleaving, 7) as device, Trainer(
        test.network(), test.loss, test.optimizer, 8, memory=mode, device=device
    ) as trainer:  # fmt: skip
        recorder = Recorder(trainer.executor(8))
        recorder.begin()
        trainer.step(x, y)
        measured, schedule = recorder.end(), trainer.schedule
        assert trainer.peak_bytes >= schedule.peak_bytes
    graph, plan = schedule.graph, schedule.plan
    times = {op_key(graph, op): (replace(plan.algorithm(op), ms=1.0),) for op in graph.ops}
    simulated = simulate(schedule, Profile("one ms each", times, Link(1e9, 1e9)))
    assert simulated.peak_bytes == schedule.peak_bytes
    assert simulated.pinned_bytes == schedule.pinned_bytes
    for lane in ("compute", "memory", "d2h", "h2d"):
        orders = [
            [s.label for s in sorted(line.spans, key=lambda s: s.start_ms) if s.lane == lane and not s.stall]
            for line in (measured, simulated.timeline)
        ]
        assert orders[0] == orders[1], lane


def test_recording_changes_no_bit() -> None:
    test = experiment(1)
    x, y = test.batches[0]
    found = []
    for record in (False, True):
        with HostDevice() as device, Trainer(
            test.network(), test.loss, test.optimizer, 8, memory="vdnn:all(m)", device=device, seed=3
        ) as trainer:  # fmt: skip
            recorder = Recorder(trainer.executor(8))
            if record:
                recorder.begin()
            trainer.step(x, y)
            if record:
                recorder.end()
            found.append(trainer.state_dict())
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_dyn_takes_the_candidate_with_the_best_score() -> None:
    net = create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    profile = HostDevice().profile(graph)
    chosen = choose(graph, "vdnn++:dyn", profile, score=lambda s: -s.offloaded_bytes)
    assert chosen.plan.offload
    assert chosen.offloaded_bytes == max(
        s.offloaded_bytes for s in candidates(graph, parse_mode("vdnn++:dyn"), profile, Options())
    )


def test_timing_a_schedule_gives_all_memory_back() -> None:
    net = create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    with HostDevice() as device:
        found = {m: choose(graph, m, device.profile(graph)) for m in ("base", "vdnn++:all(m)", "vdnn++:conv(m)")}
        taken: list[int] = []
        pinned = device.pinned

        def take(nbytes: int) -> Region:
            taken.append(nbytes)
            return pinned(nbytes)

        with patch.object(device, "pinned", take), Timer(device, device.profile(graph)) as ms:
            times = {mode: ms(schedule) for mode, schedule in found.items()}
            assert min(times.values()) > 0
            assert ms(found["base"]) == times["base"], "the same work is timed once"
        slots, slabs = taken[0], [nbytes for nbytes in taken if nbytes != taken[0]]
        assert taken.count(slots) == 3
        assert slabs == [found["vdnn++:all(m)"].pinned_bytes], "a slab that is large enough serves again"
        assert (device.memory_info().used, device.memory_info().pinned) == (0, 0)


@pytest.mark.parametrize(("slow_ms", "iterations"), [(1e9, 4), (0.0, 2)])
def test_slow_schedules_are_timed_once(monkeypatch: pytest.MonkeyPatch, slow_ms: float, iterations: int) -> None:
    graph = build(create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    runs = []
    monkeypatch.setattr("minidnn.run.timing.SLOW_MS", slow_ms)
    monkeypatch.setattr("minidnn.run.executor.Executor.run", lambda *arguments: runs.append(arguments))
    with HostDevice() as device, Timer(device, device.profile(graph)) as ms:
        ms(choose(graph, "base(m)", device.profile(graph)))
    assert len(runs) == iterations


def test_what_has_no_room_is_infinitely_slow() -> None:
    graph = build(create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    with HostDevice(memory=1000) as device, Timer(device, device.profile(graph)) as ms:
        assert ms(choose(graph, "vdnn++:all(m)", device.profile(graph))) == inf
        assert device.memory_info().pinned > 0
    assert device.memory_info().pinned == 0


def test_what_is_clearly_slower_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dyn's ten candidates the card runs one where copies take so long that the order is plain."""
    net = create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    timed: list[Schedule] = []

    def time(device: Device, schedule: Schedule, slab: Region | None) -> float:
        timed.append(schedule)
        return simulate(schedule, profile).iteration_ms * 1.04

    monkeypatch.setattr("minidnn.run.timing.time_schedule", time)
    fast = modelled(graph, "v100")
    for link, expected in ((Link(1e6, 1e6), 1), (Link(1e15, 1e15), 4)):
        profile = replace(fast, link=link)
        with HostDevice() as device, Timer(device, profile) as ms:
            chosen = choose(graph, "vdnn++:dyn", profile, Options(), score=ms)
        assert not chosen.plan.offload or link.d2h == 1e15
        assert len(timed) == expected, "nothing offloaded; and the three sets, where copies take no time"
        timed.clear()


# -- bounds and footprints


def test_no_simulated_mode_beats_the_lower_bound() -> None:
    net = create("alexnet")
    graph = build(net, nn.CrossEntropyLoss(), (128, 3, 227, 227), optimizer=optim.SGD(0.1))
    profile = modelled(graph, "gtx1080ti")
    for budget in (None, 700 * MiB, 900 * MiB, 1200 * MiB):
        bound = iteration_bound(graph, profile, budget)
        for mode in ("base(p)", "keep(p)", "vdnn:all(p)", "vdnn++:conv(p)", "vdnn++:all(m)", "vdnn++:dyn"):
            for schedule in candidates(graph, parse_mode(mode), profile, Options(budget=budget)):
                if budget is None or schedule.peak_bytes <= budget:
                    assert simulate(schedule, profile).iteration_ms >= bound.ms(1) - 1e-9


def test_the_bound_counts_the_bytes_that_cannot_stay() -> None:
    net = create("alexnet")
    graph = build(net, nn.CrossEntropyLoss(), (128, 3, 227, 227), optimizer=optim.SGD(0.1))
    profile = modelled(graph, "gtx1080ti")
    assert profile.link is not None
    peak = in_core_peak(graph, profile)
    assert iteration_bound(graph, profile, peak).prefetch_ms == 0
    bound = iteration_bound(graph, profile, peak - 500 * MiB)
    assert bound.prefetch_ms == pytest.approx(500 * MiB / profile.link.h2d * 1e3)
    inputs = graph.tensors["input"].nbytes
    assert bound.offload_ms == pytest.approx((500 * MiB - inputs) / profile.link.d2h * 1e3)
    assert bound.ms(1) >= bound.ms(2) >= bound.compute_ms


def test_driver_rounding() -> None:
    assert driver_rounded([3 * MiB, 1000, 2000]) == 6 * MiB
    assert driver_rounded([]) == 0


def test_base_counts_gradients_with_the_parameters() -> None:
    net = create("alexnet")
    graph = build(net, nn.CrossEntropyLoss(), (2, 3, 227, 227), optimizer=optim.SGD(0.1))
    base, _ = footprint(graph, "base(m)", Profile("none"))
    vdnn, _ = footprint(graph, "vdnn:all(m)", Profile("none"))
    assert base.parameter_bytes > 1.9 * vdnn.parameter_bytes


def test_every_policy_of_the_registry_yields_a_plan() -> None:
    net = create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    profile = modelled(graph, "h100")
    for family in POLICIES:
        assert list(candidates(graph, parse_mode(family), profile, Options())), family


def _proposing(**changes: Any) -> Callable[[Request], Iterator[Plan]]:
    def policy(request: Request) -> Iterator[Plan]:
        yield replace(Plan("odd", stages_by_op(request.graph)), **changes)

    return policy


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (lambda request: iter(()), "returned <tuple_iterator"),
        (lambda request: [Plan("odd", ())], r"returned \[Plan"),
        (lambda request: (plan for plan in list[Plan]()), "proposed no plan for odd; it must yield one"),
        (lambda request: (x for x in (3,)), "proposed 3; it must be a Plan"),
        (lambda request: (Plan("odd", (), offload=(n,)) for n in ("no.such",)), "offloads 'no.such', which is no ten"),
        (lambda request: (Plan("odd", (), prefetch={0: (n,)}) for n in ("x",)), "offloads 'x', which is no tensor"),
        (_proposing(stages=()), "proposed stages up to op 0; they must end at op"),
        (_proposing(stages=((0, 2), (3, 4))), r"proposed the stage \(3, 4\) behind op 2; it must begin there"),
        (_proposing(stages=[(0, 2)]), r"proposed stages \[\(0, 2\)\]; it must be a tuple"),
        (_proposing(prefetch=[]), r"proposed prefetch \[\]; it must be a Mapping"),
        (_proposing(prefetch={0: ("features.0.y",)}), "prefetches features.0.y at op 0; it must be where a stage"),
        (_proposing(algorithms={"op": "gemm"}), "proposed 'gemm' for 'op'; it must be an Algorithm"),
        (_proposing(prefetch={-1: ("features.0.y",)}), "prefetches features.0.y at op -1; it must be where a stage"),
        (_proposing(prefetch={5: None}), "proposed a plan with TypeError.* in it; it must have ops' numbers"),
        (_proposing(offload=([1],)), "proposed a plan with TypeError.* in it; it must have ops' numbers"),
        (lambda request: (1 // n for n in (0,)), r"failed with ZeroDivisionError.*; mend the policy"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, policy: Any, sentence: str
) -> None:
    monkeypatch.setitem(POLICIES, "odd", policy)
    graph = build(create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    with pytest.raises(ScheduleError, match=f"policy odd {sentence}"):
        choose(graph, "odd", modelled(graph, "h100"), Options())


def test_an_op_that_the_device_does_not_know_is_named() -> None:
    graph = build(create("smallvgg"), nn.CrossEntropyLoss(), (8, 1, 8, 8), optimizer=optim.SGD(0.1))
    op = replace(graph.ops[0], function="no_such")
    with HostDevice() as device, pytest.raises(ArgumentError, match=r"calls 'no_such'; add it to .*numpy_ops\.OPS"):
        device.launcher(graph, op, "default", {}, None, device.arena(512), device.stream("compute"))


def test_automatic_means_the_host_where_cuda_does_not_know_the_precision() -> None:
    with open_device("auto", precision="fp64") as device:
        assert device.kind == "host"


def test_comparing_over_many_steps_takes_no_memory_for_them() -> None:
    data = from_arrays("set", (np.arange(5.0).reshape(5, 1, 1, 1), np.zeros(5, int)), test_samples=0)
    batches = Batches(data, 3, 10**9)
    assert len(batches) == 10**9
    x, _ = batches[10**9 - 1]
    assert x.ravel().tolist() == [(3 * (10**9 - 1) + row) % 5 for row in range(3)]
    assert sum(len(y) for _, y in Batches(data, 3, 4)) == 12


def test_a_mode_that_does_not_fit_the_device_is_a_row_and_others_go_on() -> None:
    peak = {mode: next(measure(experiment(1), (mode,), HostDevice, Options(), 1)).peak_bytes
            for mode in ("base(m)", "vdnn:all(m)")}
    room = (peak["base(m)"] + peak["vdnn:all(m)"]) // 2
    small = partial(HostDevice, memory=room)
    for budget in (None, room):
        base, vdnn, again = measure(
            experiment(1), ("base(m)", "vdnn:all(m)", "vdnn++:all(m)"), small, Options(budget=budget), timed_steps=1
        )
        assert (base.fits, base.peak_bytes) == (False, peak["base(m)"])
        assert base.reason
        assert vdnn.fits
        assert again.fits
        assert unverified([base, vdnn, again]) == ["vdnn:all(m)", "vdnn++:all(m)"]  # base has no room to compare with
        assert not mismatches([base, vdnn, again])


@pytest.mark.parametrize("mode", ["vdnn:all(g)", "vdnn++:conv(g)", "vdnn:dyn"])
def test_what_a_mode_needs_is_that_of_the_budget_it_is_asked_with(mode: str) -> None:
    graph = build(
        create("alexnet"), nn.CrossEntropyLoss(), (64, 3, 227, 227), optimizer=optim.SGD(0.1)
    )
    profile = modelled(graph, "gtx970")
    rich = choose(graph, mode, profile)
    budget = choose(graph, mode, profile, Options(budget=rich.peak_bytes - MiB)).peak_bytes
    found, schedule = footprint(graph, mode, profile, budget=budget)
    assert schedule.peak_bytes <= budget < rich.peak_bytes
    assert found.placed_bytes == schedule.pool_bytes
    with pytest.raises(BudgetError):
        footprint(graph, mode, profile, budget=MiB)

"""Planned schedules on the host emulator: the smallest budget trains, with base's bits, as simulated."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.host import HostDevice
from minidnn.device.host_profile import host_profile
from minidnn.errors import BudgetError
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.memory.fit import FITS
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.profile.nominal import with_times
from minidnn.run.choose import Options, choose, smallest
from minidnn.run.record import Recorder
from minidnn.run.simulator import simulate
from minidnn.run.timeline import Timeline
from minidnn.schedule.actions import COMPUTE, D2H, H2D

from .runs import ROWS, Case, batches, reference, run
from .test_random_networks import train


@pytest.mark.parametrize("policy", sorted(PLANNERS))
@pytest.mark.parametrize(("budget", "interleaving"), [("smallest", "lazy"), ("half as much again", "random")])
def test_planners_compute_what_base_computes(policy: str, budget: str, interleaving: str) -> None:
    for target, update in (("paper", "each"), ("native", "micro"), ("paper", "clipped")):
        case = Case(memory=policy, budget=budget, interleaving=interleaving, target=target, update=update, seed=5)
        assert run(case) == reference(update), case


def test_a_budget_one_byte_below_the_minimum_is_refused_with_it() -> None:
    case = Case(memory="best")
    needed = case.needed()
    with HostDevice() as device, pytest.raises(BudgetError, match=f"needs at least {needed} bytes") as refusal:
        case.trainer(device, needed - 1)
    assert refusal.value.needed == needed
    with HostDevice(memory=needed) as device, case.trainer(device, needed) as trainer:
        trainer.step(*batches()[0])
        assert device.memory_info().used == trainer.peak_bytes == needed


def orders(line: Timeline) -> dict[str, list[str]]:
    """What each lane does, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for span in sorted(line.spans, key=lambda s: s.start_ms):
        if span.lane in (COMPUTE, D2H, H2D) and not span.stall:
            found[span.lane].append(span.label)
    return dict(found)


def deep() -> nn.Sequential:
    """Backward needs more than twice what inference needs."""
    layers = [layer for _ in range(7) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(880, 4), input_shape=(2, 11, 10)
    )


@pytest.mark.parametrize("policy", ["best", "greedy", "dynprog", "vdnn-threshold"])
def test_a_budget_with_room_to_spare_is_not_taken_whole(policy: str) -> None:
    sizes: list[int] = []
    for memory in ("base", policy, policy):
        budget = (None, 2**30, *sizes[:1])[len(sizes)]  # none, a plenty, and base's own
        with HostDevice() as device, Trainer(
            deep(), nn.CrossEntropyLoss(), optim.SGD(0.1), max(ROWS), memory=memory, budget=budget, device=device
        ) as trainer:  # fmt: skip
            sizes.append(trainer.peak_bytes)
    assert sizes[1] == sizes[2] < sizes[0]


def test_waits_of_the_compute_lane_itself_are_stalls() -> None:
    """A planner's schedule has no host waits. Under `lazy` copies run only when something waits for them."""
    with HostDevice() as device, pytest.raises(BudgetError) as refusal:
        Trainer(deep(), nn.CrossEntropyLoss(), optim.SGD(0.1), max(ROWS), memory="greedy", budget=1, device=device)
    with HostDevice("lazy") as device, Trainer(
        deep(), nn.CrossEntropyLoss(), optim.SGD(0.1), max(ROWS), memory="greedy", budget=refusal.value.needed,
        device=device,
    ) as trainer:  # fmt: skip
        x, y = batches()[0]
        recorder = Recorder(trainer.executor(len(x)))
        recorder.begin()
        trainer.step(x, y)
        measured = recorder.end()
        waits = [label for label, cause, _, _ in measured.stalls() if cause == "prefetch"]
        assert {f"wait for prefetch {name}" for name in trainer.schedule.plan.offload} <= set(waits)
        assert all(s.lane == "compute" for s in measured.spans if s.stall)


@pytest.mark.parametrize("policy", ["best", "greedy", "dynprog"])
def test_simulated_and_emulated_agree(policy: str) -> None:
    def trainer_of(device: HostDevice, budget: int) -> Trainer:
        loss, optimizer = nn.CrossEntropyLoss(), optim.SGD(0.1)
        return Trainer(deep(), loss, optimizer, max(ROWS), memory=policy, budget=budget, device=device)

    with HostDevice() as device, pytest.raises(BudgetError) as refusal:
        trainer_of(device, 1)
    assert refusal.value.needed is not None
    with HostDevice() as device, trainer_of(device, refusal.value.needed) as trainer:
        x, y = batches()[0]
        trainer.step(x, y)
        recorder = Recorder(trainer.executor(len(x)))
        recorder.begin()
        trainer.step(x, y)
        measured, schedule = recorder.end(), trainer.schedule
        predicted = simulate(schedule, with_times(schedule.graph, device.profile(schedule.graph)))
        assert len(schedule.plan.offload) > 3
        assert orders(measured) == orders(predicted.timeline)
        assert trainer.peak_bytes == predicted.peak_bytes == device.memory_info().used
        assert trainer.pinned_bytes == predicted.pinned_bytes > 0


@pytest.mark.parametrize("interleaving", ["eager", "lazy", "random"])
def test_iterations_that_wait_in_different_ways_meet_at_the_host(interleaving: str) -> None:
    """Each program of a trainer is planned for itself. With this fit some wait on the host and some do not, and no
    barrier of the one knows the lanes of the other."""
    net = nn.Sequential(
        nn.AdaptiveAvgPool2d((2, 2)), nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 5, padding=2, groups=2), nn.ReLU(),
        nn.Conv2d(4, 6, 1), nn.Conv2d(6, 5, 5, padding=2, bias=False), nn.ReLU(), nn.Conv2d(5, 6, 5, padding=2),
        nn.Flatten(), nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 13), nn.ReLU(), nn.Linear(13, 3),
        input_shape=(1, 12, 6),
    ).initialize(0)  # fmt: skip
    start, rng = net.state_dict(), np.random.default_rng(0)
    data = [(rng.standard_normal((5, 1, 12, 6)).astype(np.float32), rng.integers(0, 3, 5)) for _ in range(2)]

    def trainer(device: HostDevice, **memory: Any) -> Trainer:
        optimizer = optim.SGD(0.1, momentum=0.9)
        return Trainer(
            net, nn.CrossEntropyLoss(), optimizer, 5, device=device, target="native", micro_batch=2, **memory
        )

    planned: dict[str, Any] = {"memory": "best", "fit": "worst-fit", "order": "derivative-first", "compress": "all"}
    with HostDevice() as device:
        with trainer(device) as opened:
            wanted = train(opened, start, data)
        with pytest.raises(BudgetError) as refused:
            trainer(device, budget=1, **planned)
    with HostDevice(interleaving) as device, trainer(device, budget=refused.value.needed, **planned) as opened:
        syncs = {schedule.plan.sync for (purpose, _), schedule in opened.programs.schedules.items() if purpose.train}
        assert syncs == {"none", "compute"}
        assert train(opened, start, data) == wanted


def test_late_releases_that_a_fit_cannot_serve_are_left_out() -> None:
    net = nn.Sequential(
        nn.LocalResponseNorm(3), nn.LocalResponseNorm(3), nn.ReLU(), nn.ReLU(), nn.Conv2d(1, 1, 3, padding=1),
        nn.Conv2d(1, 3, 5, padding=2), nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.LeakyReLU(), nn.BatchNorm2d(6),
        nn.Flatten(), nn.Linear(396, 7), nn.Linear(7, 3), input_shape=(1, 6, 11),
    )  # fmt: skip
    for target in ("paper", "native"):
        graph = build(net, nn.CrossEntropyLoss(), (2, 1, 6, 11), Target(target), optimizer=optim.SGD(0.1))
        profile = host_profile(graph)
        for mode in ("vdnn++:conv(m)", "vdnn++:all(m)", "vdnn++:conv(g)"):
            for fit in FITS:
                least = smallest(graph, parse_mode(mode), profile, Options(fit=fit)).peak_bytes
                for budget in (None, least):
                    found = choose(graph, mode, profile, Options(fit=fit, budget=budget))
                    assert budget is None or found.peak_bytes <= budget

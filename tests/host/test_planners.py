"""Planned schedules on the host emulator: the smallest budget trains, with base's bits, as simulated."""

from __future__ import annotations

from collections import defaultdict

import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.host import HostDevice
from minidnn.errors import BudgetError
from minidnn.plan.registry import PLANNERS
from minidnn.profile.nominal import with_times
from minidnn.run.record import Recorder
from minidnn.run.simulator import simulate
from minidnn.run.timeline import Timeline
from minidnn.schedule.actions import COMPUTE, D2H, H2D

from .runs import ROWS, Case, batches, reference, run


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

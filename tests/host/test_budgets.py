"""A budget that is accepted is kept; one that cannot be is refused before step 1, with the smallest that works."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import pytest

from minidnn import nn, optim
from minidnn.data import from_arrays
from minidnn.device.host import HostDevice
from minidnn.device.lanes import INTERLEAVINGS
from minidnn.errors import BudgetError, OutOfDeviceMemory
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.memory.fit import FITS
from minidnn.memory.pinned import HostLimit
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.run.choose import Options, choose, smallest
from tests.host.runs import Case, batches, reference, run

ONE_OF_EACH = [
    "base", "base(m)", "keep", "keep(g)", "vdnn:all(p)", "vdnn:conv(g)", "vdnn:aconv(m)", "vdnn", "vdnn++:all(p)",
    "vdnn++:conv(m)", "vdnn++:none(g)", "vdnn++", *sorted(PLANNERS),
]  # fmt: skip


@pytest.mark.parametrize(("target", "update"), [("paper", "each"), ("native", "micro")])
@pytest.mark.parametrize("memory", ONE_OF_EACH)
def test_one_rounding_less_is_refused_with_the_figure_that_works(memory: str, target: str, update: str) -> None:
    case = Case(memory, target=target, update=update)
    needed = case.needed()
    with HostDevice() as device:
        for budget in (needed - 1, needed // 2):
            with pytest.raises(BudgetError) as refused:
                case.trainer(device, budget)
            assert refused.value.needed == needed
            assert f"memory mode {memory} " in str(refused.value)
            assert f"needs at least {needed} bytes" in str(refused.value)
            assert f"the budget is {budget} bytes" in str(refused.value)
        assert device.memory_info().used == 0
        with case.trainer(device, needed) as trainer:
            assert trainer.peak_bytes <= needed


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
@pytest.mark.parametrize("memory", ONE_OF_EACH)
def test_at_exactly_that_figure_it_runs_under_every_interleaving(memory: str, interleaving: str) -> None:
    assert run(Case(memory, interleaving=interleaving, budget="smallest")) == reference("each")


def test_the_modes_that_a_refusal_names_do_fit_and_no_other_does() -> None:
    figures = {mode: Case(mode).needed() for mode in ("base", "keep", "vdnn++:conv", "vdnn++:all", "base(m)", "keep(m)",
                                                      "vdnn++:conv(m)", "vdnn++:all(m)")}  # fmt: skip
    for budget in sorted({nbytes + extra for nbytes in figures.values() for extra in (-1, 0)}):
        with HostDevice() as device:
            if budget >= figures["base"]:
                Case("base").trainer(device, budget).close()
                continue
            with pytest.raises(BudgetError) as refused:
                Case("base").trainer(device, budget)
        fitting = [mode for mode, nbytes in figures.items() if nbytes <= budget]
        found = re.search(r"modes that fit: (.*)$", str(refused.value))
        assert (found[1].split(", ") if found else []) == fitting


def test_where_no_mode_of_the_papers_fits_a_refusal_says_which_needs_the_least_and_that_best_may() -> None:
    least = Case("vdnn++:all(m)").needed()
    endings = {
        "base": f"; base, keep and vdnn++ do not fit, vdnn++:all(m) needs the least of them, {least} bytes",
        "vdnn++:all(m)": "; base, keep and vdnn++ do not fit either; best may, it plans for the budget",
        "best": "; base, keep and vdnn++ do not fit either",
    }
    for memory, ending in endings.items():
        with HostDevice() as device, pytest.raises(BudgetError) as refused:
            Case(memory).trainer(device, 1024)
        assert ending in str(refused.value)
        assert str(refused.value).endswith("; best may, it plans for the budget") == (memory != "best")


def test_a_larger_budget_never_takes_more_than_it_gives() -> None:
    for memory in ONE_OF_EACH:
        needed = Case(memory).needed()
        for budget in (needed + 1, needed * 5 // 4, needed * 3):
            with HostDevice(memory=budget) as device, Case(memory).trainer(device, budget) as trainer:
                assert trainer.peak_bytes <= budget


DILATED = nn.Sequential(
    nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 7, 3, stride=2, padding=2, dilation=2),
    nn.BatchNorm2d(7), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(7, 4, 1), nn.LeakyReLU(), nn.AvgPool2d(2, ceil_mode=True),
    nn.Flatten(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3), input_shape=(2, 13, 11),
)  # fmt: skip
NORMALIZED = nn.Sequential(
    nn.BatchNorm2d(1), nn.Conv2d(1, 3, (1, 5)), nn.LocalResponseNorm(3), nn.Tanh(), nn.MaxPool2d(3, 2, 1), nn.Sigmoid(),
    nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(6, 4), input_shape=(1, 7, 9),
)  # fmt: skip


@pytest.mark.parametrize("fit", [None, *FITS])
@pytest.mark.parametrize(
    ("net", "rows", "memory"),
    [
        (DILATED, 3, "vdnn++:all(g)"), (DILATED, 3, "vdnn++:dyn(m)"), (NORMALIZED, 2, "greedy"),
        (NORMALIZED, 2, "best"), (NORMALIZED, 2, "vdnn-threshold"),
    ],
)  # fmt: skip
def test_no_budget_below_the_figure_is_served_by_any_fit(
    net: nn.Sequential, rows: int, memory: str, fit: str | None
) -> None:
    sgd, target = optim.SGD(0.05, momentum=0.9), Target("native")
    assert net.input_shape is not None
    graph = build(net, nn.CrossEntropyLoss(), (rows, *net.input_shape), target, optimizer=sgd)
    with HostDevice() as device:
        profile = device.profile(graph)
    options = Options("derivative-first" if net is DILATED else "prefetch-first", fit)
    try:
        needed = smallest(graph, parse_mode(memory), profile, options).peak_bytes
    except BudgetError as error:
        assert error.needed is None  # noqa: PT017 - this fit serves no size of pool
        return
    for budget in range(needed - 8192, needed, 512):
        with pytest.raises(BudgetError):
            choose(graph, memory, profile, replace(options, budget=budget))
    assert choose(graph, memory, profile, replace(options, budget=needed)).peak_bytes <= needed


def test_without_a_budget_the_device_s_memory_is_the_limit() -> None:
    needed = Case("keep").needed()
    with HostDevice(memory=needed - 1) as device:
        with pytest.raises(OutOfDeviceMemory, match=r"the arena needs .* device host has"):
            Case("keep").trainer(device)
        assert device.memory_info().pinned == 0


def test_what_others_use_of_the_machine_s_memory_cannot_be_had() -> None:
    limit = HostLimit("the machine's available memory", 2**40, Case("keep").needed() - 1)
    with HostDevice() as device, patch("minidnn.device.host.host_limits", lambda: [limit]):
        with pytest.raises(OutOfDeviceMemory, match=r"the arena needs .* device host has"):
            Case("keep").trainer(device)
        assert device.memory_info().pinned == 0


@pytest.mark.parametrize("memory", ["vdnn", "vdnn++"])
def test_dyn_drops_the_candidates_that_the_device_has_no_room_for(memory: str) -> None:
    needed = Case(memory).needed()
    with HostDevice(memory=needed) as device, Case(memory).trainer(device) as trainer:
        assert trainer.peak_bytes <= needed
        assert trainer.schedule.plan.offload
        trainer.step(*batches()[0])


def test_a_partial_batch_and_the_parts_of_a_batch_are_planned_before_the_first_step() -> None:
    x, y = batches()[0]
    dataset = from_arrays("noise", (x[:5].repeat(3, axis=0), y[:5].repeat(3)), classes=4, test_samples=4)
    with HostDevice() as device, replace(Case("vdnn++:all(m)"), update="micro").trainer(device) as trainer:
        programs = len(trainer.programs.executors)
        trainer.step(x, y)  # 6 rows in parts of 4 and 2
        assert len(trainer.programs.executors) == programs
        planned: list[int] = []
        trainer.fit(dataset, 1, on_epoch=lambda *_: planned.append(len(trainer.programs.executors)))
        assert len(trainer.programs.executors) == planned[0]
        assert trainer.step_count == 3

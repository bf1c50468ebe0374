"""Whole training runs over a card whose streams run by themselves: every memory mode, its times, its memory."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bench import modes
from bench.modes import Spec
from minidnn import Trainer, models, nn, optim
from minidnn.cli import main
from minidnn.device.host import HostDevice
from minidnn.errors import BudgetError, OutOfPinnedMemory
from minidnn.plan.registry import PLANNERS
from minidnn.run.choose import Options
from minidnn.run.compare import Experiment, measure
from minidnn.schedule.actions import Record
from tests.cuda.running import running_card

LATE = 0.002


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((8, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 8)) for _ in range(steps)]


def experiment(precision: str, steps: int = 3) -> Experiment:
    net = partial(models.smallvgg, width=4)
    return Experiment(net, nn.CrossEntropyLoss(), optim.SGD(0.05, momentum=0.9), batches(steps), precision)


MODES = (
    "base", "base(m)", "keep", "vdnn:all", "vdnn:conv(m)", "vdnn:aconv", "vdnn++:all", "vdnn++:conv(m)", "vdnn++:dyn",
)  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "options", "tried"),
    [
        ("fp32", {}, MODES), ("bf16", {}, MODES),
        ("fp32", {"compress": "all"}, ("vdnn:all", "vdnn++:all", "vdnn++:conv(m)")),
        ("bf16", {"placement": "live"}, ("vdnn:all", "vdnn++:all(m)")),
    ],
    ids=["fp32", "bf16", "compressed", "live"],
)  # fmt: skip
def test_every_mode_computes_the_gradients_of_base(
    precision: str, options: dict[str, Any], tried: tuple[str, ...]
) -> None:
    with running_card(LATE, precision=precision, deterministic=True) as (device, _):
        with patch.object(type(device), "close", lambda self: None):
            results = list(measure(experiment(precision), tried, lambda: device, Options(**options), timed_steps=2))
        assert device.memory_info().used == device.memory_info().pinned == 0
    assert [r.mode for r in results if r.fits] == list(tried)
    assert [r.mode for r in results if not r.more["matches_base"]] == []
    assert all(r.iteration_ms is not None and r.iteration_ms > 0 for r in results)
    stalls = {r.mode: r.stall_ms for r in results}
    assert stalls["vdnn:all"] is not None
    assert stalls["vdnn:all"]["offload"] + stalls["vdnn:all"]["prefetch"] > 0


@pytest.mark.parametrize("policy", sorted(PLANNERS))
def test_planners_compute_the_gradients_of_base_at_their_smallest_budget(policy: str) -> None:
    with running_card(LATE, deterministic=True) as (device, _), patch.object(type(device), "close", lambda self: None):
        (refused,) = measure(experiment("fp32"), (policy,), lambda: device, Options(budget=1))
        assert not refused.fits
        options = Options(budget=refused.peak_bytes)
        (found,) = measure(experiment("fp32"), (policy,), lambda: device, options, timed_steps=1)
        assert found.more["matches_base"]
        assert found.peak_bytes <= refused.peak_bytes


def test_many_late_steps_leave_memory_and_threads_as_they_were() -> None:
    with running_card(0.0005, seed=3) as (device, runtime):
        net = models.smallvgg(width=4)
        with Trainer(
            net, nn.CrossEntropyLoss(), optim.SGD(0.01), 8, memory="vdnn++:all", device=device, target="native"
        ) as trainer:
            (x, y), = batches(1)
            trainer.step(x, y)
            before, handles = (device.memory_info(), threading.active_count()), len(runtime.handles)
            for _ in range(100):
                trainer.step(x, y)
            assert (device.memory_info(), threading.active_count()) == before
            # How many events are in use at once is a matter of timing; never more than two iterations record.
            records = sum(isinstance(action, Record) for action in trainer.schedule.actions)
            assert records < 50
            assert len(runtime.handles) <= handles + records
        assert device.memory_info().used == device.memory_info().pinned == 0


@pytest.mark.parametrize("memory", ["base", "keep", "greedy"])
def test_captured_iterations_compute_the_same(memory: str) -> None:
    """A planner's schedule has copies on streams of their own, and no host in it."""
    with running_card(LATE, deterministic=True) as (device, runtime):

        def trainer(graph: bool, budget: int | None) -> Trainer:
            return Trainer(
                models.smallvgg(width=4), nn.CrossEntropyLoss(), optim.SGD(0.05, momentum=0.9), 8, memory=memory,
                budget=budget, device=device, target="native", graph=graph,
            )  # fmt: skip

        def losses(graph: bool) -> list[float]:
            found = []
            with trainer(graph, budget) as opened:
                assert bool(opened.schedule.plan.offload) == (memory == "greedy")
                for step, (x, y) in enumerate(batches(7)):
                    slot = opened._slots[step % 3]
                    opened._fill(slot.batch, x, y)
                    found.append(opened.settle(opened.issue(slot.batch, 8)).loss)
            return found

        budget = None
        if memory == "greedy":
            with pytest.raises(BudgetError) as refusal:
                trainer(False, 1)
            budget = refusal.value.needed
        wanted = losses(False)
        assert not runtime.graphs
        assert losses(True) == wanted
        assert len(runtime.graphs) == 3, "one for each slot"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_images_are_predicted_in_the_layout_of_images(precision: str) -> None:
    """In bf16 they lie with the channels innermost on a card."""

    def predicted(device: Any) -> np.ndarray:
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), input_shape=(1, 8, 8))
        with Trainer(
            net, nn.MSELoss(), optim.SGD(0.1), 8, device=device, target="native", precision=precision
        ) as trainer:  # fmt: skip
            return trainer.predict(batches(1)[0][0])

    with running_card(precision=precision, deterministic=True) as (device, _), HostDevice() as host:
        np.testing.assert_array_equal(predicted(device), predicted(host))


def test_compare_checks_and_verifies_on_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = "base,vdnn:all,vdnn++:conv(m),best"
    page = tmp_path / "report.html"
    with running_card(LATE, deterministic=True) as (device, _), patch.object(type(device), "close", lambda self: None):
        with patch("minidnn.cli.compare.open_device", lambda name, **options: device):
            assert main(["compare", "smallvgg", "--batch", "8", "--modes", modes, "--check", "--html", str(page)]) == 0
        assert device.memory_info().used == device.memory_info().pinned == 0
    said = capsys.readouterr().out
    assert "gradients of all modes: bit-equal to base" in said
    assert "every schedule is right" in said
    assert page.stat().st_size > 10_000


# -- the modes bench


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "STEPS", (2, 2))
    chosen = ("base(p)", "vdnn++:conv(p)", "vdnn:conv(p)", "vdnn++:dyn")
    monkeypatch.setattr(modes, "specs", lambda: (*map(Spec, chosen), Spec("best", "least"), Spec("greedy", "4GiB")))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_have_predictions_and_bounds(few: None, tmp_path: Path, precision: str) -> None:
    arguments = ["--network", "smallvgg:8", "--precision", precision, "--targets", "native", "--out", str(tmp_path)]
    with running_card(precision=precision) as (device, _):
        rows = modes.run(modes.parse(arguments), device).rows
        assert device.memory_info().used == device.memory_info().pinned == 0
    assert (tmp_path / "modes-Fake-GPU.json").exists()
    assert {row["mode"] for row in rows.values()} == {"base(p)", "vdnn++:conv(p)", "vdnn:conv(p)", "vdnn++:dyn", "best"}
    for row in rows.values():
        assert row["fits"]
        assert row["simulated"]["ms"] > 0
        assert row["simulated"]["pinned_agrees"]
        assert row["simulated"]["peak_bytes"] <= row["arena_bytes"] <= row["peak_bytes"] <= row["arena_bytes"] + 512
        assert row["bounds"]["compute_ms"] > 0
        assert row["bounds"]["ms"] > 0
        assert set(row["stall_ms"]) == {"offload", "prefetch", "memory", "codec"}
    lean = rows[f"smallvgg:8 {precision} native: vdnn++:conv(p)"]
    assert lean["bounds"]["link_ms"] > 0
    assert lean["prefetched_bytes"] > lean["offloaded_bytes"] == lean["pinned_bytes"] > 0


def test_what_the_machine_has_no_room_for_is_a_row_with_its_figures(few: None, tmp_path: Path) -> None:
    arguments = ["--network", "smallvgg:8", "--targets", "native", "--out", str(tmp_path), "--modes"]

    def refuse(nbytes: int) -> None:
        if nbytes == pinned:
            raise OutOfPinnedMemory("no room")

    with running_card() as (device, _):
        (row,) = modes.run(modes.parse([*arguments, "vdnn:conv(p)"]), device).rows.values()
        pinned = row["pinned_bytes"]
        with patch("minidnn.device.cuda_system.check_host_limits", refuse):
            (row,) = modes.run(modes.parse([*arguments, "vdnn:conv(p)", "--again"]), device).rows.values()
    assert (row["fits"], row["reason"], row["pinned_bytes"]) == (False, "no room", pinned)
    assert row["needed_bytes"] > 0
    assert row["simulated"]["ms"] > 0


def test_dyn_times_its_candidates_and_takes_no_more_than_its_budget() -> None:
    with running_card() as (device, _):
        with pytest.raises(BudgetError) as refusal:
            Trainer(
                models.smallvgg(width=4), nn.CrossEntropyLoss(), optim.SGD(0.1), 8, memory="vdnn++:dyn", budget=1,
                device=device, target="native",
            )  # fmt: skip
        assert refusal.value.needed is not None
        with Trainer(
            models.smallvgg(width=4), nn.CrossEntropyLoss(), optim.SGD(0.1), 8, memory="vdnn++:dyn",
            budget=refusal.value.needed, device=device, target="native",
        ) as trainer:  # fmt: skip
            assert trainer.schedule.plan.offload
            assert trainer.peak_bytes == device.memory_info().used <= refusal.value.needed

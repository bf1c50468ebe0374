"""The next batch comes in while an iteration computes: how lowering does it, and what the checker holds it to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minidnn import Trainer, nn, optim
from minidnn.device.host import HostDevice
from minidnn.graph.graph import Target
from minidnn.plan.mode import Request
from minidnn.plan.plan import Plan
from minidnn.plan.registry import PLANNERS, POLICIES, parse_mode
from minidnn.profile.model import modelled
from minidnn.profile.profile import Link
from minidnn.run.bound import iteration_bound
from minidnn.run.choose import Options, choose
from minidnn.run.program import Purpose, Recipe
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import COMPUTE, H2D, Prefetch, Record, Schedule, Wait
from minidnn.schedule.check import check
from minidnn.schedule.lower import lower

from . import simulated
from .lowered import PURPOSES, graph_of, lowered, profile_of, tiny

BF16 = Target("native", "bf16", "NHWC")


def base(early: bool = True, purpose: str = "train") -> Schedule:
    """Base of a network whose input is read by its first op alone."""
    graph = graph_of("tiny", "native-bf16-nhwc", purpose)
    plan = next(POLICIES["base"](Request(graph, profile_of(graph), parse_mode("base(m)"))))
    assert plan.early
    return lower(graph, replace(plan, early=early))


def without(s: Schedule, at: int) -> Schedule:
    """Without one action."""
    return replace(s, actions=s.actions[:at] + s.actions[at + 1 :])


def waits_of_copies_in(s: Schedule) -> list[int]:
    """Where the lane of copy-ins waits: behind the batch, and at the end."""
    return [i for i, a in enumerate(s.actions) if isinstance(a, Wait) and a.lane == H2D]


@pytest.mark.parametrize("purpose", PURPOSES)
def test_an_early_batch_costs_nothing_where_all_stays_and_is_right(purpose: str) -> None:
    s = base(purpose=purpose)
    assert "input" in {b.tensor for b in s.persistent}
    assert s.peak_bytes == base(early=False, purpose=purpose).peak_bytes
    assert check(s) == ()


def test_best_is_as_fast_as_keep_where_there_is_room_for_all_that_stays() -> None:
    """The batch takes long to come in here, and the last op of an iteration, the first layer's gradient, reads it."""
    net = nn.Sequential(nn.Conv2d(64, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 32 * 32, 10))
    steps: dict[str, float] = {}
    budget = None
    for mode in ("keep(p)", "best"):
        recipe = Recipe(
            net, nn.CrossEntropyLoss(), optim.SGD(0.1), Target("native"), parse_mode(mode), Options(), (64, 32, 32)
        )  # fmt: skip
        graph = recipe.graph(Purpose(train=True), 256)
        profile = modelled(graph, "h100")
        schedule = choose(graph, mode, profile, Options(budget=budget))
        assert check(schedule) == ()
        budget, steps[mode] = schedule.peak_bytes, simulate(schedule, profile).iteration_ms
    assert steps["best"] == pytest.approx(steps["keep(p)"], rel=1e-3)


def test_room_to_spare_is_not_taken_from_a_batch_that_comes_early() -> None:
    """Placement may stop at what the budget leaves; with an early batch that is less."""
    net = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * 16 * 16, 10),
    )  # fmt: skip
    target = Target("native", "tf32", "NHWC")
    sgd = optim.SGD(0.1, momentum=0.9)
    for spare in range(0, 60_000, 3_000):
        recipe = Recipe(net, nn.CrossEntropyLoss(), sgd, target, parse_mode("best"), Options(), (16, 33, 33))
        graph = recipe.graph(Purpose(train=True), 1)
        profile = replace(modelled(graph, "h100"), link=Link(2e11, 3e8))
        least = choose(graph, "keep(p)", profile, Options()).peak_bytes
        assert choose(graph, "best", profile, Options(budget=least + spare)).plan.early


@pytest.mark.parametrize("mode", sorted(PLANNERS))
def test_a_planner_makes_room_for_a_batch_that_takes_long(mode: str) -> None:
    """It plans for a pool that is smaller by the batch, where that is worth more than what has to leave for it."""
    net = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 32 * 32, 10),
    )  # fmt: skip
    recipe = Recipe(
        net, nn.CrossEntropyLoss(), optim.SGD(0.1), Target("native"), parse_mode(mode), Options(), (64, 32, 32)
    )  # fmt: skip
    graph = recipe.graph(Purpose(train=True), 64)
    profile = replace(modelled(graph, "h100"), link=Link(1e12, 1e9))  # all may leave, but a batch is slow to come in
    everything = choose(graph, mode, profile, Options())
    schedule = choose(graph, mode, profile, Options(budget=everything.peak_bytes - graph.tensors["input"].nbytes // 2))
    assert schedule.plan.early
    assert check(schedule) == ()


def test_the_papers_iteration_begins_with_its_batch() -> None:
    assert not lowered(graph_of("tiny"), "base(p)").plan.early


def test_the_copy_in_waits_only_until_the_batch_has_been_read() -> None:
    s = base()
    read = next(i for i, a in enumerate(s.actions) if a.label == "input:cast")
    record = s.actions[read + 1]
    assert isinstance(record, Record)
    assert s.actions[waits_of_copies_in(s)[-1]].waits == (record.signal,)
    first = next(a for a in s.actions if a.lane == H2D)
    assert isinstance(first, Prefetch)
    assert first.buffer.tensor == "input"


@pytest.mark.parametrize(
    ("memory", "target", "readers"),
    [("base", "native", 1), ("keep", "native", 1), ("vdnn:all", "native", 2), ("base", "paper", 2)],
)
def test_base_reads_a_copy_of_its_batch_so_that_the_next_one_need_not_wait(
    memory: str, target: str, readers: int
) -> None:
    with HostDevice() as device, Trainer(
        tiny(), nn.CrossEntropyLoss(), optim.SGD(0.1), 4, memory=memory, target=target, device=device,
        input_shape=(3, 16, 16),
    ) as trainer:  # fmt: skip
        graph = trainer.schedule.graph
        assert len(graph.uses["input"]) == readers
        assert trainer.schedule.plan.early == (readers == 1)
        x, y = np.ones((4, 3, 16, 16), np.float32), np.arange(4)
        assert np.isfinite(trainer.step(x, y).loss)


def test_a_batch_that_comes_before_the_last_one_was_read_is_found() -> None:
    s = base()
    found = check(without(s, waits_of_copies_in(s)[-1]))
    assert {f.rule for f in found} == {"race", "barrier"}
    assert any("may write input#0 while 'input:cast'" in f.text for f in found)
    assert any("may still use the batch's place when the next iteration enters h2d" in f.text for f in found)


def test_nothing_but_the_batch_comes_early() -> None:
    s = base()
    found = check(without(s, waits_of_copies_in(s)[0]))
    assert any(f.rule == "barrier" and "'prefetch labels'" in f.text and "may be too early" in f.text for f in found)


def test_in_one_arena_all_schedules_or_none_let_the_next_batch_in_early() -> None:
    train = base()
    places = {b.tensor: b.offset for b in train.persistent} | {"": train.persistent_bytes}
    graph = graph_of("tiny", "native-bf16-nhwc", "evaluate")
    for early in (True, False):
        given = {name: at for name, at in places.items() if early or name != "input"}
        s = lower(graph, Plan("keep", lowered(graph, "keep(m)").plan.stages, early=not early), persistent=given)
        kept = [b for b in s.persistent if b.tensor == "input"]
        assert [b.offset for b in kept] == ([places["input"]] if early else [])
        assert check(s) == ()


def test_an_iteration_no_longer_begins_with_the_copy_of_its_batch() -> None:
    graph = simulated.graph_of("alexnet", 64, BF16)
    profile = modelled(graph, "h100")
    plan = choose(graph, "base", profile).plan
    late, early = (simulate(lower(graph, replace(plan, early=e)), profile) for e in (False, True))
    assert profile.link is not None
    copy = profile.link.ms(graph.tensors["input"].nbytes, False)
    assert late.iteration_ms - early.iteration_ms == pytest.approx(copy, rel=0.05)
    assert early.iteration_ms >= iteration_bound(graph, profile, None).ms(2)
    (span,) = [s for s in early.timeline.spans if s.label == "prefetch input"]
    cast = next(s for s in early.timeline.spans if s.lane == COMPUTE and s.label == "input:cast")
    assert cast.end_ms <= span.start_ms < span.end_ms < early.iteration_ms  # the next batch's, beside this iteration


def test_best_takes_the_batch_early_where_the_budget_has_room() -> None:
    graph = simulated.graph_of("alexnet", 8, BF16)
    profile = modelled(graph, "h100")
    room = choose(graph, "base", profile).peak_bytes
    times = {mode: simulate(choose(graph, mode, profile, Options(budget=room)), profile) for mode in ("best", "base")}
    assert times["best"].iteration_ms <= times["base"].iteration_ms * (1 + 1e-12)

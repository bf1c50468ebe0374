"""What `best` finds that no policy does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidnn import nn, optim
from minidnn.graph.graph import Graph, Target
from minidnn.plan import best
from minidnn.plan.outline import Outline
from minidnn.plan.registry import parse_mode
from minidnn.profile.model import modelled
from minidnn.profile.profile import Link
from minidnn.run.choose import Options, choose, smallest
from minidnn.run.program import Purpose, Recipe
from minidnn.run.simulator import simulate

from . import simulated


def test_sets_that_spare_the_link_bear_what_a_placement_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the smallest pool the clock promises as much of more copies; once all is placed, they are in the way."""
    graph = simulated.graph_of("alexnet", 1024)
    profile = modelled(graph, "v100")
    options = Options(budget=smallest(graph, parse_mode("best"), profile, Options()).peak_bytes)
    found = simulate(choose(graph, "best", profile, options), profile).iteration_ms
    monkeypatch.setattr(best, "POOLS", tuple((share, 1.0) for share, _ in best.POOLS))
    assert found < 0.995 * simulate(choose(graph, "best", profile, options), profile).iteration_ms


def test_a_slower_link_changes_nothing_but_the_copies() -> None:
    graph = simulated.graph_of("vgg11", 16)
    outline = Outline.of(graph, modelled(graph, "v100"))
    slower = outline.with_link(0.5)
    assert outline.with_link(1.0) is outline
    assert (slower.link.d2h, slower.link.h2d) == (outline.link.d2h / 2, outline.link.h2d / 2)
    assert (slower.link.latency_ms, slower.ways, slower.resident) == (
        outline.link.latency_ms, outline.ways, outline.resident,
    )  # fmt: skip
    assert (slower.clock.out_ms >= outline.clock.out_ms).all()
    assert slower.clock.out_ms.max() > 1.9 * outline.clock.out_ms.max()


def graph_of(net: nn.Sequential, mode: str, batch: int, side: int) -> Graph:
    """The training iteration of a mode over images of one channel, in tf32."""
    target, shape, sgd = Target("native", "tf32", "NHWC"), (1, side, side), optim.SGD(0.1, momentum=0.9)
    recipe = Recipe(net, nn.CrossEntropyLoss(), sgd, target, parse_mode(mode), Options(), shape)
    return recipe.graph(Purpose(train=True), batch)


def predicted(net: nn.Sequential, mode: str, batch: int, side: int, link: Link, budget: int) -> float:
    """Simulated ms of an iteration on a modelled H100 with that link."""
    graph = graph_of(net, mode, batch, side)
    profile = replace(modelled(graph, "h100"), link=link)
    return simulate(choose(graph, mode, profile, Options(budget=budget)), profile).iteration_ms


def test_of_plans_that_promise_the_same_each_may_be_the_one_whose_batch_comes_early() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 8, 3, padding=1), nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10),
    )  # fmt: skip
    link, budget = Link(146_799_383.6, 90_563_685_522.5, 0.010842), 790_841
    times = {mode: predicted(net, mode, 1, 17, link, budget) for mode in ("best", "dynprog")}
    assert times["best"] <= times["dynprog"]


def test_where_everything_may_stay_by_a_few_bytes_it_does() -> None:
    """An outline rounds sizes up: of small tensors it thinks that there is no room."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    link = Link(135_408_685_916.0, 103_198_401.0, 0.00132)
    graph = graph_of(net, "keep", 16, 9)
    budget = choose(graph, "keep(p)", replace(modelled(graph, "h100"), link=link)).peak_bytes
    times = {mode: predicted(net, mode, 16, 9, link, budget) for mode in ("best", "keep(p)")}
    assert times["best"] == pytest.approx(times["keep(p)"])

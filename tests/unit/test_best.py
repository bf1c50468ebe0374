"""What `best` finds that no policy does."""

from __future__ import annotations

import pytest

from minidnn.plan import best
from minidnn.plan.outline import Outline
from minidnn.plan.registry import parse_mode
from minidnn.profile.model import modelled
from minidnn.run.choose import Options, choose, smallest
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

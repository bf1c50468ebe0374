"""What stays in `base`: all outputs of the papers' graph; of the native one, those that backward reads."""

from __future__ import annotations

import pytest

from minidnn.schedule.actions import COMPUTE, D2H, Free, Launch
from minidnn.schedule.check import check

from .lowered import NETWORKS, TARGETS, graph_of, lowered


@pytest.mark.parametrize("network", NETWORKS)
def test_all_outputs_of_the_papers_graph_stay(network: str) -> None:
    graph = graph_of(network)
    s = lowered(graph, "base(m)")
    ended = {b.tensor for a in s.actions if isinstance(a, Free) and a.lane == COMPUTE for b in a.frees}
    assert not ended & {layer.y for layer in graph.layers}


def test_an_output_that_only_forward_reads_makes_room() -> None:
    graph = graph_of("plain", "native")
    s = lowered(graph, "base(m)")
    pooled = [layer.x for layer in graph.layers if layer.kind == "pool"]
    assert pooled
    for name in pooled:
        free = next(i for i, a in enumerate(s.actions) if name in {b.tensor for b in a.frees})
        (pool,) = (i for i, a in enumerate(s.actions) if isinstance(a, Launch) and ("x", name) in a.launch.reads)
        assert s.actions[free].lane == COMPUTE
        assert pool < free
    last = next(a for a in reversed(s.actions) if isinstance(a, Free) and a.lane == D2H)
    read = {name for op in graph.ops[graph.forward_ops :] for _, name in op.reads}
    assert {layer.y for layer in graph.layers} & read - {"loss"} <= {b.tensor for b in last.frees}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("network", NETWORKS)
def test_base_is_right_on_every_target(network: str, target: str) -> None:
    assert check(lowered(graph_of(network, target), "base(m)")) == ()

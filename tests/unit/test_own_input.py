"""The input's own copy: where it is nothing but that, the host has its bytes, and it is never copied out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.plan.compress import compressible
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.profile.model import modelled
from minidnn.run.choose import Options, smallest
from minidnn.schedule.actions import HostRange, Offload, Prefetch, Schedule
from minidnn.schedule.check import check

from . import lowered

FP32 = Target("native", "fp32", "NCHW")


def graph_of(target: Target = FP32, net: nn.Sequential | None = None, channels: int = 3) -> Graph:
    """A training iteration whose layers read a copy of the input."""
    shape, loss = (4, channels, 16, 16), nn.CrossEntropyLoss()
    return build(net or lowered.tiny(), loss, shape, target, optimizer=optim.SGD(0.1), own_input=True)


def tightest(policy: str, graph: Graph) -> Schedule:
    return smallest(graph, parse_mode(policy), modelled(graph, "v100"), Options())


@pytest.mark.parametrize(
    ("target", "alike"),
    [(FP32, True), (Target("native", "tf32", "NHWC"), False), (Target("native", "bf16", "NHWC"), False)],
)
def test_a_copy_that_is_converted_is_not_on_the_host(target: Target, alike: bool) -> None:
    found = {name: field for name, field in graph_of(target).on_host.items() if field == "input"}
    assert found == {"input": "input", **({"input.cast": "input"} if alike else {})}


def test_one_channel_lies_alike_in_every_layout() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 256, 5))
    assert graph_of(Target("native", "tf32", "NHWC"), net, channels=1).on_host["input.cast"] == "input"
    assert "input.cast" not in graph_of(Target("native", "bf16", "NHWC"), net, channels=1).on_host


def test_a_copy_that_is_overwritten_is_not_on_the_host() -> None:
    graph = graph_of()
    again = next(op for op in graph.ops if op.kind == "cast")
    assert "input.cast" not in replace(graph, ops=(*graph.ops[:2], again, *graph.ops[2:])).on_host


@pytest.mark.parametrize("policy", sorted(PLANNERS))
def test_it_leaves_without_a_copy_and_comes_back_from_the_batch(policy: str) -> None:
    schedule = tightest(policy, graph_of())
    assert "input.cast" in schedule.plan.offload
    assert "input.cast" not in schedule.pinned
    assert "input.cast" not in compressible(schedule.graph, schedule.plan)
    copies = [(type(a), a.host.kind, a.host.name) for a in schedule.actions
              if isinstance(a, (Offload, Prefetch)) and a.buffer.tensor == "input.cast"]  # fmt: skip
    assert copies == [(Prefetch, "slot", "input")]
    assert check(schedule) == ()


@pytest.mark.parametrize(("kind", "name"), [("pinned", "input.cast"), ("pinned", "input"), ("slot", "labels")])
def test_from_anywhere_else_it_would_be_other_bytes(kind: str, name: str) -> None:
    schedule = tightest("best", graph_of())
    host = HostRange(kind, name, 0, 12288)
    actions = [
        replace(a, host=host) if isinstance(a, Prefetch) and a.buffer.tensor == "input.cast" else a
        for a in schedule.actions
    ]
    found = check(replace(schedule, actions=tuple(actions)))
    assert any(f.rule == "slot" and f"takes input.cast from {name} in {kind}" in f.text for f in found)

"""The checker accepts what lowering makes of every mode. (What it rejects: test_check_broken, test_check_mutations.)"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from minidnn.errors import ScheduleError
from minidnn.plan.plan import ORDERS
from minidnn.schedule.actions import COMPUTE, Action, HostSync, Prefetch, Schedule
from minidnn.schedule.check import check, verify
from minidnn.schedule.lower import walk

from .lowered import PURPOSES, TARGETS, graph_of, lowered, modes

NETWORK_TARGETS = [(n, t) for n in ("plain", "normed", "mixed") for t in TARGETS]


@pytest.mark.parametrize(("order", "rule"), list(zip(ORDERS, "pm", strict=True)))
@pytest.mark.parametrize(("network", "target"), NETWORK_TARGETS)
def test_every_mode_is_right(network: str, target: str, order: str, rule: str) -> None:
    graph = graph_of(network, target)
    for mode in modes(graph, rule):
        assert check(lowered(graph, mode, order)) == (), mode


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize(("network", "target"), [("mixed", "paper"), ("normed", "native-bf16-nhwc")])
def test_micro_batches_inference_and_other_losses_are_right(network: str, target: str, purpose: str) -> None:
    graph = graph_of(network, target, purpose)
    for mode in modes(graph, "p"):
        assert check(lowered(graph, mode)) == (), mode


@pytest.mark.parametrize("fit", ["best-fit", "high-end", "worst-fit"])
@pytest.mark.parametrize("placement", ["planned", "live"])
def test_pool_heuristics_and_live_placement_are_right(fit: str, placement: str) -> None:
    graph = graph_of("plain")
    for mode in modes(graph, "p"):
        if not mode.startswith("no-wait"):
            assert check(lowered(graph, mode, fit=fit, placement=placement)) == (), mode


@pytest.mark.soak
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize(("network", "target"), NETWORK_TARGETS)
def test_the_full_product_is_right(network: str, target: str, purpose: str) -> None:
    graph = graph_of(network, target, purpose)
    for order in ORDERS:
        for mode in (*modes(graph, "p"), *modes(graph, "m")):
            for fit in (None, "best-fit", "worst-fit"):
                assert check(lowered(graph, mode, order, fit)) == (), f"{mode} {order} {fit}"


def test_a_run_time_pool_must_not_hand_out_what_a_lane_has_yet_to_free() -> None:
    plan = lowered(graph_of("tiny"), "no-wait:all(p)").plan
    draft = walk(graph_of("tiny"), plan, None)
    live = Schedule(
        draft.graph, plan, tuple(draft.actions), draft.persistent, draft.persistent_bytes, 0, draft.pinned, "live"
    )
    found = check(live)
    assert {f.rule for f in found} == {"overlap"}
    assert "on bytes that 'free 0.y'" in found[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger(Action):
    """A kind of action that no interpreter knows."""


def test_an_unknown_kind_of_action_is_found() -> None:
    s = lowered(graph_of("tiny"), "keep(p)")
    found = check(replace(s, actions=(*s.actions, Stranger(lane=COMPUTE))))
    assert [f.rule for f in found] == ["lane"]
    assert "'stranger'" in found[0].text


def test_verify_raises_the_first_sentences_and_counts_the_rest() -> None:
    s = lowered(graph_of("tiny"), "vdnn:all(p)")
    verify(s)
    no_waits = replace(s, actions=tuple(a for a in s.actions if not isinstance(a, HostSync)))
    found = check(no_waits)
    with pytest.raises(ScheduleError) as caught:
        verify(no_waits)
    sentences = "; ".join(f.text for f in found[:3])
    assert str(caught.value) == f"vdnn:all(p): {sentences}; and {len(found) - 3} more"


def test_what_both_iterations_show_is_said_once() -> None:
    s = lowered(graph_of("tiny"), "vdnn:all(p)")
    without = tuple(a for a in s.actions if not (isinstance(a, Prefetch) and a.buffer.key == "0.y#1"))
    found = check(replace(s, actions=without))
    assert len({(f.rule, f.actions) for f in found}) == len(found)
    at = without.index(next(a for a in without if a.label == "2:backward_filter"))
    assert ("content", (at,)) in {(f.rule, f.actions) for f in found}

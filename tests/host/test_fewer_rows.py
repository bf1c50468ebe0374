"""The iteration over fewer rows lies inside the memory of that over all, in every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidnn import nn, optim
from minidnn.device.host_profile import host_profile
from minidnn.graph.build import build
from minidnn.graph.graph import Graph, Target
from minidnn.profile.profile import Algorithm, Profile, op_key
from minidnn.run.choose import Options, choose, offered
from minidnn.run.fewer_rows import for_fewer_rows
from minidnn.schedule.actions import Alloc, Schedule
from minidnn.schedule.check import check
from tests.host.runs import MODES, network


def graph(rows: int, target: str = "paper") -> Graph:
    """One training iteration of the small network."""
    loss, optimizer = nn.CrossEntropyLoss(), optim.SGD(0.1, momentum=0.9)
    return build(network(), loss, (rows, 2, 11, 10), Target(target), optimizer=optimizer)


def places(schedule: Schedule) -> dict[str, int]:
    return {b.tensor: b.offset for b in schedule.persistent} | {"": schedule.persistent_bytes}


@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("memory", MODES)
def test_every_buffer_lies_where_it_lies_for_all_rows(memory: str, target: str) -> None:
    whole_graph = graph(8, target)
    fit = "best-fit" if ":" in memory else None
    whole = choose(whole_graph, memory, host_profile(whole_graph), Options(fit=fit))
    there = {a.buffer.key: a.buffer for a in whole.actions if isinstance(a, Alloc)}
    for rows in (1, 5, 7):
        small_graph = graph(rows, target)
        small = for_fewer_rows(whole, small_graph, host_profile(small_graph), algorithms={}, persistent=places(whole))
        assert small is not None
        assert not check(small)
        assert places(small) == places(whole)
        assert small.pinned_bytes <= whole.pinned_bytes
        assert small.peak_bytes <= whole.peak_bytes
        for action in small.actions:
            if isinstance(action, Alloc):
                assert action.buffer.offset == there[action.buffer.key].offset
                assert action.buffer.nbytes <= there[action.buffer.key].nbytes


def test_a_workspace_that_grows_with_fewer_rows_and_live_placement_have_no_schedule_in_small() -> None:
    whole_graph, small_graph = graph(8), graph(5)
    whole = choose(whole_graph, "keep(p)", host_profile(whole_graph), Options())
    hungry = Profile(
        "measured on paper",
        {op_key(small_graph, op): (Algorithm("large", 1 << 20),) for op in small_graph.ops if op.kind == "forward"},
    )
    given = {"algorithms": {}, "persistent": places(whole)}
    assert for_fewer_rows(whole, small_graph, host_profile(small_graph), **given) is not None  # type: ignore[arg-type]
    assert for_fewer_rows(whole, small_graph, hungry, **given) is None  # type: ignore[arg-type]
    live = replace(whole, placement="live")
    assert for_fewer_rows(live, small_graph, host_profile(small_graph), **given) is None  # type: ignore[arg-type]


def test_a_fixed_algorithm_that_fewer_rows_do_not_have_is_not_wanted_of_them() -> None:
    small = graph(3)
    first, second = [op for op in small.ops if op.function == "conv2d_forward"][:2]
    ways = {op_key(small, op): (Algorithm("whole", 64, 1.0),) for op in (first, second)}
    fixed = {first.name: Algorithm("split 4 whole", 16), second.name: Algorithm("whole", 8), "gone": Algorithm("x")}
    # With the workspace that it takes of these rows: one that is too small would be written over.
    assert offered(fixed, small, Profile("test", ways)) == {second.name: Algorithm("whole", 64, 1.0)}
    plan = choose(small, "base(p)", Profile("test", ways), Options(algorithms=fixed)).plan
    assert plan.algorithms[second.name].workspace == 64

"""Timelines: what counts as a stall, and traces that Chrome and Perfetto can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.run.timeline import CAUSES, Span, Timeline, save_trace


def wait(lane: str, cause: str, start: float, end: float) -> Span:
    return Span(lane, f"wait for {cause} x", start, end, cause)


def work(lane: str, start: float, end: float) -> Span:
    return Span(lane, "work", start, end)


def test_only_waits_in_which_nothing_computes_are_stalls() -> None:
    line = Timeline(
        (work("compute", 0, 4), wait("host", "offload", 2, 6), work("compute", 6, 7), wait("host", "prefetch", 6.5, 9))
    )
    assert line.stall_ms == {"offload": 2, "prefetch": 2, "memory": 0, "codec": 0}
    assert line.end_ms == 9


def test_a_computation_inside_a_wait_splits_it() -> None:
    line = Timeline((wait("host", "memory", 0, 10), work("compute", 2, 3), work("compute", 5, 8)))
    assert [(start, end) for _, _, start, end in line.stalls()] == [(0, 2), (3, 5), (8, 10)]
    assert line.stall_ms["memory"] == 6


def test_two_waits_at_once_count_once() -> None:
    line = Timeline((wait("host", "offload", 0, 4), wait("compute", "prefetch", 2, 6)))
    assert line.stall_ms == {"offload": 4, "prefetch": 2, "memory": 0, "codec": 0}


def test_waits_on_the_compute_lane_are_not_work() -> None:
    line = Timeline((work("compute", 0, 1), wait("compute", "prefetch", 1, 3), work("compute", 3, 4)))
    assert line.busy_ms("compute") == 2
    assert line.stall_ms["prefetch"] == 2


def test_busy_time_counts_what_overlaps_once() -> None:
    assert Timeline((work("codec-0", 0, 3), work("codec-0", 2, 5), work("codec-1", 0, 9))).busy_ms("codec-0") == 5


def test_an_empty_timeline_has_no_time() -> None:
    assert Timeline(()).end_ms == 0
    assert Timeline(()).stall_ms == dict.fromkeys(CAUSES, 0)


stretches = st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


Stretch = tuple[int, int]


@given(st.lists(stretches, max_size=8), st.lists(st.tuples(stretches, st.sampled_from(CAUSES)), max_size=8))
def test_stalls_are_what_a_clock_counts(computing: list[Stretch], waits: list[tuple[Stretch, str]]) -> None:
    spans = [work("compute", *stretch) for stretch in computing]
    spans += [wait("host", cause, *stretch) for stretch, cause in waits]
    counted = dict.fromkeys(CAUSES, 0)
    ordered = sorted(waits, key=lambda pair: pair[0][0])
    for ms in range(50):
        if not any(start <= ms < end for start, end in computing):
            # Of waits at the same time the one that began first counts.
            cause = next((c for (start, end), c in ordered if start <= ms < end), None)
            if cause is not None:
                counted[cause] += 1
    assert Timeline(tuple(spans)).stall_ms == pytest.approx(counted)


def test_a_trace_has_a_process_for_each_timeline_and_a_thread_for_each_lane(tmp_path: Path) -> None:
    line = Timeline((work("compute", 1, 2.5), wait("host", "offload", 2.5, 4)), ((0, 100), (2, 50)))
    path = tmp_path / "trace.json"
    save_trace({"vdnn:all": line, "vdnn++:all": line}, path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named[0, 0, "process_name"] == "vdnn:all"
    assert named[1, 0, "process_name"] == "vdnn++:all"
    assert {named[1, 0, "thread_name"], named[1, 1, "thread_name"]} == {"compute", "host"}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["tid"], e["ts"], e["dur"], e["cat"]) for e in spans] == [
        (0, 1000, 1500, "compute"), (1, 2500, 1500, "wait for offload"),
    ]  # fmt: skip
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert [(e["ts"], e["args"]["bytes"]) for e in counters] == [(0, 100), (2000, 50)]

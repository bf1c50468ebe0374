"""The schedules that minidnn executes reproduce the vDNN++ paper's tables, and offline placement leaves no holes."""

from __future__ import annotations

import pytest

from bench.paper_tables import (
    MODELS,
    graph_of,
    input_twice,
    pinned,
    placement,
    section_v_b,
    table_ii,
    table_v,
    trace_of,
)
from minidnn.memory.sizing import smallest_pool
from minidnn.memory.trace import aggregate_peak

from .published import TABLE_V
from .reference_trace import network, vdnn_trace


def test_table_v_all_cells() -> None:
    cells = table_v()
    assert len(cells) == 30
    for cell in cells:
        assert cell["ours_mb"] == pytest.approx(cell["published_mb"], abs=2.2), cell


def test_table_ii_expected_and_actual() -> None:
    cells = table_ii()
    assert len(cells) == 8
    for cell in cells:
        assert cell["ours_mb"] == pytest.approx(cell["published_mb"], abs=2.0), cell


def test_section_iii_c_pinned_memory() -> None:
    published = [cell for cell in pinned() if cell["published_mb"] is not None]
    assert [cell["published_mb"] for cell in published] == [453, 7436]
    for cell in published:
        assert cell["ours_mb"] == pytest.approx(cell["published_mb"], abs=1)


def test_section_v_b_fragmentation() -> None:
    cells = section_v_b()
    assert [cell["ours_mb"] for cell in cells[:2]] == [343, 656]
    for cell in cells:
        assert cell["ours_mb"] == pytest.approx(cell["published_mb"], abs=2.1), cell


@pytest.mark.parametrize(("name", "offload_set"), TABLE_V)
@pytest.mark.parametrize("order", ["prefetch-first", "derivative-first"])
def test_lowered_traces_need_what_the_independent_reference_needs(name: str, offload_set: str, order: str) -> None:
    assert name.partition("(")[0] in MODELS
    ours, reference = trace_of(name, offload_set, order), vdnn_trace(network(name), offload_set, order)
    assert aggregate_peak(ours) == aggregate_peak(reference)
    for fit in ("best-fit", "first-fit", "worst-fit", "exact-then-first", "high-end"):
        assert smallest_pool(ours, fit).nbytes == smallest_pool(reference, fit).nbytes
    twice = vdnn_trace(network(name), offload_set, order, input_twice=True)
    assert smallest_pool(input_twice(ours)).nbytes == smallest_pool(twice).nbytes


def test_offline_placement_reaches_the_aggregate_peak_in_all_18_cases() -> None:
    rows = placement()
    assert len(rows) == 18
    for row in rows:
        assert row["placed_bytes"] == row["aggregate_bytes"], row
    excess = [min(r["best-fit"], r["high-end"]) / r["aggregate_bytes"] - 1 for r in rows]
    assert max(excess) > 0.1, "run-time pools leave more than a tenth unused in some"


def test_the_graph_of_the_tables_updates_inside_backward() -> None:
    graph = graph_of("AlexNet(128)")
    assert graph.update == "per-layer"

"""The reference traces reproduce what the vDNN++ paper prints: Tables II and V, Figure 5, section III-C."""

from __future__ import annotations

from functools import cache

import pytest

from minidnn.memory.pool import UNLIMITED, Pool
from minidnn.memory.sizing import replay, smallest_pool
from minidnn.memory.trace import Allocate, Trace, aggregate_peak, live_profile

from .published import PINNED, POOL_COLUMNS, TABLE_II, TABLE_V
from .reference_trace import (
    CONV,
    FC,
    POOL,
    MiB,
    alexnet,
    driver_rounded,
    network,
    offloaded_inputs,
    parameters,
    prefetches,
    vdnn_trace,
)  # fmt: skip

MODES = ("all", "conv", "aconv")
ORDERS = ("prefetch-first", "derivative-first")


@cache
def table_v(name: str, mode: str) -> tuple[float, tuple[float, ...]]:
    """Aggregate peak and pools in MiB without parameters, by the published rule: the input is counted twice in the
    pools' traces, not in the aggregate from which the search starts."""
    rows = network(name)
    aggregate = aggregate_peak(vdnn_trace(rows, mode))
    pools = (
        smallest_pool(vdnn_trace(rows, mode, order, input_twice=True), fit, start=aggregate).nbytes / MiB
        for order, fit in POOL_COLUMNS
    )
    return aggregate / MiB, tuple(pools)


@pytest.mark.parametrize(("name", "mode"), TABLE_V)
def test_table_v_each_cell_is_reproduced(name: str, mode: str) -> None:
    aggregate, pools = table_v(name, mode)
    outside = driver_rounded(parameters(network(name))) / MiB
    published = (TABLE_V[name, mode][0], *TABLE_V[name, mode][1])
    assert [outside + ours for ours in (aggregate, *pools)] == pytest.approx(published, abs=2.2)


@pytest.mark.parametrize("name", ["AlexNet(256)", "VGG-16(64)"])
def test_table_v_cells_of_a_network_differ_from_ours_by_one_constant(name: str) -> None:
    """What the driver takes beside the pool is one number for a network; printed MB are whole, so 1 MiB remains."""
    rest = []
    for mode in MODES:
        aggregate, pools = table_v(name, mode)
        published = TABLE_V[name, mode]
        rest += [published[0] - aggregate, *(p - o for p, o in zip(published[1], pools, strict=True))]
    assert max(rest) - min(rest) < 1


def test_table_v_needs_the_input_counted_twice() -> None:
    near = 0
    for (name, mode), (_, published) in TABLE_V.items():
        rows = network(name)
        for (order, fit), value in zip(POOL_COLUMNS, published, strict=True):
            ours = smallest_pool(vdnn_trace(rows, mode, order), fit).nbytes + driver_rounded(parameters(rows))
            near += abs(ours / MiB - value) <= 2.2
    assert near == 1


def test_table_v_spread_over_fits_and_orders() -> None:
    """The case with the worst best choice and the worst choice of all: 24 % and 43 % above the aggregate as published
    (AlexNet(256) all(m) both times), 13 % and 41 % for the pool alone with the input counted once."""
    published = [[pool / aggregate - 1 for pool in pools] for aggregate, pools in TABLE_V.values()]
    assert [round(100 * max(map(f, published))) for f in (min, max)] == [24, 43]
    needed = []
    for name, mode in TABLE_V:
        traces = {order: vdnn_trace(network(name), mode, order) for order in ORDERS}
        peak = aggregate_peak(traces["prefetch-first"])
        needed.append([smallest_pool(traces[order], fit).nbytes / peak - 1 for order, fit in POOL_COLUMNS])
    assert [round(100 * max(map(f, needed))) for f in (min, max)] == [13, 41]


@pytest.mark.parametrize(("name", "mode"), TABLE_II)
def test_table_ii_expected_and_actual(name: str, mode: str) -> None:
    """Parameters are not rounded here. Actual: a pool of the aggregate size that grows by whole chunks, and 180 MB that
    the paper does not explain."""
    rows = network(name)
    trace = vdnn_trace(rows, mode)
    pool = Pool(aggregate_peak(trace), limit=UNLIMITED)
    replay(trace, pool)
    outside = sum(parameters(rows))
    expected, actual = TABLE_II[name, mode]
    assert (aggregate_peak(trace) + outside) / MiB == pytest.approx(expected, abs=2.1)
    assert (pool.size + outside) / MiB == pytest.approx(actual - 180, abs=1)


def test_figure_5_peaks_of_forward_and_backward() -> None:
    trace = vdnn_trace(alexnet(256), "all")
    profile = live_profile(trace)

    def peak(phase: str) -> int:
        return max(live for live, event in zip(profile, trace, strict=True) if event.position.startswith(phase))

    assert round(peak("forward") / MiB) == 435
    assert round(peak("backward") / MiB) == 855


@pytest.mark.parametrize("name", PINNED)
def test_section_iii_c_pinned_memory(name: str) -> None:
    rows = network(name)
    first_fc = next(i for i, row in enumerate(rows) if row.kind == FC)
    published = sum(row.x for i, row in enumerate(rows) if row.kind in (CONV, POOL) or i == first_fc)
    assert published / MiB == pytest.approx(PINNED[name], abs=1)
    offloaded = sum(rows[i].x for i in offloaded_inputs(rows, "all")) / MiB
    without_input = offloaded - rows[0].x / MiB
    assert {"AlexNet(128)": (448.2, 372.7), "VGG-16(128)": (7423.5, 7350.0)}[name] == pytest.approx(
        (offloaded, without_input), abs=0.05
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", "10->7 9->6 6->5 5->4 4->3 3->2 2->1 1->0"),
        ("conv", "10->6 6->5 5->4 4->2 2->0"),
        ("aconv", "10->6 5->4 2->0"),
    ],
)
def test_alexnet_prefetches(mode: str, expected: str) -> None:
    rows = alexnet(1)
    assert " ".join(f"{m}->{i}" for m, i in prefetches(rows, offloaded_inputs(rows, mode)).items()) == expected


def forward_part(trace: Trace) -> Trace:
    return tuple(event for event in trace if event.position.startswith("forward"))


@pytest.mark.parametrize("name", ["AlexNet(128)", "AlexNet(256)", "VGG-16(16)", "VGG-16(64)", "VGG-116(32)"])
@pytest.mark.parametrize("mode", MODES)
def test_section_iv_b_the_end_of_forward(name: str, mode: str) -> None:
    """Forward never needs more than the aggregate peak. The text's heuristic ends it with one free block, as the text
    claims, for all and aconv; for conv four of the networks have two. The program's heuristic always ends with one."""
    trace = vdnn_trace(network(name), mode)
    free = {}
    for fit in ("best-fit", "high-end", "high-end-offloaded"):
        pool = Pool(aggregate_peak(trace), fit)
        replay(forward_part(trace), pool)
        free[fit] = len(pool.dump().free)
    assert free["high-end"] == 1
    assert free["high-end-offloaded"] == (2 if mode == "conv" and name != "VGG-116(32)" else 1)


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("order", ORDERS)
def test_every_iteration_ends_empty(mode: str, order: str) -> None:
    for delay in (0, 1, 4, 100):
        trace = vdnn_trace(alexnet(2), mode, order, delay=delay)
        assert live_profile(trace)[-1] == 0
        assert len({event.id for event in trace if isinstance(event, Allocate)}) * 2 == len(trace)

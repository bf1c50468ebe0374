"""The paper's search for a pool's size, and the choice over heuristics and orders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import BudgetError, OutOfDeviceMemory
from minidnn.memory.fit import FITS, BestFit
from minidnn.memory.freelist import FreeList
from minidnn.memory.place import Interval, intervals
from minidnn.memory.pool import Pool
from minidnn.memory.sizing import replay, smallest_over, smallest_pool
from minidnn.memory.trace import Allocate, Event, Free, Trace, aggregate_peak
from minidnn.memory.validate import find_violation

KB = 512
ROLES = ("kept", "offloaded", "gradient")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to 25 stays that begin and end anywhere."""
    events: list[Event] = []
    live: list[str] = []
    for i in range(draw(st.integers(1, 25))):
        ending = draw(st.permutations(live))[: draw(st.integers(0, 3))]
        events += [Free(id) for id in ending]
        live = [id for id in live if id not in ending]
        events.append(Allocate(f"b{i}", draw(st.integers(0, 9 * KB)), draw(st.sampled_from(ROLES))))
        live.append(f"b{i}")
    return tuple(events)


@given(traces(), st.sampled_from([fit for fit in FITS if fit != "high-end"]))
def test_the_size_found_serves_the_trace_and_its_offsets_are_a_placement(trace: Trace, fit: str) -> None:
    sizing = smallest_pool(trace, fit)
    assert sizing.fit == fit
    assert sizing.nbytes >= aggregate_peak(trace)
    assert (sizing.restarts == 0) == (sizing.nbytes == aggregate_peak(trace))
    again = replay(trace, Pool(sizing.nbytes, fit))
    assert {id: block.address for id, block in again.items()} == sizing.offsets
    assert find_violation(intervals(trace), sizing.offsets, sizing.nbytes, KB) is None


@given(traces())
def test_high_end_finds_a_size_or_says_that_there_is_none(trace: Trace) -> None:
    try:
        sizing = smallest_pool(trace, "high-end")
    except BudgetError:
        with pytest.raises(OutOfDeviceMemory):
            replay(trace, Pool(100 * aggregate_peak(trace), "high-end"))
    else:
        replay(trace, Pool(sizing.nbytes, "high-end"))


def test_a_failure_enlarges_the_pool_by_exactly_what_was_missing() -> None:
    full = (Allocate("a", 2 * KB), Allocate("b", KB), Allocate("c", 2 * KB))
    trace = (*full, Free("a"), Free("c"), Allocate("d", 4 * KB - 100))
    assert aggregate_peak(trace) == 5 * KB
    sizing = smallest_pool(trace)  # missing: 4 KB - 100 - 2 KB, and the pool is rounded up
    assert (sizing.nbytes, sizing.restarts) == (7 * KB, 1)


def test_what_is_missing_at_the_high_end_is_missing_from_the_rightmost_block() -> None:
    hole = (Allocate("a", 3 * KB), Allocate("b", KB), Free("a"))  # 3 units are free below b, 2 above
    sizing = smallest_pool((*hole, Allocate("c", 4 * KB, "kept")), "high-end", start=6 * KB)
    assert (sizing.nbytes, sizing.restarts) == (8 * KB, 1)


def test_a_heuristic_that_refuses_what_it_could_reach_does_not_stop_the_search() -> None:
    class Cautious(BestFit):
        name = "cautious"

        def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
            return super().choose(free, nbytes, role) if free.largest >= 2 * nbytes else None

    assert smallest_pool((Allocate("a", KB),), Cautious()).nbytes == 2 * KB


def test_high_end_cannot_serve_a_large_activation_behind_a_small_hole() -> None:
    trace = (Allocate("a", KB, "kept"), Allocate("b", KB, "kept"), Free("a"), Allocate("c", 2 * KB, "kept"))
    with pytest.raises(BudgetError, match=r"high-end serves 1\.0 KiB for c from no size of pool"):
        smallest_pool(trace, "high-end")
    assert smallest_pool(trace, "best-fit").nbytes == 4 * KB


def test_the_empty_trace_needs_nothing() -> None:
    assert smallest_pool(()).nbytes == 0


# Best fit puts b behind a, so that c fits nowhere; worst fit and the other order do better.
LOOSE = (Allocate("a", 3 * KB), Allocate("b", KB), Free("a"), Allocate("c", 4 * KB))
TIGHT = (Allocate("b", KB), Allocate("a", 3 * KB), Free("a"), Allocate("c", 4 * KB))


def test_simulate_and_choose_takes_the_smallest_over_orders_and_heuristics() -> None:
    assert smallest_pool(LOOSE).nbytes == 8 * KB
    name, sizing = smallest_over({"loose": LOOSE, "tight": TIGHT})
    assert (name, sizing.fit, sizing.nbytes) == ("tight", "best-fit", 5 * KB)
    assert smallest_over({"loose": LOOSE}, ("best-fit",))[1].nbytes == 8 * KB


def test_simulate_and_choose_skips_heuristics_that_serve_no_size() -> None:
    trace = (Allocate("a", KB, "kept"), Allocate("b", KB, "kept"), Free("a"), Allocate("c", 2 * KB, "kept"))
    assert smallest_over({"only": trace})[1].fit == "best-fit"
    with pytest.raises(BudgetError, match="high-end serves"):
        smallest_over({"only": trace}, ("high-end",))
    with pytest.raises(BudgetError, match="at least one of each"):
        smallest_over({})


def test_intervals_count_events_and_reach_to_the_end_without_a_free() -> None:
    trace = (Allocate("a", 5), Allocate("b", 7), Free("a"), Allocate("c", 1), Free("c"))
    assert intervals(trace) == (Interval("a", 5, 0, 2), Interval("b", 7, 1, 5), Interval("c", 1, 3, 4))

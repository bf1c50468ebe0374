"""The example sequences of vDNN++, sections III-B and IV-B."""

from __future__ import annotations

import pytest

from minidnn.errors import OutOfDeviceMemory
from minidnn.memory.place import Interval, intervals, place
from minidnn.memory.pool import UNLIMITED, Pool
from minidnn.memory.sizing import replay, smallest_pool
from minidnn.memory.trace import Allocate, Event, Free, Trace, aggregate_peak
from minidnn.memory.validate import find_violation

from ..unit.exhaustive import smallest_height

UNIT = 512


def sequence(text: str, unit: int = UNIT) -> Trace:
    """`A1(5) D1` -> allocate request 1 of 5 units, free it."""
    events: list[Event] = []
    for word in text.split():
        if word[0] == "A":
            number, units = word[1:].removesuffix(")").split("(")
            events.append(Allocate(number, int(units) * unit))
        else:
            events.append(Free(word[1:]))
    return tuple(events)


NINE_OR_ELEVEN = sequence("A1(5) A2(2) A3(1) D2 A4(1) D1 D3 A5(8)")


def test_section_iv_b_best_fit_serves_the_sequence_from_9_units_but_not_from_11() -> None:
    replay(NINE_OR_ELEVEN, Pool(9 * UNIT))
    with pytest.raises(OutOfDeviceMemory):
        replay(NINE_OR_ELEVEN, Pool(11 * UNIT))


def test_section_iv_b_the_search_may_miss_a_smaller_size() -> None:
    assert smallest_pool(NINE_OR_ELEVEN, start=9 * UNIT).nbytes == 9 * UNIT
    assert smallest_pool(NINE_OR_ELEVEN, start=11 * UNIT).nbytes > 11 * UNIT


def triangle() -> list[Interval]:
    """a_ij: allocated before deallocation i, freed in deallocation j; in thirds of a unit."""
    sizes = {1: 3, 2: 1, 3: 2, 4: 6}
    return [Interval(f"a{i}{j}", sizes[i] * UNIT, i, j + 1) for i in sizes for j in range(i, 5)]


def test_section_iii_b_the_triangle_needs_more_than_its_aggregate_peak() -> None:
    placement = place(triangle())
    assert placement.lower_bound == 12 * UNIT
    assert placement.nbytes == 13 * UNIT  # 4 1/3 units
    assert find_violation(triangle(), placement.offsets, placement.nbytes, UNIT) is None
    assert smallest_height(triangle(), UNIT) == 13 * UNIT  # no placement has 4 units


def test_figure_7_a_pool_that_grows_by_chunks_takes_400_where_100_would_do() -> None:
    trace = sequence("A1(100) A2(200) A3(300) D1 D3 A4(400)")
    pool = Pool(600 * UNIT, limit=UNLIMITED)
    replay(trace[:-1], pool)
    assert pool.size - pool.used == 400 * UNIT
    assert pool.largest_free < 400 * UNIT
    assert pool.allocate(400 * UNIT).address == 600 * UNIT
    assert pool.size == 1000 * UNIT
    assert smallest_pool(trace).nbytes == 700 * UNIT
    assert place(intervals(trace)).nbytes == aggregate_peak(trace) == 600 * UNIT

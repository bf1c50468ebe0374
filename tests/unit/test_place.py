"""Offline placement: right always, at the lower bound for the papers' networks, optimal where that can be proved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError
from minidnn.memory.place import Interval, Placement, intervals, lower_bound, place
from minidnn.memory.trace import aggregate_peak
from minidnn.memory.validate import find_violation

from ..paper.reference_trace import network, vdnn_trace
from .exhaustive import smallest_height
from .random_networks import random_trace

KB = 512


@st.composite
def stays(draw: st.DrawFn, most: int = 30, sizes: int = 12, time: int = 20) -> list[Interval]:
    """Intervals of any overlap."""
    found = []
    for i in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, time - 1))
        found.append(Interval(f"b{i}", draw(st.integers(1, sizes)), start, draw(st.integers(start + 1, time))))
    return found


def checked(given: list[Interval] | tuple[Interval, ...], **options: int) -> Placement:
    """A placement that the validator accepts."""
    placement = place(given, **options)
    violation = find_violation(given, placement.offsets, placement.nbytes, options.get("alignment", KB))
    assert violation is None, violation
    assert placement.nbytes >= placement.lower_bound
    return placement


@given(stays(), st.sampled_from([1, 64, 512]))
def test_every_placement_is_right_and_its_height_exact(given: list[Interval], alignment: int) -> None:
    placement = checked(given, alignment=alignment, effort=300)
    ends = [placement.offsets[s.id] + -(-s.nbytes // alignment) * alignment for s in given]
    assert placement.nbytes == max(ends, default=0)


@given(stays(most=6, sizes=6, time=6))
def test_small_placements_are_optimal(given: list[Interval]) -> None:
    assert checked(given, alignment=1).nbytes == smallest_height(given)


@given(stays(), st.integers(1, 64))
def test_the_lower_bound_is_the_most_that_is_alive_at_once(given: list[Interval], alignment: int) -> None:
    alive = (
        sum(-(-s.nbytes // alignment) * alignment for s in given if s.start <= now < s.end) for now in range(20)
    )  # fmt: skip
    assert lower_bound(given, alignment) == max(alive)


@pytest.mark.parametrize("mode", ["all", "conv", "aconv"])
@pytest.mark.parametrize("order", ["prefetch-first", "derivative-first"])
@pytest.mark.parametrize("name", ["AlexNet(256)", "VGG-16(64)", "VGG-116(32)"])
def test_the_papers_networks_are_placed_without_any_fragmentation(name: str, mode: str, order: str) -> None:
    trace = vdnn_trace(network(name), mode, order)
    assert checked(intervals(trace)).nbytes == aggregate_peak(trace)


@pytest.mark.parametrize("mode", ["all", "conv", "aconv"])
@pytest.mark.parametrize("order", ["prefetch-first", "derivative-first"])
@pytest.mark.parametrize("name", ["AlexNet(256)", "VGG-16(64)", "VGG-116(32)", "VGG-191(32)"])
def test_releases_three_layers_late_fit_into_the_same_bytes(name: str, mode: str, order: str) -> None:
    """vDNN++ within vDNN's own aggregate peak, still without fragmentation."""
    rows = network(name)
    peak = aggregate_peak(vdnn_trace(rows, mode, order))
    for delay in (1, 2, 3):
        late = intervals(vdnn_trace(rows, mode, order, delay=delay))
        assert checked(late, limit=peak).nbytes <= peak


def test_a_thousand_random_networks_are_placed_at_the_bound() -> None:
    above = {}
    for seed in range(1000):
        placement = checked(intervals(random_trace(seed)))
        if placement.nbytes > placement.lower_bound:
            above[seed] = placement.nbytes / placement.lower_bound
    assert above == {}


def crowded(seed: int) -> list[Interval]:
    """As the paper's a_ij: in each of four steps what was freed is allocated anew, so that no byte is ever free. The
    sizes are random, and often no placement has that height."""
    rng, height, found = random.Random(seed), 12, list[Interval]()
    for start in range(4):
        cuts = sorted(rng.sample(range(1, height), 3 - start))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, height], strict=True)]
        found += [Interval(f"a{start}{start + k}", size, start, start + k + 1) for k, size in enumerate(sizes)]
        height = sum(stay.nbytes for stay in found if stay.end == start + 1)
    return found


def test_crowded_placements_above_the_bound_are_optimal() -> None:
    """Proved by exhaustive search."""
    above = 0
    for seed in (3, 5, 7, 9, 11, 12, 17):
        given = crowded(seed)
        placement = checked(given, alignment=1)
        assert placement.nbytes == smallest_height(given)
        above += placement.nbytes > placement.lower_bound
    assert above == 4


def test_more_effort_never_gives_a_higher_placement() -> None:
    for case in (crowded(9), crowded(11), crowded(12), intervals(random_trace(10))):
        heights = [checked(case, alignment=1, effort=effort).nbytes for effort in range(0, 40_000, 1500)]
        assert heights == sorted(heights, reverse=True)


def test_the_search_stops_at_the_limit() -> None:
    given = intervals(random_trace(10))
    tight = checked(given)
    loose = checked(given, limit=2 * tight.nbytes)
    assert tight.nbytes < loose.nbytes <= 2 * tight.nbytes
    assert tight.lower_bound == loose.lower_bound


def test_a_limit_below_the_bound_is_not_searched_for() -> None:
    given = intervals(random_trace(10))
    below = checked(given, limit=lower_bound(given) - 1)
    assert below == checked(given, effort=0)
    assert below.nbytes > checked(given).nbytes


def test_the_same_intervals_give_the_same_placement() -> None:
    given = intervals(random_trace(10))
    assert place(given) == place(given)
    assert place(given, effort=0) != place(given)  # the search had something to do


def test_empty_buffers_and_empty_traces_need_nothing() -> None:
    assert place([]) == Placement({}, 0, 0)
    assert place([Interval("a", 0, 0, 9)]) == Placement({"a": 0}, 0, 0)
    mixed = checked([Interval("a", 0, 0, 9), Interval("b", 5, 0, 9)])
    assert (mixed.offsets["a"], mixed.nbytes) == (0, KB)


def test_stays_that_only_touch_share_bytes() -> None:
    assert checked([Interval("a", KB, 0, 5), Interval("b", KB, 5, 9)]).nbytes == KB


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([Interval("a", 1, 0, 1), Interval("a", 1, 2, 3)], "two intervals have the id 'a'"),
        ([Interval("a", -1, 0, 1)], "nbytes must be 0 or more and start before end"),
        ([Interval("a", 1, 1, 1)], "nbytes must be 0 or more and start before end"),
    ],
)
def test_wrong_intervals_are_refused(given: list[Interval], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        place(given)


def test_a_wrong_alignment_is_refused() -> None:
    with pytest.raises(ArgumentError, match="alignment is 0"):
        place([], alignment=0)


PAIR = [Interval("a", KB, 0, 5), Interval("b", KB, 4, 9)]


@pytest.mark.parametrize(
    ("offsets", "reason", "sentence"),
    [
        ({"a": 0}, "missing", "b has no offset"),
        ({"a": 0, "b": KB, "c": 0}, "unknown", "c has an offset but is not in the trace"),
        ({"a": -KB, "b": 0}, "negative", "a lies at -512, below the pool"),
        ({"a": 0, "b": KB + 8}, "unaligned", "b lies at 520, not a multiple of 512"),
        ({"a": 0, "b": 2 * KB}, "outside", "b ends at 1536, the pool at 1024"),
        ({"a": KB, "b": KB}, "overlap", r"b \[512, 1024\) and a \[512, 1024\) overlap at time 4"),
    ],
)
def test_the_validator_names_what_is_wrong(offsets: dict[str, int], reason: str, sentence: str) -> None:
    violation = find_violation(PAIR, offsets, 2 * KB, KB)
    assert violation is not None
    assert violation.reason == reason
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(violation.sentence)


def test_the_validator_accepts_what_is_right() -> None:
    assert find_violation(PAIR, {"a": 0, "b": KB}, 2 * KB, KB) is None
    later = [PAIR[0], Interval("b", KB, 5, 9)]
    assert find_violation(later, {"a": 0, "b": 0}, KB, KB) is None


@given(stays(most=12, sizes=5), st.lists(st.integers(0, 12), min_size=12, max_size=12))
def test_the_validator_finds_exactly_the_overlaps(given: list[Interval], where: list[int]) -> None:
    """Against bytes painted one by one."""
    offsets = {s.id: at for s, at in zip(given, where, strict=False)}
    painted: set[tuple[int, int]] = set()
    clash = False
    for s in given:
        at = offsets[s.id]
        cells = {(now, byte) for now in range(s.start, s.end) for byte in range(at, at + s.nbytes)}
        clash = clash or bool(painted & cells)
        painted |= cells
    assert (find_violation(given, offsets, 100) is not None) == clash

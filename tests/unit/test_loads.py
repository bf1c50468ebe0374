"""Copies beside computations that slow them: by hand, and in a simulated iteration."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError
from minidnn.graph.graph import Target
from minidnn.profile.model import modelled
from minidnn.profile.profile import UNDISTURBED, Algorithm, Link, Profile, Shares
from minidnn.run import simulator
from minidnn.run.choose import Options, choose
from minidnn.run.loads import Loads
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import COMPUTE

from .simulated import graph_of, random_chain, random_profile


def loads(*slow: tuple[float, float, Shares]) -> Loads:
    found = Loads()
    for begin, end, shares in slow:
        found.add(begin, end, shares)
    return found


@pytest.mark.parametrize(
    ("begin", "alone", "ms"),
    [
        (0, 5, 5),  # before the first
        (0, 10, 10),  # up to it
        (0, 14, 18),  # 10 free, 4 at half the rate
        (10, 5, 10),  # just beside it
        (12, 4, 8),  # all of it within the first
        (12, 7, 3 / 0.25 + 8),  # 8 ms beside the first do 4, the other 3 at a quarter
        (18, 3, 2 + 2 / 0.25),  # the end of the first does 1
        (20, 5, 20),  # all the second does
        (20, 6, 21),  # and one after it
        (40, 3, 3),  # after the last
        (99, 3, 3),
    ],
)
def test_a_copy_takes_longer_by_what_runs_beside_it(begin: float, alone: float, ms: float) -> None:
    found = loads((10, 20, Shares(0.5, 1.0)), (20, 40, Shares(0.25, 1.0)), (50, 60, UNDISTURBED))
    assert found.copy_ms(begin, alone, to_host=True) == pytest.approx(ms)
    assert found.copy_ms(begin, alone, to_host=False) == pytest.approx(alone)
    assert len(found.begins) == 2  # what slows nothing is not kept


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0.1, 1)), max_size=8),
    st.floats(0, 40), st.floats(0, 40),
)  # fmt: skip
def test_a_copys_time_is_what_its_rate_makes_of_it(
    gaps: list[tuple[float, float, float]], begin: float, alone: float
) -> None:
    """The work done in the time that it takes, at the rate of each moment, is the whole copy."""
    at, slow = 0.0, []
    for gap, length, share in gaps:
        slow.append((at + gap, at + gap + length, Shares(share, share)))
        at += gap + length
    ms = loads(*slow).copy_ms(begin, alone, to_host=False)
    lost = sum(max(min(end, begin + ms) - max(start, begin), 0.0) * (1 - share.h2d) for start, end, share in slow)
    assert ms - lost == pytest.approx(alone, abs=1e-9)


def test_the_iteration_before_counts_for_what_begins_in_it() -> None:
    found = loads((10, 20, Shares(0.5, 1.0)), (90, 100, Shares(0.25, 1.0))).repeated(100)
    assert found.copy_ms(-90, 5, to_host=True) == pytest.approx(10)
    assert found.copy_ms(-5, 5, to_host=True) == pytest.approx(5 + 3.75)
    assert found.copy_ms(10, 5, to_host=True) == pytest.approx(10)


def test_loads_are_near_each_other_where_none_moves_by_more() -> None:
    found = loads((10, 20, Shares(0.5, 1.0)), (30, 40, Shares(0.25, 1.0)))
    assert found.near(loads((10.5, 20, Shares(0.5, 1.0)), (30, 39.5, Shares(0.25, 1.0))), 0.5)
    assert not found.near(loads((10, 20, Shares(0.5, 1.0)), (30, 39.4, Shares(0.25, 1.0))), 0.5)
    assert not found.near(loads((10, 20, Shares(0.5, 1.0))), 0.5)
    assert loads().near(loads(), 0.0)


def slowed(profile: Profile, shares: Shares) -> Profile:
    entries = {key: tuple(replace(a, shares=shares) for a in found) for key, found in profile.entries.items()}
    return replace(profile, entries=entries)


def test_a_simulated_copy_is_slowed_by_what_computes_beside_it() -> None:
    """VGG-16 computes without a pause but where it waits: each copy keeps its share of the rate, wherever it is."""
    graph = graph_of("vgg16", 64)
    profile = modelled(graph, "h100")
    budget = choose(graph, "best", profile).peak_bytes * 6 // 10
    schedule = choose(graph, "best", profile, Options(budget=budget))
    alone = simulate(schedule, profile)
    beside = simulate(schedule, slowed(profile, Shares(0.8, 0.5)))
    computing = [(s.start_ms, s.end_ms) for s in beside.timeline.spans if s.lane == COMPUTE and not s.stall]
    found = {"offload": 0.0, "prefetch": 0.0}
    before = {s.label: s.end_ms - s.start_ms for s in alone.timeline.spans}
    for span in beside.timeline.spans:
        kind = span.label.partition(" ")[0]
        if span.lane not in ("d2h", "h2d") or before[span.label] < 0.1:
            continue
        covered = sum(max(min(b, span.end_ms) - max(a, span.start_ms), 0.0) for a, b in computing)
        share = {"offload": 0.8, "prefetch": 0.5}[kind]
        expected = before[span.label] + covered * (1 - share)
        assert span.end_ms - span.start_ms == pytest.approx(expected, rel=0.01), span.label
        found[kind] += covered
    assert min(found.values()) > 1
    assert beside.iteration_ms > alone.iteration_ms


@pytest.mark.parametrize("seed", range(20))
def test_slower_copies_never_make_vdnn_faster(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng)
    profile = random_profile(graph, rng)
    schedule = choose(graph, "vdnn:all(m)", profile)
    alone, beside = (simulate(schedule, p) for p in (profile, slowed(profile, Shares(0.5, 0.5))))
    assert beside.iteration_ms >= alone.iteration_ms - 1e-9
    assert simulate(schedule, slowed(profile, UNDISTURBED)) == alone


def test_shares_are_in_the_file_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    ways = Algorithm("a", 0, 1.0, shares=Shares(0.5, 0.25)), Algorithm("b", 0, 2.0)
    profile = Profile("measured here", {"op": ways})
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    text = path.read_text()
    assert text.count("shares") == 1
    for wrong in ("0.0", "1.5", '"a"', "NaN", "0.5, 0.5"):
        path.write_text(text.replace("0.5", wrong))
        with pytest.raises(ArgumentError, match="is damaged or no profile"):
            Profile.load(path)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_an_early_batch_is_slowed_by_the_iteration_in_which_it_is_copied(share: float) -> None:
    """A link so slow that the copy of the batch takes nearly the whole iteration that computes beside it."""
    graph = graph_of("vgg16", 64, Target("native", "tf32", "NHWC"))
    profile = modelled(graph, "h100")
    compute = simulate(choose(graph, "base(p)", profile), profile).iteration_ms
    nbytes = graph.tensors["input"].nbytes
    profile = replace(profile, link=Link(1e12, nbytes / (0.9 * compute) * 1e3, 0.0))
    schedule = choose(graph, "base(p)", profile)
    found = simulate(schedule, slowed(profile, Shares(1.0, share)))
    late = 0.9 * compute - share * compute  # what is left of the copy when all has been computed
    assert found.iteration_ms == pytest.approx(compute + max(late, 0.0), rel=1e-2)


@pytest.mark.parametrize("seed", [0, 1, 443, 574, 1185, 1472, 1966])
def test_settled_means_settled(seed: int) -> None:
    """In all seeds but the first two the first two iterations happen to take as long."""
    rng = random.Random(seed)
    graph = random_chain(rng)
    profile = random_profile(graph, rng)
    shares = {
        key: tuple(replace(a, shares=Shares(rng.uniform(0.3, 1), rng.uniform(0.3, 1))) for a in found)
        for key, found in profile.entries.items()
    }  # fmt: skip
    profile = replace(profile, entries=shares)
    for mode in ("vdnn:all(m)", "vdnn++:all(m)", "best"):
        schedule = choose(graph, mode, profile)
        found = simulate(schedule, profile).iteration_ms
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulator, "SETTLED", 0.0)
            patch.setattr(simulator, "MOST", 40)
            assert found == pytest.approx(simulate(schedule, profile).iteration_ms, rel=5e-3)

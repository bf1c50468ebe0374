"""Traces as values and as JSON lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidnn.errors import ArgumentError, DataError
from minidnn.memory.trace import Allocate, Event, Free, aggregate_peak, live_profile, load_trace, save_trace

TRACE = (
    Allocate("features.0.y#0", 1000, "offloaded", "forward features.0"),
    Allocate("dx", 512),
    Free("features.0.y#0", "forward features.2"),
    Allocate("w s\n\"é\"", 0, "workspace"),
    Free("dx"),
)  # fmt: skip


def test_profile_and_peak_count_requests_rounded_to_512_bytes() -> None:
    assert live_profile(TRACE) == [1024, 1536, 512, 512, 0]
    assert live_profile(TRACE, granularity=1) == [1000, 1512, 512, 512, 0]
    assert (aggregate_peak(TRACE), aggregate_peak(())) == (1536, 0)


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((Allocate("a", 1), Allocate("a", 1)), "allocates 'a' twice"),
        ((Allocate("a", 1), Free("a"), Allocate("a", 1)), "allocates 'a' twice"),
        ((Free("a"),), "frees 'a', which was never allocated"),
        ((Allocate("a", 1), Free("a"), Free("a")), "frees 'a', which has been freed"),
        ((Allocate("a", -1),), "allocates -1 bytes for 'a'"),
    ],
)
def test_impossible_traces_are_refused(events: tuple[Event, ...], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        live_profile(events)


def test_a_saved_trace_loads_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(TRACE, path)
    assert load_trace(path) == TRACE
    assert path.read_text().splitlines()[1:3] == [
        '{"allocate": "dx", "nbytes": 512}',
        '{"free": "features.0.y#0", "position": "forward features.2"}',
    ]


STAYS = st.tuples(st.text(), st.integers(0, 2**50), st.text(), st.text(), st.booleans())


@given(st.lists(STAYS, unique_by=lambda stay: stay[0]))
def test_any_trace_loads_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, str, str, bool]]
) -> None:
    events: list[Event] = [Allocate(id, nbytes, role, position) for id, nbytes, role, position, _ in rows]
    events += [Free(id, position) for id, _, _, position, freed in rows if freed]
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    save_trace(events, path)
    if events:
        assert load_trace(path) == tuple(events)


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"allocate": "a", "nbytes": 1}\n\n{"free": "a"}\n')
    assert load_trace(path) == (Allocate("a", 1), Free("a"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"allocate": "b", "nbytes": 5', r"line 2 is not JSON \(Expecting ',' delimiter: line 1"),
        ("[1]", 'line 2 must be an object with either "allocate" or "free"'),
        ('{"allocate": "b", "free": "a"}', "line 2 must be an object with either"),
        ('{"nbytes": 5}', "line 2 must be an object with either"),
        ('{"allocate": "b"}', "line 2 has nbytes = null; it must be a whole number of bytes"),
        ('{"allocate": "b", "nbytes": -5}', "line 2 has nbytes = -5"),
        ('{"allocate": "b", "nbytes": 5.5}', r"line 2 has nbytes = 5\.5"),
        ('{"allocate": "b", "nbytes": 9223372036854775808}', "it must be a whole number of bytes, 0 or more, below 2"),
        ('{"allocate": "b", "nbytes": true}', "line 2 has nbytes = true"),
        ('{"allocate": "b", "nbytes": "5"}', 'line 2 has nbytes = "5"'),
        ('{"allocate": 7, "nbytes": 5}', "line 2 has allocate = 7; it must be a string"),
        ('{"free": null}', "line 2 has free = null; it must be a string"),
        ('{"allocate": "b", "nbytes": 5, "size": 1}', "line 2 has the unknown key 'size'; allocate takes allocate,"),
        ('{"free": "a", "nbytes": 1}', "line 2 has the unknown key 'nbytes'; free takes free, position"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"allocate": "b", "nbytes": ' + "9" * 5000 + "}", "line 2 is not JSON"),
        ('{"free": "z"}', "frees 'z', which was never allocated"),
    ],
)
def test_a_malformed_line_gets_one_sentence_with_its_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"allocate": "a", "nbytes": 1}}\n{line}\n')
    with pytest.raises(DataError, match=sentence) as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_foreign_text_is_utf_8_with_any_character(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes('{"allocate": "é\u2028", "nbytes": 1}\r\n'.encode())
    assert load_trace(path) == (Allocate("é\u2028", 1),)
    path.write_bytes(b'{"allocate": "\xff", "nbytes": 1}')
    with pytest.raises(DataError, match=r"line 1 is not JSON .*invalid start byte"):
        load_trace(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(DataError, match=r"cannot read the trace .*t\.jsonl: No such file"):
        load_trace(path)
    path.write_text("\n")
    with pytest.raises(DataError, match=r"t\.jsonl is empty"):
        load_trace(path)

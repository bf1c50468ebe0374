"""Reports: tables that align, plots that say what they show, a page that loads nothing from elsewhere."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from minidnn.errors import ArgumentError, MiniDnnError
from minidnn.profile.model import modelled
from minidnn.report import html_report, memory_map, modes_table, plots, text_table, timeline_plot
from minidnn.report.sweeps import ratio_plot, throughput_plot
from minidnn.run.choose import Options, choose
from minidnn.run.simulator import Simulation, simulate
from minidnn.run.sweep import Point, Sweep
from minidnn.run.timeline import Span, Timeline
from minidnn.schedule.actions import Schedule

from .simulated import graph_of

PNG = b"\x89PNG\r\n\x1a\n"
ROWS: list[dict[str, Any]] = [
    {
        "mode": "base(p)", "iteration_ms": 200.0, "stall_ms": {"offload": 0.0, "prefetch": 2.0, "memory": 0.0},
        "peak_bytes": 2**30, "pool_bytes": 2**29, "pinned_bytes": 0, "offloaded_bytes": 0, "fits": True,
    },
    {
        "mode": "vdnn:all(p)", "iteration_ms": 250.0, "stall_ms": 52.0, "peak_bytes": 2**29, "pool_bytes": 2**28,
        "pinned_bytes": 2**30, "offloaded_bytes": 2**30, "fits": True,
    },
    {
        "mode": "<script>", "iteration_ms": None, "stall_ms": None, "peak_bytes": 2**31, "pool_bytes": 2**30,
        "pinned_bytes": None, "offloaded_bytes": None, "fits": False,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def result() -> tuple[Schedule, Simulation]:
    graph = graph_of("smallnet", 32)
    profile = modelled(graph, "gtx970")
    schedule = choose(graph, "vdnn++:all(m)", profile)
    return schedule, simulate(schedule, profile)


def test_tables_align_the_first_column_left_and_the_others_right() -> None:
    assert text_table(("name", "ms"), [("a", "1.0"), ("longer", "10.0")]) == (
        "name      ms\n------  ----\na        1.0\nlonger  10.0"
    )


def test_the_table_of_modes() -> None:
    assert [" ".join(line.split()) for line in modes_table(ROWS).splitlines() if not line.startswith("-")] == [
        "mode ms/iteration relative stall ms peak pool pinned offloaded fits",
        "base(p) 200.0 1.000 2.00 1024.0 MiB 512.0 MiB 0 B 0 B yes",
        "vdnn:all(p) 250.0 1.250 52.00 512.0 MiB 256.0 MiB 1024.0 MiB 1024.0 MiB yes",
        "<script> - - - 2048.0 MiB 1024.0 MiB - - no",
    ]


def test_without_base_there_is_nothing_to_be_relative_to() -> None:
    assert modes_table(ROWS[1:2]).splitlines()[2].split()[:3] == ["vdnn:all(p)", "250.0", "-"]


def test_plots_are_pngs_and_go_to_files(result: tuple[Schedule, Simulation], tmp_path: Path) -> None:
    schedule, simulation = result
    for plot, name in ((timeline_plot, "time.png"), (memory_map, "map.png")):
        what: Any = simulation.timeline if plot is timeline_plot else schedule
        data = plot(what, tmp_path / name, title="a title")
        assert data.startswith(PNG)
        assert (tmp_path / name).read_bytes() == data


def test_a_plot_grows_with_the_number_of_timelines(result: tuple[Schedule, Simulation]) -> None:
    line = result[1].timeline
    heights = [int.from_bytes(timeline_plot(dict.fromkeys(names, line))[20:24], "big") for names in ("a", "ab", "abc")]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=1)
    assert heights[1] > heights[0] + 100


def drawn(monkeypatch: pytest.MonkeyPatch, lines: dict[str, Timeline]) -> Any:
    """The figure of timelines."""
    figures: list[Any] = []
    monkeypatch.setattr(plots._Sheet, "png", lambda sheet, path: figures.append(sheet.figure))
    timeline_plot(lines)
    return figures[0]


def test_timelines_below_each_other_share_the_scales_of_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Timeline((Span("compute", "a:forward", 0, 10),), ((0.0, 2**20),))
    large = Timeline((Span("compute", "a:forward", 0, 30),), ((0.0, 2**22),))
    figure = drawn(monkeypatch, {"small": small, "large": large})
    lanes, curves = figure.axes[::2], figure.axes[1::2]
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 30.0)}
    assert [axes.get_ylim() for axes in curves] == [pytest.approx((0.0, 4 * 1.15))] * 2
    assert [axes.get_title(loc="left") for axes in lanes] == ["small", "large"]


def test_what_is_too_short_to_be_seen_is_neither_in_the_heading_nor_in_the_legend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = (
        Span("compute", "a:forward", 0, 50), Span("host", "wait", 50, 60, "offload"),
        Span("compute", "a:backward_data", 60, 100), Span("host", "wait", 100, 100.01, "memory"),
    )  # fmt: skip
    figure = drawn(monkeypatch, {"one": Timeline(spans, ((0.0, 3 * 2**20),))})
    assert figure.axes[0].get_title(loc="right") == "100.0 ms, peak 3.0 MiB, stalled 10.00 ms for copy-outs"
    assert [text.get_text() for text in figure.legends[0].texts] == ["forward", "backward", "wait for offload"]


def test_where_a_name_is_too_long_the_number_of_the_layer_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (
        Span("compute", "features.0:forward", 0, 80), Span("compute", "features.3:forward", 80, 85),
        Span("d2h", "offload features.3.y", 85, 90), Span("compute", "features.6:forward", 99.9, 100),
    )  # fmt: skip
    figure = drawn(monkeypatch, {"one": Timeline(spans)})
    assert [text.get_text() for text in figure.axes[0].texts] == ["features.0", "3", "3"]


ODD = ("we$ird_{^$", "網", "n\udcff")
"""Names that are no formula, have no glyph, are no text."""


@pytest.mark.parametrize("name", ODD)
def test_a_name_is_drawn_as_it_is(result: tuple[Schedule, Simulation], name: str) -> None:
    """A warning would be an error here."""
    sweep = Sweep((2**20, 2**21), (1.0, 1.0), (1.0, 1.0), (2.0, 2.0), {"best": [Point(2.0, 2**20, 0.1)] * 2})
    assert timeline_plot(Timeline((Span("compute", "a$_{$:forward", 0, 10),)), title=name).startswith(PNG)
    assert memory_map(result[0], title=name).startswith(PNG)
    assert ratio_plot({name: sweep}).startswith(PNG)
    assert throughput_plot({"best": (2.0, 2.0)}, (2.0, 2.0), sweep.budgets, 4, title=name).startswith(PNG)


def test_dollar_signs_begin_no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, {"$a$": Timeline((Span("compute", "b:forward", 0, 10),))})
    (name,) = figure.findobj(lambda artist: getattr(artist, "get_text", str)() == "$a$")
    assert not name.get_parse_math()


def test_a_timeline_without_memory_or_compute_can_be_drawn() -> None:
    assert timeline_plot(Timeline((Span("host", "wait for x", 0, 1, "memory"),))).startswith(PNG)


def test_no_timeline_is_refused() -> None:
    with pytest.raises(ArgumentError, match="timelines is empty; give at least one"):
        timeline_plot({})


@pytest.mark.parametrize("mode", ["base(p)", "keep(m)", "vdnn:conv(p)"])
def test_every_mode_has_a_map(mode: str) -> None:
    graph = graph_of("alexnet", 8)
    assert memory_map(choose(graph, mode, modelled(graph, "h100"))).startswith(PNG)


def test_a_live_placement_has_no_map() -> None:
    graph = graph_of("smallnet", 2)
    schedule = choose(graph, "vdnn:all(m)", modelled(graph, "h100"), Options(placement="live"))
    with pytest.raises(ArgumentError, match="placement is 'live'; a memory map needs the addresses"):
        memory_map(schedule)


def test_without_matplotlib_a_sentence_says_what_to_install(
    result: tuple[Schedule, Simulation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sentence = r"^plots need matplotlib; pip install 'minidnn\[plot\]'$"
    with pytest.raises(MiniDnnError, match=sentence):
        timeline_plot(result[1].timeline)
    with pytest.raises(MiniDnnError, match=sentence):
        memory_map(result[0])


class Page(HTMLParser):
    """Collects what a page refers to, and whether every element is closed in order."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_self_contained(result: tuple[Schedule, Simulation]) -> None:
    schedule, simulation = result
    text = html_report("A <title>", ROWS, {"vdnn++": simulation.timeline}, {"vdnn++": schedule})
    page = Page(text)
    assert page.open == []
    assert page.tags.count("img") == 2
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert "script" not in page.tags
    assert "A <title>" in page.text
    assert "<script>" in page.text


def test_bars_show_stalls_by_cause_for_modes_that_fit() -> None:
    page = Page(html_report("bars", ROWS))
    tips = [t for t in page.text if t.endswith(" ms") and ":" in t]
    assert "base(p) busy: 198.0 ms" in tips
    assert "base(p) waits for prefetch: 2.00 ms" in tips
    assert not any(t.startswith("<script>") for t in tips)
    assert page.tags.count("img") == 0


def test_a_page_without_times_has_no_bars() -> None:
    assert "svg" not in Page(html_report("none", ROWS[2:])).tags

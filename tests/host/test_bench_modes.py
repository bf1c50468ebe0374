"""bench/modes.py on the host: the rows of its file, what is kept, and what is measured again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import modes
from bench.modes import Spec, improvements, main, misses, specs
from bench.rows import Rows, pinned_again, timed
from bench.tradeoff import Point, points, ratios, written
from minidnn.device.host import HostDevice

SETTING = "smallvgg:32 fp32 native"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two timed steps a row, and few before."""
    monkeypatch.setattr(modes, "STEPS", (2, 2))
    monkeypatch.setattr(modes, "WARMING", 0.0)


def bench(out: Path, *more: str) -> dict[str, Any]:
    main(["--network", "smallvgg:32", "--device", "host", "--out", str(out), *more])
    found: dict[str, Any] = json.loads((out / "modes-host.json").read_text())
    return found


def test_rows_say_what_modes_cost_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(tmp_path, "--modes", "base(p)", "vdnn++:all(m)")
    rows = found["rows"]
    assert list(rows) == [f"{SETTING}: base(p)", f"{SETTING}: vdnn++:all(m)"]
    base, lean = rows.values()
    assert (base["mode"], base["budget"], base["fits"], base["steps"]) == ("base(p)", "", True, 2)
    assert base["ms"] > 0
    assert base["pinned_bytes"] == base["offloaded_bytes"] == 0
    assert lean["pinned_bytes"] == lean["offloaded_bytes"] > 0
    assert lean["peak_bytes"] == lean["arena_bytes"] < base["arena_bytes"] == base["peak_bytes"]
    assert set(lean["stall_ms"]) == {"offload", "prefetch", "memory", "codec"}
    assert lean["simulated"] is None, "the host has no times to predict with"

    again = bench(tmp_path, "--modes", "base(p)", "vdnn:all(m)")["rows"]
    assert again[f"{SETTING}: base(p)"] == base
    assert f"{SETTING}: vdnn++:all(m)" in again
    renewed = bench(tmp_path, "--modes", "base(p)", "--again")["rows"]
    assert renewed[f"{SETTING}: base(p)"]["ms"] != base["ms"]
    assert renewed[f"{SETTING}: vdnn:all(m)"] == again[f"{SETTING}: vdnn:all(m)"]
    assert "gain" in capsys.readouterr().out


def test_budgets_have_names_and_refusals_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "specs", lambda: (Spec("best", "least"), Spec("best", "75%"), Spec("keep", "1MiB")))
    least, most, refused = bench(tmp_path, "--budgets", "75%", "least", "1MiB")["rows"].values()
    assert least["arena_bytes"] <= least["budget_bytes"] < most["budget_bytes"]
    assert (refused["fits"], refused["budget_bytes"]) == (False, 2**20)
    assert refused["needed_bytes"] > 2**20
    assert "needs at least" in refused["reason"]


def test_a_row_is_measured_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of iterations of 2 ms, 0.1 s are 50."""
    counts: list[int] = []

    def times(trainer: object, steps: int, issued: list[float] | None = None) -> list[float]:
        counts.append(steps)
        if issued is not None:
            issued.extend([1.0] * steps)
        return [2.0] * steps

    monkeypatch.setattr("bench.rows.iteration_times", times)
    found = timed(SimpleNamespace(batch=8), 0.02, (2, 40), 0.1)  # type: ignore[arg-type]
    assert (counts, found["steps"], found["ms"]) == ([1, 50, 10], 10, 2.0)


def test_no_row_begins_without_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--seconds", "0")["rows"] == {}
    assert f"no time for {len(specs())} more rows" in capsys.readouterr().out


def test_a_failing_row_is_not_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "specs", lambda: (Spec("vdnn:features.99"), Spec("base(p)")))
    assert [row["mode"] for row in bench(tmp_path)["rows"].values()] == ["base(p)"]


def test_every_row_has_a_key_of_its_own() -> None:
    keys = [spec.key(SETTING) for spec in specs()]
    assert len(set(keys)) == len(keys)


def test_files_of_earlier_runs_are_read(tmp_path: Path) -> None:
    rows = Rows("x.json", tmp_path)
    rows.measure("a", lambda: {"ms": 1})
    assert not rows.wanted("a")
    later = Rows("x.json", tmp_path, again=True)
    assert later.rows["a"]["ms"] == 1
    assert later.wanted("a")
    later.measure("a", lambda: {"ms": 2})
    assert not later.wanted("a"), "once a run is enough"


def test_improvement_is_the_papers() -> None:
    def row(mode: str, ms: float) -> dict[str, Any]:
        return {
            "network": "table3:256", "mode": mode, "budget": "", "budget_bytes": None, "fits": True, "ms": ms,
            "offloaded_bytes": 1024, "simulated": {"error_percent": 7.0 if mode == "base(m)" else -1.0},
        }  # fmt: skip

    times = {"base(m)": 2091.0, "vdnn:conv(m)": 2491.0, "vdnn++:conv(m)": 2261.0, "vdnn++:all(m)": 9.0}
    rows = {f"table3:256 fp32 paper: {mode}": row(mode, ms) for mode, ms in times.items()}
    (found,) = improvements(rows)
    assert found["relative_improvement"] == pytest.approx(0.575)
    assert found["paper_relative_improvement"] == 0.575
    assert found["gain"] == pytest.approx(230 / 2491)
    (missed,) = misses(rows, [found])
    assert missed.endswith("paper: the simulator is more than 5 % off in 1 of 4 rows, +7.0 % for base(m)")
    slower = {**found, "gain": -0.02}
    assert next(iter(misses({}, [slower]))).endswith("is slower than vdnn:conv(m) by 2.0%")
    idle = {**slower, "offloaded_bytes": 0}
    assert next(iter(misses({}, [idle]))).endswith("by 2.0%, where nothing is copied out")


def test_modes_and_peers_meet_in_one_plot(tmp_path: Path) -> None:
    """Those of one network and precision, with the peer's memory once its allocator is tidy."""
    common = {"network": "alexnet_tv:256", "precision": "bf16", "target": "native", "fits": True, "ms": 5.0}
    modes = {
        "a": {**common, "mode": "vdnn++:conv(p)", "budget": "", "peak_bytes": 7},
        "b": {**common, "mode": "best", "budget": "75%", "peak_bytes": 8},
        "c": {**common, "mode": "base(p)", "budget": "", "fits": False, "simulated": {"ms": 4.0, "peak_bytes": 99}},
        "d": {**common, "mode": "base(m)", "budget": "", "fits": False, "simulated": None},
        "e": {**common, "mode": "base(m)", "budget": "", "target": "paper", "peak_bytes": 8},
    }
    peers = {
        "alexnet batch 256 bf16: torch compile 0.5": {"ms_with_copy": 9.0, "peak_bytes": 5, "steady_peak_bytes": 4},
        "alexnet batch 256 bf16: torch compile": {"ms_with_copy": 8.0, "peak_bytes": 5},
        "alexnet batch 256 bf16: keep": {"ms": 8.0, "peak_bytes": 5},
    }
    found = points(modes, peers)
    assert found == {
        ("alexnet:256", "bf16"): [
            Point("vdnn++", "conv(p)", 5.0, 7), Point("best", " in 75%", 5.0, 8), Point("base", "(p)", 4.0, 99, False),
            Point("torch compile", "0.5", 9.0, 4), Point("torch compile", "", 8.0, 5),
        ]
    }  # fmt: skip
    (ratio,) = ratios([*found["alexnet:256", "bf16"], Point("torch checkpoint", "2", 10.0, 7)])
    assert ratio == (Point("torch checkpoint", "2", 10.0, 7), Point("vdnn++", "conv(p)", 5.0, 7), 2.0)
    for kind, rows in (("modes", modes), ("peers", peers)):
        (tmp_path / f"{kind}-Some-Card.json").write_text(json.dumps({"rows": rows}))
    (path,) = written(tmp_path, tmp_path / "plots")
    assert path.name == "tradeoff-Some-Card-alexnet-256-bf16.png"
    assert path.stat().st_size > 5000


def test_what_the_plan_promises_of_conv_is_held_against_the_rows() -> None:
    def row(mode: str, ms: float, nbytes: int) -> dict[str, Any]:
        return {
            "network": "vgg16:256", "target": "native", "mode": mode, "budget": "", "budget_bytes": None, "fits": True,
            "ms": ms, "peak_bytes": nbytes,
        }  # fmt: skip

    for ms, nbytes, missed in ((109.0, 60, 0), (111.0, 60, 1), (109.0, 61, 1)):
        rows = {
            "vgg16:256 fp32 native: base(p)": row("base(p)", 100.0, 100),
            "vgg16:256 fp32 native: vdnn++:conv(p)": row("vdnn++:conv(p)", ms, nbytes),
        }
        assert len(list(misses(rows, []))) == missed


def test_pinned_memory_of_a_row_serves_the_next() -> None:
    with HostDevice() as device:
        with pinned_again(device):
            large, small = device.pinned(1000), device.pinned(10)
            device.give_back(large)
            device.give_back(small)
            again = [device.pinned(8), device.pinned(700)]
            assert [region.address for region in again] == [small.address, large.address]
            assert [region.nbytes for region in again] == [8, 700]
            assert device.memory_info().pinned == 1010, "none was taken"
            device.give_back(again[1])
            more = device.pinned(2000)
            assert device.memory_info().pinned == 2010, "the one that was spare made room"
            device.give_back(more)
            device.give_back(again[0])
            device.give_back(device.pinned(3000))
            assert device.memory_info().pinned == 3000, "all that were spare made room"
        assert device.memory_info().pinned == 0

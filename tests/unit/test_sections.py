"""The generated parts of the documentation take whatever rows the result files have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.checks import outcome
from bench.gpu_sections import all_modes, checks, compression, convolutions, gains, limits, modes, peers
from bench.markdown import origin, table
from bench.sections import PARTS, all_planners, planners, rewritten

HERE: dict[str, Any] = {
    "cpu": "a processor", "cores": 2, "python": "3.12", "versions": {"numpy": "2.4", "torch": None},
    "date": "2026-01-02", "commit": "0123456789abcdef+",
}  # fmt: skip
GIB = 2**30


def mode_row(mode: str, budget: str = "", **more: Any) -> dict[str, Any]:
    """A row of the modes bench that fits, unless `more` says otherwise."""
    return {
        "network": "vgg16:64", "batch": 64, "precision": "fp32", "target": "native", "mode": mode, "budget": budget,
        "fits": True, "ms": 50.0, "images_per_s": 1280.0, "peak_bytes": 2 * GIB, "arena_bytes": GIB, "pinned_bytes": 0,
        "context_bytes": GIB // 2,
        "offloaded_bytes": 0, "stall_ms": {"offload": 1.5, "prefetch": 0.01}, "simulated": {"ms": 51.0,
        "error_percent": 2.0, "peak_bytes": GIB}, "bounds": {"ms": 45.0}, "environment": HERE, **more,
    }  # fmt: skip


REFUSED: dict[str, Any] = {
    "fits": False, "needed_bytes": GIB, "ms": None, "peak_bytes": None, "simulated": None, "bounds": None
}  # fmt: skip


def write(folder: Path, name: str, found: Any) -> None:
    """A result file."""
    (folder / name).write_text(json.dumps(found), encoding="utf-8")


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, headers included."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_line_for_each_network_and_a_column_for_each_mode_that_has_rows(tmp_path: Path) -> None:
    rows = [
        mode_row("base(p)"), mode_row("best", "60%", ms=60.0),
        mode_row("base(p)", network="alexnet:256", batch=256, precision="bf16", **REFUSED),
    ]  # fmt: skip
    write(tmp_path, "modes-A-Card.json", {"card": "A Card", "rows": {str(i): row for i, row in enumerate(rows)}})
    text = modes(tmp_path)
    assert cells(text) == [
        ["network, batch", "`base(p)`", "`best` in 60%"],
        ["alexnet (256), bf16, native", "does not fit", "-"],
        ["vgg16 (64), fp32, native", "50.00 ms, 2.0 GiB", "60.00 ms, 2.0 GiB"],
    ]
    assert "A Card, a processor (2 cores), Python 3.12, numpy 2.4; 2026-01-02; commit 0123456789+" in text


def test_readme_has_the_card_with_the_most_rows_and_says_how_far_the_simulator_is(tmp_path: Path) -> None:
    far = {"ms": 40.0, "error_percent": -20.0, "peak_bytes": GIB + 1}
    rows = [mode_row("base(p)"), mode_row("keep(p)"), mode_row("best", "60%", simulated=far), mode_row("x", **REFUSED)]
    for card, found in (("A Card", rows[:1]), ("B Card", rows), ("C Card", rows[3:])):
        name = f"modes-{card.replace(' ', '-')}.json"
        write(tmp_path, name, {"card": card, "rows": {str(i): row for i, row in enumerate(found)}})
    text = modes(tmp_path)
    assert text.startswith("**B Card**\n")
    assert "within 5 % of the iteration in 2 of all 3 rows, in half of them within 2.0 %. The arena" in text
    assert "has the planned bytes in 2; the table has what the driver counts: 1024.0 MiB to 1024.0 MiB more" in text
    assert "CUDA's context takes 512.0 MiB beside that." in text
    assert "have those of A Card and C Card." in text
    assert re.findall(r"\*\*(. Card)\*\*", all_modes(tmp_path)) == ["A Card", "B Card", "C Card"]
    assert modes(tmp_path / "nowhere") == ""
    (tmp_path / "modes-A-Card.json").unlink()
    (tmp_path / "modes-B-Card.json").unlink()
    assert "imulated" not in modes(tmp_path)


def test_what_an_iteration_computes_and_copies_stands_beside_its_bound(tmp_path: Path) -> None:
    copies = {"compute_ms": 20.0, "out_ms": 15.0, "back_ms": 10.0, "ms": 40.0}
    rows = [
        mode_row("vdnn++:conv(p)", offloaded_bytes=GIB, bounds=copies),
        mode_row("best", "60%", offloaded_bytes=GIB, bounds={**copies, "compute_ms": 40.0}),
        mode_row("best", "75%", bounds=copies), mode_row("best", "least", **REFUSED),
    ]  # fmt: skip
    write(tmp_path, "modes-A-Card.json", {"card": "A Card", "rows": {str(i): row for i, row in enumerate(rows)}})
    assert cells(limits(tmp_path))[1:] == [
        ["vgg16 (64), fp32, native", "`vdnn++:conv(p)`", "20.00", "25.00", "40.00", "50.00", "copying", "1.25"],
        ["vgg16 (64), fp32, native", "`best` in 60%", "40.00", "25.00", "40.00", "50.00", "computing", "1.25"],
    ]


def test_vdnn_plus_plus_stands_beside_vdnn_and_beside_what_was_published(tmp_path: Path) -> None:
    times = {
        "base(p)": 2000.0,
        "vdnn:conv(p)": 3055.0,
        "vdnn++:conv(p)": 2900.0,
        "vdnn:dyn": 1990.0,
        "vdnn++:dyn": 2010.0,
    }
    network: dict[str, Any] = {"network": "vgg116:32", "batch": 32}
    rows = {
        f"vgg116:32 fp32 native: {mode}": mode_row(mode, ms=ms, offloaded_bytes=GIB * ("conv" in mode), **network)
        for mode, ms in times.items()
    }
    write(tmp_path, "modes-A-Card.json", {"card": "A Card", "rows": rows})
    write(
        tmp_path,
        "modes-B-Card.json",
        {"card": "B Card", "rows": {"vgg16:64 fp32 native: base(p)": mode_row("base(p)")}},
    )
    assert cells(gains(tmp_path))[1:] == [
        ["vgg116:32 fp32 native", "`conv(p)`", "1024.0 MiB", "2000.0", "3055.0", "2900.0", "5.1 %", "1.2 %", "14.7 %"],
        ["vgg116:32 fp32 native", "`dyn`", "0 B", "2000.0", "1990.0", "2010.0", "-1.0 %", "9.2 %", "-"],
    ]
    assert "B Card" not in gains(tmp_path)


def test_every_row_of_the_modes_bench_is_shown_with_the_simulators_error(tmp_path: Path) -> None:
    rows = {"a": mode_row("keep(m)"), "b": mode_row("unheard-of", "4GiB", **REFUSED)}
    write(tmp_path, "modes-X.json", {"card": "X", "rows": rows})
    first, second = cells(all_modes(tmp_path))[1:]
    assert (first[0], first[2], first[8:]) == ("`keep(m)`", "50.00", ["offload 1.5", "51.00", "+2.0 %", "45.00"])
    assert (second[:4], second[4], second[9:]) == (["`unheard-of`", "4GiB", "-", "-"], "-", ["-", "-", "-"])


def test_the_first_rows_picture_is_in_readme_and_every_one_on_the_page(tmp_path: Path) -> None:
    rows = [mode_row("base(p)"), mode_row("base(p)", precision="bf16"), mode_row("base(p)", network="alexnet_tv:256")]
    write(tmp_path, "modes-A-Card.json", {"card": "A Card", "rows": {str(i): row for i, row in enumerate(rows)}})
    assert "![" not in modes(tmp_path) + all_modes(tmp_path)
    for name in ("vgg16-64-fp32", "vgg16-64-bf16", "alexnet-256-fp32"):
        (tmp_path / f"tradeoff-A-Card-{name}.png").touch()
    assert re.findall(r"\]\((.*)\)", modes(tmp_path)) == ["bench/results/tradeoff-A-Card-vgg16-64-fp32.png"]
    assert re.findall(r"\]\((.*)\)", all_modes(tmp_path)) == [
        "../bench/results/tradeoff-A-Card-vgg16-64-fp32.png", "../bench/results/tradeoff-A-Card-vgg16-64-bf16.png",
        "../bench/results/tradeoff-A-Card-alexnet-256-fp32.png",
    ]  # fmt: skip

    rows.append(mode_row("base(p)", network="vgg16:256"))
    (tmp_path / "tradeoff-A-Card-vgg16-256-fp32.png").touch()
    write(tmp_path, "modes-A-Card.json", {"card": "A Card", "rows": {str(i): row for i, row in enumerate(rows)}})
    assert re.findall(r"\]\((.*)\)", modes(tmp_path)) == ["bench/results/tradeoff-A-Card-vgg16-256-fp32.png"], (
        "whatever was measured first"
    )


def test_compression_is_shown_beside_none(tmp_path: Path) -> None:
    row = {
        "network": "vgg16:64", "precision": "bf16", "mode": "vdnn++:all(p)", "uncompressed_ms": 40.0,
        "iteration_ms": 90.0, "pinned_raw_bytes": 3 * GIB, "pinned_bytes": 2 * GIB, "density": 0.541, "cpu_share": 4.48,
        "environment": HERE,
    }  # fmt: skip
    rows = {str(same): {**row, "matches_base": same} for same in (True, False)}
    write(tmp_path, "compress-X.json", {"card": "X", "rows": rows})
    first, second = cells(compression(tmp_path))[1:]
    assert first == [
        "vgg16, batch 64", "bf16", "`vdnn++:all(p)`", "40.00", "90.00", "3072.0 MiB", "2048.0 MiB", "0.54", "4.5",
        "bit-equal",
    ]  # fmt: skip
    assert second[-1] == "**differ**"


def test_pytorchs_time_has_the_batchs_copy_and_its_memory_is_the_steady_one(tmp_path: Path) -> None:
    rows = {
        "vgg16 batch 64 fp32: base": {"ms": 50.0, "peak_bytes": 3 * GIB, "environment": HERE},
        "vgg16 batch 64 fp32: torch eager": {
            "ms": 51.0, "ms_with_copy": 52.0, "peak_bytes": 9 * GIB, "steady_peak_bytes": 4 * GIB, "environment": HERE,
        },
        "vgg16 batch 64 bf16: torch eager": {"ms": 20.0, "peak_bytes": 2 * GIB, "environment": HERE},
    }  # fmt: skip
    write(tmp_path, "peers-X.json", {"card": "X", "rows": rows})
    assert cells(peers(tmp_path)) == [
        ["", "minidnn `base`", "PyTorch eager"],
        ["vgg16 batch 64 bf16", "-", "20.00 ms, 2.0 GiB"],
        ["vgg16 batch 64 fp32", "50.00 ms, 3.0 GiB", "52.00 ms, 4.0 GiB"],
    ]


def test_a_peer_with_cudnns_own_algorithms_stands_in_for_one_that_tried_them_all(tmp_path: Path) -> None:
    def row(ms: float) -> dict[str, Any]:
        return {"ms": ms, "peak_bytes": GIB, "environment": HERE}

    rows = {
        "vgg16 batch 64 fp32: torch compile heuristics": row(70.0), "vgg16 batch 64 tf32: torch compile": row(50.0),
        "vgg16 batch 64 tf32: torch compile heuristics": row(60.0),
    }  # fmt: skip
    write(tmp_path, "peers-X.json", {"card": "X", "rows": rows})
    text = peers(tmp_path)
    assert cells(text) == [
        ["", "PyTorch compile"],
        ["vgg16 batch 64 fp32", "70.00 ms, 1.0 GiB ¹"],
        ["vgg16 batch 64 tf32", "50.00 ms, 1.0 GiB"],
    ]
    assert "\n¹ without `cudnn.benchmark`\n" in text


def test_rows_that_were_measured_later_stand_with_their_network(tmp_path: Path) -> None:
    rows = [mode_row("base(p)"), mode_row("base(p)", precision="bf16"), mode_row("keep(p)"),
            mode_row("base(p)", network="vgg16:8", batch=8)]  # fmt: skip
    write(tmp_path, "modes-X.json", {"card": "X", "rows": {str(i): row for i, row in enumerate(rows)}})
    assert re.findall(r"vgg16 \(\d+\), \w+|`\w+\(p\)`", all_modes(tmp_path)) == [
        "vgg16 (8), fp32", "`base(p)`", "vgg16 (64), fp32", "`base(p)`", "`keep(p)`", "vgg16 (64), bf16", "`base(p)`",
    ]  # fmt: skip


def test_planners_that_never_fit_have_a_dash(tmp_path: Path) -> None:
    row = {
        "case": "VGG", "budgets": 20, "mean_ratio": {"best": 1.05, "tflms": None}, "fits": {"best": 20, "tflms": 0},
        "within": 19, "worst_ratio": 1.25,
    }  # fmt: skip
    write(tmp_path, "planners.json", {**HERE, "near": 1.2, "summary": [row]})
    assert cells(planners(tmp_path)) == [
        ["network (batch), GPU", "`best`", "`tflms`", "`best` within 1.2", "worst of `best`"],
        ["VGG", "1.050 (20)", "-", "19/20", "1.250"],
    ]
    (tmp_path / "planners_v100.png").touch()
    assert all_planners(tmp_path).startswith("![planners_v100](../bench/results/planners_v100.png)\n\n| network")


def test_planners_that_were_cut_short_are_not_mentioned(tmp_path: Path) -> None:
    write(tmp_path, "planners.json", HERE)
    (tmp_path / "planners_v100.png").touch()
    assert all_planners(tmp_path) == ""


def test_convolutions_add_up_the_fastest_plan_of_each_problem_as_often_as_it_occurs(tmp_path: Path) -> None:
    def plan(layer: str, ms: float, times: int, workspace: int, deterministic: bool = True) -> dict[str, Any]:
        return {"precision": "fp32", "layer": layer, "function": "f", "ms": ms, "times": times, "workspace": workspace,
                "deterministic": deterministic}  # fmt: skip

    plans = [plan("a", 1.0, 2, 8, False), plan("a", 2.0, 2, 0), plan("b", 3.0, 1, 4)]
    write(tmp_path, "convolutions-X.json", {"card": "X", "environment": HERE, "plans": plans})
    assert cells(convolutions(tmp_path))[1] == ["fp32", "3", "5.00 (2)", "7.00 (2)", "4.00 (1)"]


def test_rows_of_several_machines_name_them_all() -> None:
    other = {**HERE, "cpu": "another", "date": "2026-01-05", "commit": None}
    text = origin("f.json", {"rows": {"a": {"environment": HERE}, "b": {"environment": other}}}, "bench.py")
    assert "a processor (2 cores), Python 3.12, numpy 2.4; another (2 cores), Python 3.12, numpy 2.4;" in text
    assert "2026-01-02 to 2026-01-05; commit 0123456789+, unknown" in text


def test_a_table_without_lines_is_nothing() -> None:
    assert table(["a", "b"], []) == ""


def test_a_part_that_nobody_makes_is_an_error() -> None:
    with pytest.raises(KeyError, match="unheard"):
        rewritten("<!-- results: unheard -->\n<!-- end of unheard -->\n")


def test_text_outside_of_marks_stays() -> None:
    page = "before <!-- results: something\n<!-- end of page -->\nafter\n"
    assert rewritten(page) == page


def test_parts_make_something_of_the_projects_own_results() -> None:
    for name in PARTS:
        assert "|---" in rewritten(f"<!-- results: {name} -->\n<!-- end of {name} -->\n")


def test_a_process_of_tests_holds_where_all_pass_and_the_sanitizer_has_nothing_to_say() -> None:
    clean = "....\n335 passed, 911 deselected in 27.74s\n========= ERROR SUMMARY: 0 errors\n"
    found = outcome(0, clean)
    assert (found["holds"], found["passed"], found["sanitizer"]) == (True, 335, ["ERROR SUMMARY: 0 errors"])
    assert not outcome(0, clean.replace("0 errors", "3 errors"))["holds"]
    hazards = "80 passed in 1s\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    assert not outcome(0, hazards)["holds"]
    assert not outcome(1, "1 failed, 8 passed in 77.65s")["holds"]
    assert not outcome(0, "24 deselected in 0.1s")["holds"]


def test_every_kind_of_check_has_a_line(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "digits": {"holds": True, "test_accuracy": {"fp32": 0.9861, "bf16": 0.985}},
        "vgg11": {"holds": False, "gap": {"fp32": 0.3}},
        "torchvision": {"holds": True, "logits": {"vgg16": 2e-6}},
        "modes": {"holds": True, "equal": {"fp32": {"base": True, "keep": True}}, "steps": 20},
        "steps": {"holds": True, "steps": 1000, "grown": {"vdnn++:all": {}}},
        "memcheck float32": {"holds": True, "passed": 335, "sanitizer": ["ERROR SUMMARY: 0 errors"]},
        "tests": {"holds": False, "passed": 8, "failed": 2, "error": 1, "sanitizer": []},
    }  # fmt: skip
    rows = {name: {**row, "environment": HERE} for name, row in rows.items()}
    write(tmp_path, "checks-X.json", {"card": "X", "rows": rows})
    assert [line[1:] for line in cells(checks(tmp_path))[1:]] == [
        ["holds", "fp32 98.61%, bf16 98.50%"], ["**does not hold**", "largest gap, of the largest loss: fp32 3.0e-01"],
        ["holds", "largest gap, of the largest logit: vgg16 2.0e-06"],
        ["holds", "2 of 2 runs have the gradients of base after 20 steps"],
        ["holds", "1000 steps each of `vdnn++:all`"],
        ["holds", "335 tests passed; ERROR SUMMARY: 0 errors"],
        ["**does not hold**", "8 tests passed, 2 failed, 1 with errors"],
    ]  # fmt: skip

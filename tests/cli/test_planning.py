"""`memory`, `simulate` and `compare` as a user types them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minidnn import Trainer, models, nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Target
from minidnn.profile.model import modelled
from minidnn.units import format_size
from tests.cli import json_of, minidnn, refuse, succeed

MEMORY_KEYS = {
    "aggregate_peak_bytes", "forward_peak_bytes", "backward_peak_bytes", "pool_bytes", "placed_bytes",
    "lower_bound_bytes", "parameter_bytes", "pinned_bytes", "offloaded_bytes", "prefetch",
}  # fmt: skip
MODE_KEYS = {
    "mode", "iteration_ms", "stall_ms", "peak_bytes", "pool_bytes", "pinned_bytes", "offloaded_bytes", "fits",
}  # fmt: skip


def by_mode(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["mode"]: row for row in result["modes"]}


# -- memory


def test_memory_reports_the_papers_figures() -> None:
    found = json_of("memory", "alexnet", "--batch", "256", "--mode", "vdnn:all(m)")
    assert found.keys() >= MEMORY_KEYS
    assert found["mode"] == "vdnn:all(m)"
    assert round(found["forward_peak_bytes"] / 2**20) == 435
    assert round(found["backward_peak_bytes"] / 2**20) == 855
    assert found["placed_bytes"] == found["aggregate_peak_bytes"] == found["lower_bound_bytes"]
    assert [10, 7] in found["prefetch"]


def test_memory_order_and_fit_change_the_searched_pool_alone() -> None:
    first = json_of("memory", "alexnet", "--batch", "256", "--mode", "vdnn:conv(m)")
    other = json_of("memory", "alexnet", "--batch", "256", "--mode", "vdnn:conv(m)", "--order", "derivative-first",
                    "--fit", "high-end")  # fmt: skip
    assert other["pool_bytes"] != first["pool_bytes"]
    assert other["placed_bytes"] == first["placed_bytes"]


@pytest.mark.parametrize("target", ["paper", "native"])
@pytest.mark.parametrize("mode", ["base(m)", "keep(m)", "vdnn:conv(m)", "vdnn++:all(m)"])
def test_memory_and_simulate_say_what_a_trainer_takes(mode: str, target: str) -> None:
    case = ("smallvgg", "--batch", "8", "--target", target)
    net, optimizer = models.create("smallvgg"), optim.SGD(0.01, momentum=0.9)
    with Trainer(net, nn.CrossEntropyLoss(), optimizer, 8, device="host", target=target, memory=mode) as trainer:
        taken = trainer.schedule.peak_bytes
    assert json_of("memory", *case, "--mode", mode)["peak_bytes"] == taken
    simulated = json_of("simulate", *case, "--gpu", "v100", "--modes", f"keep(m),{mode}")
    assert by_mode(simulated)[mode]["peak_bytes"] == taken


@pytest.mark.parametrize("gpu", ["gtx1080ti", "v100", "t4"])
def test_a_card_without_tensor_cores_for_a_precision_keeps_its_fp32_kernels(gpu: str) -> None:
    case = ("simulate", "vgg11", "--batch", "16", "--gpu", gpu, "--target", "native", "--modes", "base(p)")
    ms = {p: by_mode(json_of(*case, "--precision", p))["base(p)"]["iteration_ms"] for p in ("fp32", "tf32", "bf16")}
    assert ms["tf32"] == ms["fp32"]
    assert ms["bf16"] < ms["fp32"]  # less traffic


def test_native_graphs_are_in_the_layout_that_a_card_runs() -> None:
    """VGG-16(256) in bf16 took 43.7 ms on an H200 (bench/results); in NCHW the model says 57."""
    case = ("vgg16", "--batch", "256", "--gpu", "h200", "--precision", "bf16", "--target", "native")
    found = json_of("simulate", *case, "--modes", "base(p)")
    assert by_mode(found)["base(p)"]["iteration_ms"] == pytest.approx(43.7, rel=0.08)
    planned = succeed("plan", *case)
    assert planned.startswith("vgg16, batch 256, bf16, native graph, modelled H200")


def test_memory_native_target_needs_less_than_the_papers() -> None:
    paper, native = (json_of("memory", "vgg11", "--mode", "keep(m)", "--target", t) for t in ("paper", "native"))
    assert native["placed_bytes"] < paper["placed_bytes"]


def test_memory_with_workspaces_of_a_modelled_gpu_allows_fast_algorithms() -> None:
    found = json_of("memory", "vgg16", "--mode", "vdnn:all(p)", "--gpu", "gtx1080ti")
    least = json_of("memory", "vgg16", "--mode", "vdnn:all(m)", "--gpu", "gtx1080ti")
    assert found["placed_bytes"] > least["placed_bytes"]


def test_memory_traces_save_and_replay(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    saved = json_of("memory", "alexnet", "--mode", "vdnn:all(m)", "--save-trace", str(path))
    replayed = json_of("memory", "--trace", str(path), "--fit", "best-fit")
    for key in ("aggregate_peak_bytes", "pool_bytes", "placed_bytes"):
        assert replayed[key] == saved[key]


def test_memory_live_says_how_often_timing_ends_in_a_dead_end() -> None:
    found = json_of("memory", "alexnet", "--batch", "256", "--mode", "vdnn++:all(m)", "--placement", "live")
    assert found["observed_pool_bytes"] >= found["pool_bytes"]
    assert 0 < found["dead_ends"] < found["timings"]


def test_memory_draws_the_map(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    succeed("memory", "alexnet", "--mode", "vdnn:all(m)", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory"], "either a MODEL or --trace"),
        (["memory", "alexnet", "--trace", "x"], "either a MODEL or --trace"),
        (["memory", "alexnet", "--mode", "vdnn:all"], "--profile FILE or --gpu NAME"),
        (["memory", "alexnet", "--mode", "vdmn"], "memory mode is 'vdmn'"),
        (["memory", "alexnet", "--fit", "tight"], "best-fit"),
        (["memory", "alexnet", "--gpu", "voodoo2", "--mode", "base(p)"], "gtx1080ti"),
        (["memory", "alexnet", "--budget", "1MiB"], "needs"),
        (["memory", "--trace", "/nowhere"], "/nowhere"),
        (["memory", "alexnet", "--profile", "/nowhere"], "/nowhere"),
        (["memory", "alexnet", "--batch", "0"], "at least 1"),
        (["simulate", "alexnet"], "--gpu NAME"),
        (["simulate", "alexnet", "--gpu", "gtx1080ti", "--modes", "base,,vdnnn"], "memory mode is 'vdnnn'"),
        (["simulate", "alexnet", "--gpu", "gtx1080ti", "--modes", ","], "at least one mode"),
        (["compare", "smallnet", "--device", "abacus"], "device is 'abacus'"),
        (["compare", "smallnet", "--data", "digits", "--batch", "4000"], "1437 images"),
    ],
)
def test_wrong_uses_are_refused_in_one_sentence(arguments: list[str], says: str) -> None:
    assert says in refuse(*arguments)


def test_memory_says_what_is_needed_in_all_and_whether_that_fits_the_card() -> None:
    arguments = ("memory", "vgg16", "--batch", "128", "--gpu", "rtx2080ti", "--mode")
    for mode, ending in (("keep(p)", "does not fit rtx2080ti, which has 11.00 GiB"),
                         ("vdnn++:all(m)", "fits rtx2080ti, which has 11.00 GiB")):  # fmt: skip
        found, text = json_of(*arguments, mode), succeed(*arguments, mode)
        assert re.search(f"device memory in all, .* {format_size(found['peak_bytes'])} +{found['peak_bytes']}\n", text)
        assert re.search(f"what else stays .* {found['persistent_bytes']}\n", text)
        assert text.rstrip().endswith(ending)
    assert "rtx2080ti" not in succeed("memory", "alexnet")


def test_memory_of_a_planner_is_that_of_its_plan_for_the_card_or_the_budget() -> None:
    for budget in (11 * 2**30, 6 * 2**30):
        found = json_of("memory", "vgg16", "--batch", "128", "--gpu", "rtx2080ti", "--mode", "best", "--budget",
                        str(budget))  # fmt: skip
        assert 0.8 * budget < found["peak_bytes"] <= budget
        assert (found["offloaded_bytes"] > 0) == (budget == 6 * 2**30)
    whole = json_of("memory", "vgg16", "--batch", "128", "--gpu", "rtx2080ti", "--mode", "best")
    assert whole["peak_bytes"] <= 11 * 2**30
    assert "needs at least" in refuse("memory", "alexnet", "--mode", "best", "--gpu", "k40", "--budget", "1MiB")


# -- simulate


def test_simulate_predicts_every_mode_and_keeps_those_that_do_not_fit() -> None:
    found = json_of("simulate", "alexnet", "--batch", "256", "--gpu", "gtx1080ti", "--budget", "1700MiB", "--check")
    rows = by_mode(found)
    assert all(row.keys() >= MODE_KEYS | {"lower_bound_ms"} for row in rows.values())
    assert rows["base(p)"]["fits"] is False
    assert rows["base(p)"]["iteration_ms"] is None
    assert rows["base(p)"]["peak_bytes"] > 1700 * 2**20
    for row in rows.values():
        if row["fits"]:
            assert row["iteration_ms"] >= row["lower_bound_ms"]
            assert row["peak_bytes"] <= 1700 * 2**20
    assert rows["vdnn++:all(m)"]["iteration_ms"] < rows["vdnn:all(m)"]["iteration_ms"]


def test_simulate_writes_page_plot_and_trace(tmp_path: Path) -> None:
    page, plot, trace = tmp_path / "r.html", tmp_path / "r.png", tmp_path / "r.json"
    succeed("simulate", "alexnet", "--gpu", "gtx970", "--modes", "base,vdnn:all(m),vdnn++:all(m)",
            "--html", str(page), "--plot", str(plot), "--trace", str(trace))  # fmt: skip
    text = page.read_text()
    assert "vdnn++:all(m)" in text
    assert "data:image/png;base64" in text
    assert "http://" not in text
    assert "https://" not in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "C"}


# -- compare


def test_compare_runs_modes_for_real_and_finds_equal_gradients(tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    found = json_of("compare", "smallvgg", "--data", "digits", "--batch", "16", "--device", "host", "--check",
                    "--modes", "base(p),base(m),keep,vdnn:all(m),vdnn++:conv(p),vdnn++:dyn",
                    "--html", str(page))  # fmt: skip
    rows = by_mode(found)
    assert all(row.keys() >= MODE_KEYS | {"loss", "gradient_sha256", "lower_bound_ms"} for row in rows.values())
    assert len({row["gradient_sha256"] for row in rows.values()}) == 1, "all algorithms of the host give equal bits"
    assert all(row["matches_base"] for row in rows.values())
    assert rows["vdnn:all(m)"]["pinned_bytes"] > 0
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize("interleaving", ["lazy", "random", "threads"])
def test_compare_under_other_interleavings(interleaving: str) -> None:
    found = json_of("compare", "smallvgg", "--data", "digits", "--batch", "8", "--device", "host", "--steps", "1",
                    "--modes", "base(m),vdnn++:all(m)", "--interleaving", interleaving)  # fmt: skip
    assert len({row["gradient_sha256"] for row in found["modes"]}) == 1


def test_all_modes_are_compared_but_for_planners_where_placement_is_live() -> None:
    arguments = ("simulate", "smallvgg", "--gpu", "k40", "--batch", "8")
    planned, live = (by_mode(json_of(*arguments, "--placement", kind)) for kind in ("planned", "live"))
    assert list(planned) == [*live, "best"]
    said = refuse("train", "smallvgg", "--device", "host", "--placement", "live", "--budget", "1KiB")
    assert "base, keep and vdnn++ do not fit" in said
    assert "best" not in said
    said = refuse("memory", "smallvgg", "--gpu", "k40", "--placement", "live", "--mode", "autoswap")
    assert "memory mode autoswap orders its copies by offsets: use 'planned'" in said


def test_a_profile_says_in_which_layout_its_target_was_measured(tmp_path: Path) -> None:
    """A card without tensor cores measures NCHW at every precision."""
    target = Target("native", "tf32", "NCHW")
    net = models.create("smallvgg")
    graph = build(net, nn.CrossEntropyLoss(), (4, 1, 8, 8), target, optimizer=optim.SGD(0.01, momentum=0.9))
    replace(modelled(graph, "t4"), target=target).save(tmp_path / "t4.json")
    case = ("memory", "smallvgg", "--batch", "4", "--precision", "tf32", "--profile", str(tmp_path / "t4.json"))
    given, named = json_of(*case, "--mode", "keep(m)"), json_of(*case, "--mode", "keep(m)", "--target", "native")
    assert given == named
    said = refuse(*case[:4], *case[6:], "--target", "native")
    assert "--precision is fp32" in said


def test_where_no_mode_fits_nothing_is_written_and_one_sentence_says_so(tmp_path: Path) -> None:
    files = [part for kind in ("plot", "trace", "html") for part in (f"--{kind}", str(tmp_path / kind))]
    done = minidnn("simulate", "smallvgg", "--gpu", "k40", "--budget", "1KiB", "--modes", "base,keep", *files)
    assert done.returncode == 2
    assert done.stderr.startswith("minidnn: no mode fits the budget 1.0 KiB; of these keep needs the least")
    assert all(f"--{kind} {tmp_path / kind}" in done.stderr for kind in ("plot", "trace", "html"))
    done = minidnn("compare", "smallvgg", "--data", "digits", "--device", "host", "--budget", "1KiB")
    assert done.returncode == 2
    assert done.stderr.startswith("minidnn: no mode fits the budget 1.0 KiB; of these best needs the least")
    assert list(tmp_path.iterdir()) == []


def test_compare_keeps_a_mode_that_does_not_fit_as_a_row() -> None:
    done = minidnn("compare", "smallvgg", "--data", "digits", "--batch", "16", "--device", "host", "--json",
                   "--modes", "base(m),vdnn:all(m)", "--budget", "1400KiB")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = by_mode(json.loads(done.stdout))
    assert [rows[m]["fits"] for m in ("base(m)", "vdnn:all(m)")] == [False, True]
    assert rows["base(m)"]["iteration_ms"] is None
    assert rows["vdnn:all(m)"]["peak_bytes"] <= 1400 * 1024

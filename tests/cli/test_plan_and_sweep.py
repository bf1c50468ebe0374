"""`plan`, `sweep`, and planners as modes of the other commands, as a user types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli import json_of, refuse, succeed

PLAN = ("plan", "vgg11", "--batch", "32", "--gpu", "v100")


def needed() -> int:
    """The smallest budget, as a refusal says it."""
    found = re.search(r"needs at least (\d+) bytes", refuse(*PLAN, "--budget", "1MiB"))
    assert found is not None
    return int(found[1])


def test_a_plan_says_what_leaves_and_what_it_costs() -> None:
    budget = needed() * 5 // 4
    found = json_of(*PLAN, "--budget", str(budget), "--check")
    assert found["peak_bytes"] <= budget == found["budget"]
    assert found["iteration_ms"] >= found["lower_bound_ms"] >= found["paper_bound_ms"] * 0.5 > 0
    assert all(s["more_ms"] > 0 for s in found["slower_algorithms"])
    away = [a for a in found["activations"] if a["offloaded"]]
    assert {"tensor", "nbytes", "gone_before", "back_before", "needed", "why"} <= set(away[0])
    assert max(nbytes for _, nbytes in found["memory"]) <= budget
    text = succeed(*PLAN, "--budget", str(budget), "--policy", "greedy")
    for word in ("leaves", "lacks", "gone before", "times the lower bound", "Theorem 2", "peak", "█"):
        assert word in text


def test_of_a_mode_with_a_set_the_set_is_the_reason() -> None:
    found = json_of(*PLAN, "--policy", "vdnn:conv")
    assert {a["why"] for a in found["activations"] if a["offloaded"]} == {"it is in the set of vdnn:conv"}


def test_times_of_no_card_are_said_to_be_that() -> None:
    assert "these times are nominal, those of no card: give --gpu NAME" in succeed("plan", "smallvgg")
    assert "nominal" not in succeed(*PLAN)


def test_the_smallest_budget_is_planned_and_one_byte_less_refused() -> None:
    least = needed()
    assert json_of(*PLAN, "--budget", str(least))["peak_bytes"] == least
    assert f"needs at least {least} bytes" in refuse(*PLAN, "--budget", str(least - 1))


def test_without_times_planners_use_nominal_ones(tmp_path: Path) -> None:
    found = json_of("plan", "smallnet", "--batch", "8", "--policy", "dynprog", "--plot", str(tmp_path / "plan.png"))
    assert found["profile"] == "nominal"
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_sweep_goes_from_the_least_to_the_most_that_helps(tmp_path: Path) -> None:
    plots = ("--plot", str(tmp_path / "ratio.png"), "--throughput", str(tmp_path / "rate.png"))
    found = json_of(
        "sweep", "vgg11", "--batch", "16", "--gpu", "v100", "--budgets", "4", "--policies", "greedy,keep(p)",
        "--bandwidths", "1,4", *plots,
    )  # fmt: skip
    assert found["budgets"] == sorted(found["budgets"])
    assert len(found["budgets"]) == 4
    greedy, kept = found["policies"]["greedy"]["ms"], found["policies"]["keep(p)"]["ms"]
    assert greedy == sorted(greedy, reverse=True)
    assert kept[0] is None
    assert all(ms >= bound for ms, bound in zip(greedy, found["lower_bound_ms"], strict=True))
    slow, fast = found["bandwidths"].values()
    assert fast[0] < slow[0]
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("ratio.png", "rate.png"))


def test_a_sweep_plans_the_iteration_that_plan_does() -> None:
    """In fp32 the native iteration has an op more than the papers', which copies the batch."""
    network = ("smallvgg", "--batch", "16", "--gpu", "v100", "--target", "native")
    found = json_of("sweep", *network, "--budgets", "3", "--policies", "greedy")
    points = found["policies"]["greedy"]
    for budget, ms, nbytes in zip(found["budgets"], points["ms"], points["peak_bytes"], strict=True):
        planned = json_of("plan", *network, "--policy", "greedy", "--budget", str(budget))
        assert (planned["iteration_ms"], planned["peak_bytes"]) == (ms, nbytes)


def test_planners_are_modes_of_simulate_and_compare() -> None:
    budget = str(needed() * 5 // 4)
    modes = ("--modes", "best,greedy,vdnn++:all(p)", "--check")
    rows = json_of("simulate", *PLAN[1:], "--budget", budget, *modes)["modes"]
    times = {row["mode"]: row["iteration_ms"] for row in rows if row["fits"]}
    assert times["best"] == min(times.values())
    found = json_of("compare", "smallnet", "--batch", "4", "--device", "host", "--modes", "base,best,dynprog")
    assert all(row["matches_base"] for row in found["modes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*PLAN, "--policy", "clever"), ("'clever'", "best")),
        ((*PLAN, "--placement", "live"), ("--placement", "live")),
        (("sweep", "vgg11", "--gpu", "v100", "--policies", ","), ("--policies", "best,greedy")),
        (("sweep", "vgg11", "--gpu", "v100", "--budgets", "1001"), ("--budgets", "1001", "at most 1000")),
        (("sweep", "vgg11", "--gpu", "v100", "--bandwidths", "1,fast", "--throughput", "x.png"), ("'fast'", "0.001")),
        (("sweep", "vgg11", "--gpu", "v100", "--bandwidths", "1,1e-320", "--throughput", "x.png"), ("1e-320", "1000")),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    sentence = refuse(*arguments)
    assert all(word in sentence for word in words), sentence

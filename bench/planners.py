"""Planners at 20 budgets each: time over the lower bound, and how long planning takes. Simulated; needs no GPU.

    python bench/planners.py [--out bench/results] [--budgets 20] [--plots]

VGG-16(256), VGG-116(32) and AlexNet(1024) on the modelled V100 of Beaumont et al. (12.5 GB/s) and on an H100, from the
smallest budget that works to what the fastest plan needs (their Figure 2; theirs are ResNet, DenseNet and Inception
chains). Then images per second against the memory limit at several bandwidths, with optimal rematerialization (their
Figure 3). Where no policy is within 1.2 of the bound this says so. The bound is that of what is executed
(minidnn/run/bound.py), which is tighter than the paper's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import describe
from minidnn import nn, optim
from minidnn.graph.build import build
from minidnn.graph.graph import Graph
from minidnn.models import create
from minidnn.plan.registry import PLANNERS
from minidnn.profile.model import modelled
from minidnn.report import text_table
from minidnn.report.sweeps import ratio_plot, throughput_plot
from minidnn.run.choose import Options, choose
from minidnn.run.sweep import Sweep, at_bandwidth, budgets_of, sweep
from minidnn.units import format_size

CASES = (("VGG-16(256)", "vgg16", 256), ("VGG-116(32)", "vgg116", 32), ("AlexNet(1024)", "alexnet", 1024))
GPUS = ("v100", "h100")
POLICIES = ("best", "dynprog", "greedy", "vdnn-threshold", "autoswap", "tflms")
MODES = ("vdnn:dyn", "vdnn++:dyn", "vdnn++:conv(p)", "vdnn++:all(p)", "vdnn++:conv(m)", "vdnn++:all(m)")
NEAR = 1.2
FACTORS = (1, 2, 3)
LONGEST = ("VGG-191(32)", "vgg191", 32)


def graph_of(model: str, batch: int) -> Graph:
    """fp32, NCHW, the papers' graph, SGD with momentum."""
    net = create(model)
    assert net.input_shape is not None
    return build(net, nn.CrossEntropyLoss(), (batch, *net.input_shape), optimizer=optim.SGD(0.01, momentum=0.9))


def figure_2(count: int) -> dict[str, Sweep]:
    """Every case on every GPU."""
    found = {}
    for gpu in GPUS:
        for title, model, batch in CASES:
            graph = graph_of(model, batch)
            profile = modelled(graph, gpu)
            name = f"{title}, {gpu}"
            print(name, flush=True)
            found[name] = sweep(graph, profile, (*POLICIES, *MODES), budgets_of(graph, profile, count))
    return found


def summary(sweeps: dict[str, Sweep]) -> list[dict[str, Any]]:
    """Per case: where `best` is within NEAR of the bound, its worst ratio, and whether anything is faster than it."""
    rows = []
    for name, found in sweeps.items():
        best = [p.ms for p in found.points["best"]]
        ratios = [ms / bound if ms else None for ms, bound in zip(best, found.bound_ms, strict=True)]
        beaten = [
            (policy, budget)
            for policy, points in found.points.items()
            for p, ms, budget in zip(points, best, found.budgets, strict=True)
            if p.ms is not None and (ms is None or p.ms < ms * (1 - 1e-9))
        ]
        far = [b for b, ratio in zip(found.budgets, ratios, strict=True) if ratio is None or ratio > NEAR]
        rows.append(
            {
                "case": name, "within": sum(r is not None and r <= NEAR for r in ratios), "budgets": len(ratios),
                "no_schedule_within_found_at": far, "worst_ratio": max(r for r in ratios if r), "beaten": beaten,
                "mean_ratio": {
                    policy: _mean([p.ms / b for p, b in zip(points, found.bound_ms, strict=True) if p.ms])
                    for policy, points in found.points.items()
                },
                "fits": {policy: sum(p.ms is not None for p in points) for policy, points in found.points.items()},
                "longest_plan_s": {
                    policy: round(max(p.plan_s for p in points), 2) for policy, points in found.points.items()
                },
            }
        )  # fmt: skip
    return rows


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def figure_3(count: int) -> dict[str, Any]:
    """VGG-16(256) on the V100: `best` at one, two and three times its link, and rematerialization."""
    title, model, batch = CASES[0]
    graph = graph_of(model, batch)
    profile = modelled(graph, GPUS[0])
    budgets = budgets_of(graph, profile, count)
    curves: dict[str, list[float | None]] = {}
    rematerialized: tuple[float | None, ...] = ()
    for factor in FACTORS:
        found = sweep(graph, at_bandwidth(profile, factor), ("best",), budgets)
        curves[f"{12.5 * factor:g} GB/s"] = [p.ms for p in found.points["best"]]
        rematerialized = found.rematerialized_ms if factor == 1 else rematerialized
    return {
        "case": f"{title}, {GPUS[0]}", "batch": batch, "budgets": list(budgets), "ms": curves,
        "rematerialized_ms": list(rematerialized),
    }  # fmt: skip


def planning_times() -> list[dict[str, Any]]:
    """Seconds to plan the deepest network, alone on one core (processor time), at three budgets, each policy."""
    title, model, batch = LONGEST
    graph = graph_of(model, batch)
    profile = modelled(graph, "h100")
    low, *middle, _ = budgets_of(graph, profile, 5)
    rows = []
    for budget in (low, middle[0], middle[1]):
        seconds = {}
        for policy in sorted(PLANNERS):
            began = time.process_time()
            try:
                choose(graph, policy, profile, Options(budget=budget))
            except Exception as error:
                if type(error).__name__ != "BudgetError":
                    raise
            seconds[policy] = round(time.process_time() - began, 2)
        rows.append({"case": title, "budget": budget, "seconds": seconds})
    return rows


def _print(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> None:
    columns = (*POLICIES, "vdnn++:dyn")
    print("\nmean of time / lower bound over the budgets that fit (how many)")
    lines = [
        [r["case"], *(f"{r['mean_ratio'][c]:.3f} ({r['fits'][c]})" if r["mean_ratio"][c] else "-" for c in columns),
         f"{r['within']}/{r['budgets']}", f"{r['worst_ratio']:.3f}", "yes" if r["beaten"] else "never"]
        for r in rows
    ]  # fmt: skip
    print(text_table(["case", *columns, f"best <= {NEAR}", "worst best", "best beaten"], lines))
    print("\nplanning, seconds of processor time")
    policies = list(times[0]["seconds"])
    lines = [[t["case"], format_size(t["budget"]), *(f"{t['seconds'][p]:.2f}" for p in policies)] for t in times]
    print(text_table(["case", "budget", *policies], lines))


def main() -> int:
    """Print, write JSON, and with --plots the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the result files")
    parser.add_argument("--budgets", type=int, default=20, help="budgets of each case")
    parser.add_argument("--plots", action="store_true", help="draw Figures 2 and 3")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sweeps = figure_2(args.budgets)
    rows, three, times = summary(sweeps), figure_3(args.budgets), planning_times()
    _print(rows, times)
    result = {
        **describe(), "near": NEAR, "summary": rows, "planning": times, "figure_3": three,
        "figure_2": {name: found.as_dict() for name, found in sweeps.items()},
    }  # fmt: skip
    (args.out / "planners.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.plots:
        for gpu in GPUS:
            panels = {name: found for name, found in sweeps.items() if name.endswith(gpu)}
            ratio_plot(panels, args.out / f"planners_{gpu}.png")
        throughput_plot(
            {f"best, {rate}": ms for rate, ms in three["ms"].items()}, three["rematerialized_ms"], three["budgets"],
            three["batch"], args.out / "planners_throughput.png", title=f"{three['case']}",
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

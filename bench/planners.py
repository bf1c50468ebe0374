"""Planners at 20 budgets each: time over the lower bound, and how long planning takes. Simulated; needs no GPU.

    python bench/planners.py [--out bench/results] [--budgets 20] [--plots] [--again]

VGG-16(256), VGG-116(32) and AlexNet(1024) on the modelled V100 of Beaumont et al. (12.5 GB/s) and on a modelled H100,
and whatever `minidnn profile` has measured on a GPU (profile-*.json among the results), from the smallest budget that
works to what the fastest plan needs (their Figure 2; theirs are ResNet, DenseNet and Inception chains). Then images per
second against the memory limit at several bandwidths, with optimal rematerialization (their Figure 3). Where no policy
is within 1.2 of the bound this says so. The bound is that of what is executed (minidnn/run/bound.py), which is tighter
than the paper's.

Takes some minutes. Each case is saved as soon as it is done, and left out by the next run for as long as the code that
plans is the same (`--again` makes all of them anew). Fails where `best` is slower than anything else, or anything
faster than the bound or larger than its budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT, describe
from minidnn import nn, optim
from minidnn.errors import BudgetError
from minidnn.graph.graph import Graph, Target
from minidnn.models import create
from minidnn.plan.registry import PLANNERS, parse_mode
from minidnn.profile.model import modelled
from minidnn.profile.profile import Profile
from minidnn.report import text_table
from minidnn.report.sweeps import ratio_plot, throughput_plot
from minidnn.run.choose import Options, choose
from minidnn.run.program import Purpose, Recipe
from minidnn.run.sweep import Sweep, at_bandwidth, budgets_of, sweep
from minidnn.schedule.check import verify
from minidnn.units import format_size

CASES = (("AlexNet(1024)", "alexnet", 1024), ("VGG-16(256)", "vgg16", 256), ("VGG-116(32)", "vgg116", 32))
GPUS = ("v100", "h100")
MEASURED = "measured"
"""Beside those: what was measured on a GPU."""
POLICIES = ("best", "dynprog", "greedy", "vdnn-threshold", "autoswap", "tflms")
MODES = ("vdnn:dyn", "vdnn++:dyn", "vdnn++:conv(p)", "vdnn++:all(p)", "vdnn++:conv(m)", "vdnn++:all(m)")
NEAR = 1.2
FACTORS = (1, 2, 3)
LONGEST = ("VGG-191(32)", "vgg191", 32)
PLANNING_BUDGETS = 8
CODE = ("plan/*.py", "profile/*.py", "run/bound.py", "run/whole_copies.py", "run/choose.py", "run/simulator.py")
"""What results depend on most, in minidnn."""


@dataclass(frozen=True)
class Problem:
    """A network, and what its ops take on a GPU."""

    name: str
    graph: Graph
    profile: Profile
    source: str = ""
    """A digest of the file that it comes from."""


def graph_of(model: str, batch: int, target: Target = Target()) -> Graph:
    """SGD with momentum, as a trainer runs it in mode `best`; unless another target is given, fp32 and the papers'
    graph."""
    net = create(model)
    assert net.input_shape is not None
    optimizer = optim.SGD(0.01, momentum=0.9)
    recipe = Recipe(net, nn.CrossEntropyLoss(), optimizer, target, parse_mode("best"), Options(), net.input_shape)
    return recipe.graph(Purpose(train=True), batch)


def problems(results: Path) -> Iterator[Problem]:
    """The modelled ones, and those of the profiles among the results (profile-MODEL-BATCH-PRECISION-CARD.json)."""
    for gpu in GPUS:
        for title, model, batch in CASES:
            graph = graph_of(model, batch)
            yield Problem(f"{title}, {gpu}", graph, modelled(graph, gpu))
    for path in sorted(results.glob("profile-*.json")):
        _, model, batch, precision, card = path.stem.split("-", 4)
        profile = Profile.load(path)
        assert profile.target is not None
        title = next((title for title, name, size in CASES if (name, str(size)) == (model, batch)), f"{model}({batch})")
        name = f"{title} {precision}, {' '.join(card.split('-')[1:2])} {MEASURED}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        yield Problem(name, graph_of(model, int(batch), profile.target), profile, digest)


class Saved:
    """The result file: parts by name, each with the code that made it."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        self.code = _code()
        self.found: dict[str, Any] = {}
        if path.exists() and not again:
            self.found = json.loads(path.read_text())

    def part(self, group: str, name: str, make: Callable[[], dict[str, Any]], source: str = "") -> dict[str, Any]:
        """The part from the file, if it is of the same code and source, or made and saved."""
        parts = self.found.setdefault(group, {})
        known: dict[str, Any] | None = parts.get(name)
        code = self.code + source
        if known is None or known.get("code") != code or known.get("key") != name:
            print(f"{group}: {name}", flush=True)
            parts[name] = known = {"key": name, "code": code, **make()}
            self.write(self.found)
        return known

    def write(self, found: dict[str, Any]) -> None:
        """Save; what was there stays whole if that is interrupted."""
        self.found = found
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**found, **describe("numba")}, indent=1) + "\n")
        part.replace(self.path)


def _code() -> str:
    """A digest of these sources."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in (ROOT / "minidnn").glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def case(problem: Problem, count: int) -> dict[str, Any]:
    """All policies and modes at so many budgets; and at the smallest of all what `best` does."""
    graph, profile = problem.graph, problem.profile
    found = sweep(graph, profile, (*POLICIES, *MODES), budgets_of(graph, profile, count))
    least = minimum(problem, found.budgets[0])
    return {"batch": graph.batch, "ops": len(graph.ops), **found.as_dict(), "minimum": least}


def minimum(problem: Problem, budget: int) -> dict[str, Any]:
    """The smallest budget: the checker accepts the schedule, and one byte less is refused with that minimum."""
    graph, profile = problem.graph, problem.profile
    verify(choose(graph, "best", profile, Options(budget=budget)))
    try:
        choose(graph, "best", profile, Options(budget=budget - 1))
    except BudgetError as refusal:
        return {"bytes": budget, "refused_below_with": refusal.needed}
    return {"bytes": budget, "refused_below_with": None}


def summary(sweeps: dict[str, Sweep]) -> list[dict[str, Any]]:
    """Per case: where `best` is within NEAR of the bound, and the means of all."""
    rows = []
    for name, found in sweeps.items():
        ratios = [p.ms / bound for p, bound in zip(found.points["best"], found.bound_ms, strict=True) if p.ms]
        shown = _drawn(found)
        others = [
            [p.ms for policy, points in found.points.items() if policy != "best" and (p := points[i]).ms]
            for i in range(len(found.budgets))
        ]
        gains = [min(times) / p.ms for p, times in zip(found.points["best"], others, strict=True) if p.ms and times]
        rows.append(
            {
                "case": name, "budgets": len(found.budgets), "within": sum(r <= NEAR for r in ratios),
                "not_within_at": [b for b, r in zip(found.budgets, ratios, strict=True) if r > NEAR],
                "worst_ratio": max(ratios), "mean_ratio": _means(shown),
                "fits": {policy: sum(p.ms is not None for p in points) for policy, points in shown.points.items()},
                "next_best_over_best": {"mean": _mean(gains), "most": max(gains)},
                "longest_plan_s": {policy: max(p.plan_s for p in points) for policy, points in found.points.items()},
            }
        )  # fmt: skip
    return rows


def _means(found: Sweep) -> dict[str, float | None]:
    """Mean of time over the bound by policy, over the budgets that it fits."""
    return {
        policy: _mean([p.ms / b for p, b in zip(points, found.bound_ms, strict=True) if p.ms])
        for policy, points in found.points.items()
    }


def _drawn(found: Sweep) -> Sweep:
    """The policies, and of the papers' modes the best of each family: more lines would hide each other."""
    return replace(found, points={name: found.points[name] for name in (*POLICIES, *MODES[:2])})


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def figure_3(count: int) -> dict[str, Any]:
    """VGG-16(256) on the V100: `best` at one, two and three times its link, and rematerialization."""
    title, model, batch = CASES[1]
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


def planning_times() -> dict[str, Any]:
    """Seconds of processor time to plan the deepest network on an H100, by policy and budget. What is compiled at the
    first plan is there by then."""
    _, model, batch = LONGEST
    graph = graph_of(model, batch)
    profile = modelled(graph, "h100")
    budgets = budgets_of(graph, profile, PLANNING_BUDGETS)
    for policy in PLANNERS:
        choose(graph, policy, profile, Options(budget=budgets[-1]))
    seconds: dict[str, list[float]] = {}
    for policy in sorted(PLANNERS):
        seconds[policy] = []
        for budget in budgets:
            began = time.process_time()
            with suppress(BudgetError):
                choose(graph, policy, profile, Options(budget=budget))
            seconds[policy].append(round(time.process_time() - began, 2))
    return {"batch": batch, "ops": len(graph.ops), "budgets": list(budgets), "seconds": seconds}


def _print(rows: list[dict[str, Any]], times: dict[str, Any]) -> None:
    columns = (*POLICIES, "vdnn++:dyn")
    print("\nmean of time / lower bound over the budgets that fit (how many)")
    lines = [
        [r["case"], *(f"{r['mean_ratio'][c]:.3f} ({r['fits'][c]})" if r["mean_ratio"][c] else "-" for c in columns),
         f"{r['within']}/{r['budgets']}", f"{r['worst_ratio']:.3f}"]
        for r in rows
    ]  # fmt: skip
    print(text_table(["case", *columns, f"best <= {NEAR}", "worst best"], lines))
    print(f"\nplanning {LONGEST[0]}, seconds of processor time")
    policies = list(times["seconds"])
    lines = [
        [format_size(budget), *(f"{times['seconds'][p][i]:.2f}" for p in policies)]
        for i, budget in enumerate(times["budgets"])
    ]
    print(text_table(["budget", *policies], lines))


def main() -> int:
    """Print, write JSON, and with --plots the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the result files")
    parser.add_argument("--budgets", type=int, default=20, help="budgets of each case")
    parser.add_argument("--plots", action="store_true", help="draw Figures 2 and 3")
    parser.add_argument("--again", action="store_true", help="make all cases anew")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = Saved(args.out / "planners.json", args.again)
    sweeps, faults = {}, []
    times = saved.part("planning", LONGEST[0], planning_times)
    for problem in problems(args.out):
        name = problem.name
        made = partial(case, problem, args.budgets)
        found = saved.part(f"figure_2, {args.budgets} budgets", name, made, problem.source)
        sweeps[name] = Sweep.from_dict(found)
        faults += [f"{name}: {fault}" for fault in sweeps[name].faults()]
        if found["minimum"]["refused_below_with"] != found["minimum"]["bytes"]:
            faults.append(f"{name}: one byte below the smallest budget is not refused with it")
    drawn = partial(figure_3, args.budgets)
    three = saved.part(f"figure_3, {args.budgets} budgets", f"{CASES[1][0]}, {GPUS[0]}", drawn)
    rows = summary(sweeps)
    saved.write({**saved.found, "near": NEAR, "summary": rows, "faults": faults})
    _print(rows, times)
    if args.plots:
        for gpu in (*GPUS, MEASURED):
            panels = {name: _drawn(found) for name, found in sweeps.items() if name.endswith(gpu)}
            if panels:
                ratio_plot(panels, args.out / f"planners_{gpu}.png")
        throughput_plot(
            {f"best, {rate}": ms for rate, ms in three["ms"].items()}, three["rematerialized_ms"], three["budgets"],
            three["batch"], args.out / "planners_throughput.png", title=f"{three['case']}",
        )  # fmt: skip
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory modes on a device: what each costs, beside what the simulator predicts with the measured profile.

    python bench/modes.py --network vgg16:256 --precision fp32 [--targets native paper] [--seconds 300]

One run is one network and one precision. Invented images; SGD with momentum. Each row has

- `ms`: the median of the intervals between device events at the ends of consecutive steps; `host_ms` the host's time
  to issue one (its waits included); `stall_ms` by cause, from the recorded timeline of one more step;
- `startup_s`: planning, building what computes, taking memory (pinned: as far as the row before had less);
- `peak_bytes`: what the driver says is in use at most, less what was in use before the row (context and libraries,
  `context_bytes`); `arena_bytes` is what the schedule takes; `pinned_bytes`, `offloaded_bytes`;
- `simulated`: what the simulator says of the same schedule, and its error in percent;
- `bounds`: the schedule's computation alone, its copies alone, and what no schedule within the same memory beats.

Budgets: 75 % and 60 % of what base(p) takes, the smallest that works ("least"), and those of smaller cards. A row that
does not fit says what it would need. Rows come in order of importance; the result file keeps what earlier runs found,
and a row that is there is not measured again unless `--again` is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.rows import RESULTS, Rows, card_of, fill, pinned_again, timed, watched
from minidnn import Trainer, models, nn, optim
from minidnn.device.base import Device
from minidnn.device.measure import SETTLING
from minidnn.device.open import open_device
from minidnn.errors import ArgumentError, BudgetError, OutOfDeviceMemory, OutOfPinnedMemory
from minidnn.graph.graph import Graph
from minidnn.plan.registry import parse_mode
from minidnn.profile.profile import Profile
from minidnn.run.bound import iteration_bound
from minidnn.run.choose import Options, choose, smallest
from minidnn.run.compare import recorded
from minidnn.run.program import Purpose, Recipe
from minidnn.run.simulator import simulate
from minidnn.schedule.actions import MEMORY, Launch, Offload, Prefetch, Schedule
from minidnn.units import format_size, parse_size

SECONDS, WARMING = 1.0, SETTLING
"""Of iterations that are timed, and before: by then a card's clock is what its power allows."""
STEPS = (3, 40)
"""At least and at most so many timed steps, else SECONDS of them: a host that others use too copies at uneven speed."""
PLANNERS = ("best", "dynprog", "greedy")
SHARES = ("75%", "60%")
LEAST = "least"
CARDS = ("4GiB", "8GiB", "11GiB", "12GiB", "16GiB")
NOISE = 0.01
ERROR = 5
"""Percent that the simulator may be off."""
LESS = {"native": 0.40, "paper": 0.35}
"""Share of base(p)'s memory that vdnn++:conv(p) is to save on VGG-16(256) in fp32, within 10 % of its time."""
PAPER_IMPROVEMENT = {("table3:256", "conv(m)"): 0.575, ("alexnet:256", "all(m)"): 0.60}
"""vDNN++, sections V-A and Table III, GTX 1080 Ti: (vDNN - vDNN++) / (vDNN - base)."""
PAPER_MS = {
    ("vgg116:32", "dyn"): (2717, 2468), ("vgg116:32", "conv(p)"): (3055, 3018), ("vgg116:32", "all(p)"): (3170, 3129),
    ("vgg116:32", "aconv(p)"): (2717, 2468), ("vgg191:32", "dyn"): (5139, 5097), ("vgg191:32", "conv(p)"): (5139, 5097),
    ("vgg191:32", "all(p)"): (5244, 5209),
}  # fmt: skip
"""vDNN++, Table IV, GTX 1080 Ti: ms of vDNN and vDNN++; base did not fit there."""


@dataclass(frozen=True)
class Spec:
    """A row: a memory mode, and the name of its budget ("": none)."""

    mode: str
    budget: str = ""

    def key(self, setting: str) -> str:
        """The row's key in the result file."""
        return f"{setting}: {self.mode}" + (f" in {self.budget}" if self.budget else "")


def specs() -> tuple[Spec, ...]:
    """All rows, the most important first."""
    pairs = [f"{family}:{chosen}" for chosen in ("conv", "all", "aconv") for family in ("vdnn++", "vdnn")]
    limits = (*SHARES, LEAST)
    return (
        Spec("base(p)"), *(Spec(f"{pair}(p)") for pair in pairs[:2]), Spec("keep(p)"),
        *(Spec("best", limit) for limit in limits), *(Spec(f"{pair}(p)") for pair in pairs[2:]),
        *(Spec("best", card) for card in CARDS), *(Spec(f"{family}:dyn") for family in ("vdnn++", "vdnn")),
        *(Spec(planner, limit) for planner in PLANNERS[1:] for limit in limits),
        Spec("base(m)"), *(Spec(f"{pair}(m)") for pair in pairs), Spec("keep(m)"),
        *(Spec(mode, card) for card in CARDS for mode in ("vdnn++:dyn", *PLANNERS[1:])),
    )  # fmt: skip


class Bench:
    """One network at one precision on one device."""

    def __init__(self, device: Device, network: str, precision: str, target: str) -> None:
        self.network, self.precision = network, precision
        self.model, _, rows = network.rpartition(":")
        self.batch = int(rows)
        self.device = device
        self.net = models.create(self.model)
        self.loss, self.optimizer = nn.CrossEntropyLoss(), optim.SGD(1e-4, momentum=0.9)
        self.target = device.target_for(precision, target)
        self.setting = f"{network} {precision} {target}"

    def used(self) -> int:
        """Bytes of device memory that are taken, by anybody."""
        info = self.device.memory_info()
        return info.total - info.free

    def graph(self, mode: str) -> Graph:
        """The training iteration of a mode: base updates all weights at its end."""
        shape = self.net.input_shape
        assert shape is not None
        recipe = Recipe(self.net, self.loss, self.optimizer, self.target, parse_mode(mode), Options(), shape)
        return recipe.graph(Purpose(train=True), self.batch)

    def prepare(self) -> float:
        """Measure what the card does not know yet; seconds that it took."""
        began = time.perf_counter()
        for mode in ("keep", "vdnn:all"):
            self.device.profile(self.graph(mode))
        return time.perf_counter() - began

    @cached_property
    def base_bytes(self) -> int:
        """What base(p) takes, whether it fits or not."""
        graph = self.graph("base")
        return choose(graph, "base(p)", self.device.profile(graph)).peak_bytes

    def budget(self, spec: Spec) -> int | None:
        """The bytes that a budget's name means."""
        if not spec.budget:
            return None
        if spec.budget == LEAST:
            graph = self.graph(spec.mode)
            return smallest(graph, parse_mode(spec.mode), self.device.profile(graph), Options()).peak_bytes
        if spec.budget.endswith("%"):
            return self.base_bytes * int(spec.budget[:-1]) // 100
        return parse_size(spec.budget)

    def says_nothing(self, spec: Spec) -> bool:
        """On a card that has room for base, of all modes one is enough."""
        if spec.budget not in CARDS or spec.mode == PLANNERS[0]:
            return False
        return parse_size(spec.budget) >= self.base_bytes

    def row(self, spec: Spec) -> dict[str, Any]:
        """Plan, run and predict."""
        budget = self.budget(spec)
        head = {
            "network": self.network, "batch": self.batch, "precision": self.precision, "target": self.target.name,
            "mode": spec.mode, "budget": spec.budget, "budget_bytes": budget,
        }  # fmt: skip
        try:
            return {**head, **self._measured(spec, budget)}
        except BudgetError as error:
            if spec.budget == LEAST and error.needed is not None and budget is not None and error.needed > budget:
                # inference needs more than training
                return {**head, "budget_bytes": error.needed, **self._measured(spec, error.needed)}
            return {**head, "fits": False, "needed_bytes": error.needed, "reason": str(error)}
        except (OutOfDeviceMemory, OutOfPinnedMemory) as error:
            return {**head, "fits": False, **self._planned(spec, budget), "reason": str(error)}

    def _measured(self, spec: Spec, budget: int | None) -> dict[str, Any]:
        before, began = self.used(), time.perf_counter()
        trainer = Trainer(
            self.net, self.loss, self.optimizer, self.batch, memory=spec.mode, budget=budget, device=self.device,
            precision=self.precision, target=self.target.name,
        )  # fmt: skip
        # What dyn tries before it chooses is not what training takes.
        with trainer, watched(self.used, before) as peak:
            fill(trainer)
            trainer.settle(trainer.issue(trainer._slots[0].batch, self.batch))
            startup = time.perf_counter() - began
            found = timed(trainer, SECONDS, STEPS, WARMING)
            timeline, schedule = recorded(trainer), trainer.schedule
            profile = self.device.profile(schedule.graph)
            sizes = {
                "arena_bytes": trainer.peak_bytes, "pool_bytes": schedule.pool_bytes,
                "persistent_bytes": schedule.persistent_bytes, "pinned_bytes": trainer.pinned_bytes,
                "batch_slot_bytes": trainer.batch_slot_bytes,
            }  # fmt: skip
        return {
            "fits": True, **found, "startup_s": startup, "stall_ms": dict(timeline.stall_ms), "recorded_ms":
            timeline.end_ms, "peak_bytes": peak.nbytes, "context_bytes": peak.before, **sizes, **about(schedule),
            "simulated": predicted(schedule, profile, found["ms"], sizes["pinned_bytes"]),
            "bounds": bounds(schedule, profile, budget or schedule.peak_bytes),
        }  # fmt: skip

    def _planned(self, spec: Spec, budget: int | None) -> dict[str, Any]:
        """What the simulator says of a mode that the machine has no room for."""
        graph = self.graph(spec.mode)
        profile = self.device.profile(graph)
        options = Options(budget=budget)

        def score(schedule: Schedule) -> float:
            return simulate(schedule, profile).iteration_ms if profile.link else 0.0

        schedule = choose(graph, spec.mode, profile, options, score=score)
        return {
            "needed_bytes": schedule.peak_bytes, "pinned_bytes": schedule.pinned_bytes, **about(schedule),
            "simulated": predicted(schedule, profile), "bounds": bounds(schedule, profile, schedule.peak_bytes),
        }  # fmt: skip


def about(schedule: Schedule) -> dict[str, Any]:
    """What a schedule moves."""
    return {
        "offloaded_bytes": schedule.offloaded_bytes, "offloaded_tensors": len(schedule.plan.offload),
        "prefetched_bytes": sum(a.host.nbytes for a in schedule.actions if isinstance(a, Prefetch)),
        "rule": schedule.plan.rule, "sync": schedule.plan.sync,
    }  # fmt: skip


def predicted(
    schedule: Schedule, profile: Profile, ms: float | None = None, pinned: int | None = None
) -> dict[str, Any] | None:
    """What the simulator says; None where the profile has no times. Errors in percent of what was measured."""
    try:
        found = simulate(schedule, profile)
    except ArgumentError:
        return None
    return {
        "ms": found.iteration_ms, "stall_ms": dict(found.stall_ms), "peak_bytes": found.peak_bytes,
        "pinned_bytes": found.pinned_bytes,
        **({"error_percent": 100 * (found.iteration_ms - ms) / ms, "pinned_agrees": found.pinned_bytes == pinned}
           if ms else {}),
    }  # fmt: skip


def bounds(schedule: Schedule, profile: Profile, budget: int) -> dict[str, Any] | None:
    """`compute_ms`: the schedule's ops alone; `link_ms`: its copies alone; `ms`: no schedule in `budget` is faster."""
    link = profile.link
    if link is None:
        return None
    graph = schedule.graph
    ops = [(a.launch, a.algorithm) for a in schedule.actions if isinstance(a, Launch)]
    out = sum(a.host.nbytes for a in schedule.actions if isinstance(a, Offload)) / link.d2h * 1e3
    back = sum(a.host.nbytes for a in schedule.actions if isinstance(a, Prefetch)) / link.h2d * 1e3
    lanes = 1 if MEMORY in schedule.lanes else 2
    try:
        return {
            "compute_ms": sum(profile.time_ms(graph, op, algorithm) for op, algorithm in ops),
            "link_ms": out + back if lanes == 1 else max(out, back), "out_ms": out, "back_ms": back,
            "ms": iteration_bound(graph, profile, budget).ms(lanes),
        }  # fmt: skip
    except ArgumentError:
        return None


def improvements(rows: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """vDNN++ against vDNN in the same mode: `gain` = (vDNN - vDNN++) / vDNN and the paper's relative improvement,
    (vDNN - vDNN++) / (vDNN - base with the same algorithms), None where vDNN costs no more than base."""
    for key, newer in rows.items():
        if ": vdnn++:" not in key or not newer["fits"]:
            continue
        older = rows.get(key.replace("vdnn++:", "vdnn:"))
        if older is None or not older["fits"]:
            continue
        mode = newer["mode"].removeprefix("vdnn++:")
        setting = key.partition(": ")[0]
        base = rows.get(f"{setting}: base({'m' if mode.endswith('(m)') else 'p'})")
        base_ms = base["ms"] if base is not None and base["fits"] else None
        costs = base_ms is not None and older["ms"] > base_ms * (1 + NOISE)
        case = (newer["network"], mode)
        theirs = PAPER_MS.get(case) if " fp32 " in setting else None
        yield {
            "setting": setting, "mode": mode, "budget": newer["budget"], "offloaded_bytes":
            newer["offloaded_bytes"], "base_ms": base_ms, "vdnn_ms": older["ms"], "vdnn++_ms": newer["ms"],
            "gain": 1 - newer["ms"] / older["ms"],
            "relative_improvement": (older["ms"] - newer["ms"]) / (older["ms"] - base_ms) if costs else None,
            "paper_relative_improvement": PAPER_IMPROVEMENT.get(case),
            "paper_gain": 1 - theirs[1] / theirs[0] if theirs else None,
        }  # fmt: skip


def misses(rows: Mapping[str, Any], improved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was to be shown and is not: in words."""
    for row in improved:
        if row["gain"] < -NOISE:
            idle = "" if row["offloaded_bytes"] else ", where nothing is copied out"
            mode = row["mode"]
            yield f"{row['setting']}: vdnn++:{mode} is slower than vdnn:{mode} by {-row['gain']:.1%}{idle}"
    for key, row in rows.items():
        base = rows.get(key.replace("vdnn++:conv(p)", "base(p)"))
        if key.endswith(": vdnn++:conv(p)") and key.startswith("vgg16:256 fp32") and base and base["fits"]:
            slower, less = row["ms"] / base["ms"] - 1, 1 - row["peak_bytes"] / base["peak_bytes"]
            if slower > 0.1 or less < LESS[row["target"]]:
                yield f"{key}: {slower:+.1%} time and {less:.1%} less memory than base(p)"
        if row["fits"] and row["budget_bytes"] and row["arena_bytes"] > row["budget_bytes"]:
            yield f"{key}: the arena has {row['arena_bytes']} bytes, the budget {row['budget_bytes']}"
    errors: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        if row["fits"] and row.get("simulated"):
            setting, _, mode = key.partition(": ")
            errors.setdefault(setting, {})[mode] = row["simulated"]["error_percent"]
    for setting, found in errors.items():
        worst = max(found, key=lambda mode: abs(found[mode]))
        if abs(found[worst]) > ERROR:
            far = sum(abs(percent) > ERROR for percent in found.values())
            yield (
                f"{setting}: the simulator is more than {ERROR} % off in {far} of {len(found)} rows, "
                f"{found[worst]:+.1f} % for {worst}"
            )


def line(spec: Spec, row: Mapping[str, Any]) -> str:
    """A row for a reader."""
    name = f"{spec.mode} {spec.budget}".ljust(24)
    simulated = row.get("simulated") or {}
    said = f"simulated {simulated['ms']:8.2f}" if simulated else ""
    if not row["fits"]:
        needed = row["needed_bytes"]
        return f"{name} does not fit: needs {format_size(needed) if needed else 'other limits'} {said}"
    stalls = ", ".join(f"{cause} {ms:.1f}" for cause, ms in row["stall_ms"].items() if ms >= 0.05)
    error = f"{said} ({simulated['error_percent']:+.1f} %)" if simulated else ""
    bound = f"bound {row['bounds']['ms']:.1f}" if row["bounds"] else ""
    return (
        f"{name} {row['ms']:8.2f} ms  {error} {bound}  peak {format_size(row['peak_bytes'])}, arena "
        f"{format_size(row['arena_bytes'])}, pinned {format_size(row['pinned_bytes'])}, start {row['startup_s']:.1f} s"
        f"{', stalls: ' if stalls else ''}{stalls}"
    )


def run(arguments: argparse.Namespace, device: Device) -> Rows:
    """Measure, print, write after each row."""
    deadline = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    rows = Rows(f"modes-{card_of(device.name)}.json", arguments.out, arguments.again, deadline)
    rows.head = {"card": device.name}
    chosen = [
        spec for spec in specs()
        if (not arguments.modes or spec.mode in arguments.modes) and spec.budget in arguments.budgets
    ]  # fmt: skip
    for target in arguments.targets:
        bench = Bench(device, arguments.network, arguments.precision, target)
        missing = [spec for spec in chosen if rows.wanted(spec.key(bench.setting))]
        if missing:
            with pinned_again(device):
                measure(bench, missing, rows)
    rows.save()
    improved = list(improvements(rows.rows))
    for row in improved:
        if row["setting"].startswith(f"{arguments.network} {arguments.precision} "):
            print(improvement_line(row), flush=True)
    for miss in misses(rows.rows, improved):
        if miss.startswith(f"{arguments.network} {arguments.precision} "):
            print(f"missed: {miss}", flush=True)
    return rows


def measure(bench: Bench, missing: Sequence[Spec], rows: Rows) -> None:
    """These rows, as far as there is time."""
    print(f"{bench.setting} on {bench.device.name}", flush=True)
    print(f"profile measured or read in {bench.prepare():.1f} s", flush=True)
    for number, spec in enumerate(missing):
        if rows.late:
            print(f"no time for {len(missing) - number} more rows", flush=True)
            break
        try:
            if bench.says_nothing(spec):
                continue
            row = rows.measure(spec.key(bench.setting), partial(bench.row, spec))
            print(line(spec, row), flush=True)
        except Exception as error:  # one row's failure is not the others'
            print(f"{spec.mode} {spec.budget}: {type(error).__name__}: {error}", flush=True)


def improvement_line(row: Mapping[str, Any]) -> str:
    """vDNN++ against vDNN, for a reader."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    return (
        f"{row['setting']} {row['mode']} {row['budget']}: vdnn {row['vdnn_ms']:.2f}, vdnn++ {row['vdnn++_ms']:.2f} ms; "
        f"gain {share(row['gain'])} (paper {share(row['paper_gain'])}), relative improvement "
        f"{share(row['relative_improvement'])} (paper {share(row['paper_relative_improvement'])})"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vgg16:256", metavar="MODEL:BATCH", help="(default: vgg16:256)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--targets", nargs="*", default=["native"], choices=("native", "paper"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or host (default: cuda)")
    parser.add_argument("--modes", nargs="*", help="these modes alone")
    parser.add_argument("--budgets", nargs="*", default=["", *SHARES, LEAST, *CARDS], help="these budgets alone")
    parser.add_argument("--seconds", type=float, help="begin no row that would end later")
    parser.add_argument("--again", action="store_true", help="measure rows that the result file already has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Open the device, measure."""
    arguments = parse(argv)
    with open_device(arguments.device, precision=arguments.precision) as device:
        run(arguments, device)


if __name__ == "__main__":
    main()

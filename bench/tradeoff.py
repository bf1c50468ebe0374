"""Time against device memory: minidnn's modes and PyTorch's ways in one plot for each network and precision.

    python bench/tradeoff.py [--results bench/results] [--out bench/results]

Reads modes-CARD.json and peers-CARD.json and writes tradeoff-CARD-NETWORK-PRECISION.png. Both axes are what was
measured: ms of an iteration with the copy of its batch, and the driver's peak less what was in use before (PyTorch's
after its allocator has given back what it kept from cuDNN's benchmark). Lines join the settings of one way. Crossed
circles: what the simulator says of modes that the card has no room for. Prints, for each of PyTorch's points, our
fastest mode that takes no more memory.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.rows import RESULTS
from minidnn.units import GiB

SAME = {"alexnet_tv": "alexnet"}
"""The modes bench's name of a network -> the peers bench's. vgg16 is torchvision's but for the dropout."""
FAMILIES = {
    "base": "#222222", "keep": "#888888", "vdnn": "#cc3311", "vdnn++": "#4477aa", "best": "#228833",
    "dynprog": "#66ccee", "greedy": "#ccbb44",
}  # fmt: skip
WAYS = {
    "torch eager": ("#aa3377", "*"), "torch compile": ("#ee8866", "P"), "torch OffloadActivations": ("#aa3377", "s"),
    "torch save_on_cpu": ("#885500", "D"), "torch checkpoint": ("#ee3377", "^"),
}  # fmt: skip
"""Colours and markers; those of minidnn are circles."""


@dataclass(frozen=True)
class Point:
    """A way of training: what it is, its setting, and what it costs. `fits`: it was measured."""

    way: str
    setting: str
    ms: float
    nbytes: int
    fits: bool = True


def points(modes: Mapping[str, Any], peers: Mapping[str, Any]) -> dict[tuple[str, str], list[Point]]:
    """(network, precision) -> the points of both result files' rows, native graphs alone."""
    found: dict[tuple[str, str], list[Point]] = {}
    for row in modes.values():
        model, _, batch = row["network"].rpartition(":")
        point = _mode(row)
        if row["target"] == "native" and point is not None:
            found.setdefault((f"{SAME.get(model, model)}:{batch}", row["precision"]), []).append(point)
    for key, row in peers.items():
        match = re.fullmatch(r"(\S+) batch (\d+) (\S+): (torch \S+) ?(.*)", key)
        if match:
            nbytes = row.get("steady_peak_bytes", row["peak_bytes"])
            point = Point(match[4], match[5], row["ms_with_copy"], nbytes)
            found.setdefault((f"{match[1]}:{match[2]}", match[3]), []).append(point)
    return found


def _mode(row: Mapping[str, Any]) -> Point | None:
    """A row of the modes bench; None where nothing is known of its time."""
    family, _, rest = row["mode"].partition(":")
    family, _, rule = family.partition("(")
    setting = (rest or (f"({rule}" if rule else "")) + (f" in {row['budget']}" if row["budget"] else "")
    if row["fits"]:
        return Point(family, setting, row["ms"], row["peak_bytes"])
    said = row.get("simulated")
    return Point(family, setting, said["ms"], said["peak_bytes"], fits=False) if said else None


def picture(card: str, network: str, precision: str) -> str:
    """The plot's file name, for either bench's name of the network."""
    model, _, batch = network.rpartition(":")
    return f"tradeoff-{card}-{SAME.get(model, model)}-{batch}-{precision}.png"


FEW = 4
"""Fewer points are no plot."""
WIDE = 4
"""From so many times the fastest on the slowest makes the axis of times logarithmic."""


def draw(title: str, found: list[Point], path: Path) -> None:
    """One plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), dpi=100, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for way in dict.fromkeys(point.way for point in found):
        colour, marker = WAYS.get(way, (FAMILIES.get(way, "#999999"), "o"))
        own = sorted((p for p in found if p.way == way and p.fits), key=lambda p: p.nbytes)
        joined = way in WAYS and len(own) > 1
        axes.plot(
            [p.nbytes / GiB for p in own], [p.ms for p in own], marker=marker, markersize=5, color=colour, label=way,
            linestyle="-" if joined else "none", linewidth=0.7, alpha=0.85,
        )  # fmt: skip
        labels: dict[tuple[str, str], list[Point]] = {}
        for p in own:  # those that lie on each other share a label
            labels.setdefault((f"{p.nbytes / GiB:.1f}", f"{p.ms:.2g}"), []).append(p)
        for p, *others in labels.values():
            text = ", ".join(q.setting for q in (p, *others))
            axes.annotate(text, (p.nbytes / GiB, p.ms), (3, 3), textcoords="offset points", fontsize=4.5, color=colour)
        beyond = [p for p in found if p.way == way and not p.fits]
        axes.plot([p.nbytes / GiB for p in beyond], [p.ms for p in beyond], marker="$\\otimes$", markersize=7,
                  color=colour, linestyle="none")  # fmt: skip
    times = [p.ms for p in found if p.fits]
    if times and max(times) > WIDE * min(times):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    axes.set_xlim(left=0)
    axes.set_xlabel("device memory in use at most (GiB)", fontsize=8)
    axes.set_ylabel("ms of an iteration", fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.tick_params(which="both", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=6.5, frameon=False)
    figure.savefig(path)


def ratios(found: list[Point]) -> Iterator[tuple[Point, Point, float]]:
    """Each of PyTorch's points, our fastest that takes no more memory, and how many times faster that is."""
    for peer in (p for p in found if p.way in WAYS):
        fitting = [p for p in found if p.way not in WAYS and p.fits and p.nbytes <= peer.nbytes]
        if fitting:
            best = min(fitting, key=lambda p: p.ms)
            yield peer, best, peer.ms / best.ms


def written(results: Path, out: Path) -> Iterator[Path]:
    """Draw what there is."""
    out.mkdir(parents=True, exist_ok=True)
    files = [path for kind in ("modes", "peers") for path in sorted(results.glob(f"{kind}-*.json"))]
    cards = dict.fromkeys(path.stem.partition("-")[2] for path in files)
    for card in cards:
        modes, peers = (_rows(results / f"{kind}-{card}.json") for kind in ("modes", "peers"))
        for (network, precision), found in points(modes, peers).items():
            path = out / picture(card, network, precision)
            for peer, best, times in ratios(found):
                print(
                    f"{network} {precision}: {peer.way} {peer.setting} {peer.ms:.1f} ms, {peer.nbytes / GiB:.2f} GiB; "
                    f"{best.way} {best.setting} is {times:.2f} times as fast at {best.nbytes / GiB:.2f} GiB"
                )
            if len(found) < FEW:
                continue
            draw(f"{network.replace(':', ', batch ')}, {precision}, {card.replace('-', ' ')}", found, path)
            yield path


def _rows(path: Path) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    return rows


def main() -> None:
    """Draw, and say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for path in written(arguments.results, arguments.out):
        print(path)


if __name__ == "__main__":
    main()

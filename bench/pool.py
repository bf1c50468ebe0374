"""Time of an allocate + free pair in the run-time pool, against the number of live blocks.

    python bench/pool.py                     prints a table, writes bench/results/pool_<cores>core.json and, with
                                             matplotlib, the same as a plot (.svg)
    python bench/pool.py --live 10 1000 --rounds 3 --output out.json

The pool is as fragmented as random sizes make it: twice the live blocks are allocated, a random half is freed, then
each step frees a random block and allocates another of random size. So there are about half as many free blocks as
live ones; a network's trace, whose sizes repeat, leaves far fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from minidnn.memory.fit import FITS
from minidnn.memory.pool import Pool

LIVE = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
PAIRS = 400  # in a round: short ones, so that some of them are not disturbed
LARGEST = 10**7  # bytes of a request
PROMISE = 10.0  # us a pair at 10^4 live blocks
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Load:
    """A fragmented pool and its live blocks. Roles are plain, so high-end heuristics behave as best-fit."""

    def __init__(self, fit: str, live: int) -> None:
        self.fit = fit
        self.rng = random.Random(live)
        self.pool = Pool(3 * live * LARGEST, fit)
        self.blocks = [self.pool.allocate(self.rng.randint(1, LARGEST)) for _ in range(2 * live)]
        self.rng.shuffle(self.blocks)
        for block in self.blocks[live:]:
            self.pool.free(block)
        del self.blocks[live:]
        self.times: list[float] = []  # us a pair

    def round(self) -> None:
        """Free and allocate PAIRS times."""
        steps = [(self.rng.randrange(len(self.blocks)), self.rng.randint(1, LARGEST)) for _ in range(PAIRS)]
        pool, blocks = self.pool, self.blocks
        start = time.perf_counter()
        for i, nbytes in steps:
            pool.free(blocks[i])
            blocks[i] = pool.allocate(nbytes)
        self.times.append((time.perf_counter() - start) / PAIRS * 1e6)

    def row(self) -> dict[str, Any]:
        """The result; the first round only warmed up."""
        times = self.times[1:]
        return {
            "fit": self.fit,
            "live": len(self.blocks),
            "free": len(self.pool.dump().free),
            "best_us": round(min(times), 2),
            "median_us": round(statistics.median(times), 2),
        }


def environment() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        package: str | None = version("minidnn")
    except PackageNotFoundError:
        package = None
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")] if (
        cpu.exists()
    ) else []
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": CORES,
        "python": platform.python_version(),
        "minidnn": package,
    }


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parent,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Pair time against live blocks; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for fit in dict.fromkeys(row["fit"] for row in rows):
        own = [row for row in rows if row["fit"] == fit]
        axes.plot([row["live"] for row in own], [row["best_us"] for row in own], marker="o", label=fit)
    axes.axhline(PROMISE, color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="live blocks", ylabel="allocate + free, µs (best round)", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, nargs="+", default=LIVE, help="numbers of live blocks")
    parser.add_argument("--fits", nargs="+", choices=list(FITS), default=list(FITS)[:4], help="heuristics")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--commit", default=commit(), help="what to write as the measured commit")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"pool_{CORES}core.json")
    arguments = parser.parse_args()

    print("preparing the pools ...", flush=True)
    loads = {live: [Load(fit, live) for fit in arguments.fits] for live in arguments.live}
    for _ in range(arguments.rounds + 1):  # in turns, so that all see the same machine
        for load in chain(*loads.values()):
            load.round()
    rows = []
    print(f"{'us a pair, best (median)':<26}" + "".join(f"{fit:>22}" for fit in arguments.fits))
    for live, own in loads.items():
        new = [load.row() for load in own]
        rows += new
        cells = [f"{row['best_us']:.2f} ({row['median_us']:.2f})" for row in new]
        print(f"{live:>8} live blocks      " + "".join(f"{cell:>22}" for cell in cells))
    result = {
        "what": "allocate + free in the run-time pool, microseconds a pair, against the number of live blocks",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": arguments.commit,
        "machine": environment(),
        "rounds": arguments.rounds,
        "pairs_in_a_round": PAIRS,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.output}")
    if plot(rows, arguments.output.with_suffix(".svg")):
        print(f"wrote {arguments.output.with_suffix('.svg')}")


if __name__ == "__main__":
    main()

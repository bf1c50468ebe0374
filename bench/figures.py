"""The pictures in docs/images: what the command line draws, and Figure 9 of vDNN++. Needs matplotlib.

    python bench/figures.py [--out docs/images]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.environment import ROOT
from bench.markdown import files
from bench.sections import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMANDS = (
    'minidnn simulate alexnet --batch 128 --gpu gtx970 --modes "base(p),vdnn:all(p),vdnn++:all(p)" '
    "--plot docs/images/modes.png",
    'minidnn memory alexnet --batch 128 --mode "base(m)" --plot docs/images/map-base.png',
    'minidnn memory alexnet --batch 128 --mode "vdnn++:all(m)" --plot docs/images/map-vdnnpp.png',
    'minidnn simulate alexnet --batch 128 --gpu gtx970 --modes "vdnn++:all(p)" --compress all --density 0.4 '
    "--plot docs/images/compression.png",
    "minidnn plan alexnet --batch 128 --gpu gtx970 --budget 1000MiB --plot docs/images/planner.png",
)
"""The pictures of README and docs/memory-modes.md, drawn as they say."""
COLOURS = {"base": "#222222", "vdnn": "#cc3311", "vdnn++": "#4477aa"}
SETS = ("all(p)", "conv(p)", "aconv(p)", "all(m)", "conv(m)", "aconv(m)", "dyn")


def draw(out: Path) -> Iterable[str]:
    """Draw all pictures; their names."""
    for command in COMMANDS:
        *words, target = shlex.split(command)
        path = out / Path(target).name
        subprocess.run([sys.executable, "-m", *words, str(path), "--quiet"], check=True, cwd=ROOT, env=environment())
        yield path.name
    for _, found in files(RESULTS, "paper_figures.json"):
        figure_9(found["figure_9"], out / "figure_9.png")
        yield "figure_9.png"


def environment() -> dict[str, str]:
    """The command line finds this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def figure_9(rows: list[dict[str, Any]], path: Path) -> None:
    """Per GPU and network the speed of each mode relative to base(p), vDNN beside vDNN++. Crossed: does not fit."""
    from matplotlib.figure import Figure

    gpus = list(dict.fromkeys(row["gpu"] for row in rows))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    starts = [n * (len(SETS) + 1.5) for n in range(len(networks))]
    figure = Figure(figsize=(11, 2.3 * len(gpus) + 0.5), dpi=110, facecolor="white", layout="constrained")
    for k, gpu in enumerate(gpus):
        axes = figure.add_subplot(len(gpus), 1, k + 1)
        for start, network in zip(starts, networks, strict=True):
            _bars(axes, {r["mode"]: r for r in rows if (r["gpu"], r["network"]) == (gpu, network)}, start)
            axes.annotate(network, (start + (len(SETS) - 1) / 2, 1.03), ha="center", fontsize=8)
        ticks = [(start + i, name) for start in starts for i, name in enumerate(SETS)]
        axes.set_xticks([x for x, _ in ticks], [t for _, t in ticks], rotation=60, ha="right", rotation_mode="anchor")
        axes.set_title(f"{gpu} (modelled)", loc="left", fontsize=9, fontweight="bold")
        axes.set_ylim(0, 1.08)
        axes.set_xlim(-1, starts[-1] + len(SETS))
        axes.axhline(1, color=COLOURS["base"], linewidth=0.7, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", length=0, labelsize=6.5)
        axes.tick_params(axis="y", labelsize=7.5)
        axes.set_ylabel("base(p) time / mode time", fontsize=7.5)
    handles = [_patch(COLOURS["vdnn"], "vDNN"), _patch(COLOURS["vdnn++"], "vDNN++")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path)


def _bars(axes: Axes, found: dict[str, Any], start: float) -> None:
    """The bars of one network, from `start` on."""
    for i, name in enumerate(SETS):
        row = found.get(name)
        for shift, key, family in ((-0.2, "vdnn_ms", "vdnn"), (0.2, "vdnnpp_ms", "vdnn++")):
            if row is not None and row[key] is not None:
                axes.bar(start + i + shift, row["base_p_ms"] / row[key], 0.38, color=COLOURS[family])
        if row is not None and row["vdnnpp_ms"] is None:
            axes.text(start + i, 0.02, "x", ha="center", fontsize=8, color="#999999")


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def main() -> int:
    """Draw, and say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in draw(args.out.resolve()):
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

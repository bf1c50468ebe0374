"""Plots of sweeps over budgets: Figures 2 and 3 of Beaumont et al. 2020."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidnn.report.drawing import drawable, drawing, png
from minidnn.run.sweep import Sweep
from minidnn.units import GiB, MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#cc3311", "#4477aa", "#228833", "#ee8866", "#aa3377", "#66ccee", "#bbbbbb", "#222222", "#ccbb44", "#885500")
STYLES = ("-", "--", "-.", ":")
HIGHEST = 2.2
"""Ratios above that are cut off."""


@drawing()
def ratio_plot(sweeps: Mapping[str, Sweep], path: Path | None = None) -> bytes:
    """Time over the lower bound against memory, one panel for each sweep by title (Figure 2). Returns the PNG."""
    figure, panels = _panels(len(sweeps))
    for axes, (title, sweep) in zip(panels, sweeps.items(), strict=True):
        scale = _scale(axes, sweep.budgets)
        for k, (name, points) in enumerate(sweep.points.items()):
            ratios = [None if p.ms is None else p.ms / b for p, b in zip(points, sweep.bound_ms, strict=True)]
            _line(axes, sweep.budgets, scale, ratios, name, k)
        axes.axhline(1, color="#222222", linewidth=0.6, linestyle=":")
        axes.set_ylim(0.97, min(HIGHEST, axes.get_ylim()[1]))
        axes.set_title(drawable(title), fontsize=9, loc="left")
        axes.set_ylabel("time / lower bound", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False)
    return png(figure, path)


@drawing()
def throughput_plot(
    curves: Mapping[str, Sequence[float | None]], rematerialized: Sequence[float | None], budgets: Sequence[int],
    batch: int, path: Path | None = None, *, title: str = "",
) -> bytes:  # fmt: skip
    """Images per second against the memory limit: ms by curve (one for each bandwidth) and those of rematerialization
    (Figure 3). Returns the PNG."""
    figure, (axes,) = _panels(1)
    scale = _scale(axes, budgets)
    for k, (name, times) in enumerate(curves.items()):
        _line(axes, budgets, scale, [ms and batch / ms * 1e3 for ms in times], name, k)
    rates = [ms and batch / ms * 1e3 for ms in rematerialized]
    known = [(b / scale, r) for b, r in zip(budgets, rates, strict=True) if r]
    axes.plot([b for b, _ in known], [r for _, r in known], color="#222222", linewidth=1.3, label="rematerialization")
    axes.set_ylabel("images per second", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(drawable(title), fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)
    return png(figure, path)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * count, 4), dpi=130, facecolor="white", layout="constrained")
    panels = [figure.add_subplot(1, count, k + 1) for k in range(count)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7.5)
    return figure, panels


def _scale(axes: Axes, budgets: Sequence[int]) -> int:
    scale, unit = (GiB, "GiB") if max(budgets) >= 4 * GiB else (MiB, "MiB")
    axes.set_xlabel(f"memory limit ({unit})", fontsize=8)
    return scale


def _line(axes: Axes, budgets: Sequence[int], scale: int, values: Sequence[float | None], name: str, k: int) -> None:
    known = [(b / scale, v) for b, v in zip(budgets, values, strict=True) if v]
    axes.plot(
        [b for b, _ in known], [v for _, v in known], label=name, color=COLOURS[k % len(COLOURS)],
        linestyle=STYLES[k % len(STYLES)], linewidth=1.1 if k else 2.0, marker=".", markersize=3, zorder=2 if k else 3,
    )  # fmt: skip

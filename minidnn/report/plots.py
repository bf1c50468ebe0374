"""PNG plots of timelines and memory maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minidnn.errors import ArgumentError
from minidnn.report.drawing import drawable, drawing, png
from minidnn.run.timeline import CAUSES, Span, Timeline
from minidnn.schedule.actions import COMPUTE, HOST, Buffer, Launch, Schedule
from minidnn.schedule.lifetimes import changes, pool_role
from minidnn.units import GiB, MiB, format_ms, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, RULE, HOLE = "#222222", "#d9d9d9", "#f1f1f1"
WORK = {
    "forward": "#4477aa", "backward": "#77aadd", "update": "#99ddff", "offload": "#ee8866", "prefetch": "#44bb99",
    "release": "#777777", "compress": "#ddaa33", "decompress": "#eedd88",
}  # fmt: skip
STALL = {"offload": "#cc3311", "prefetch": "#117733", "memory": "#aa3377", "codec": "#997700"}
ROLES = {
    "kept": "#4477aa", "offloaded": "#ee8866", "prefetched": "#44bb99", "gradient": "#bbcc33",
    "weight_gradient": "#aaaa00", "workspace": "#aa4499", "mask": "#77aadd", "loss": "#222222", "label": "#dddddd",
    "weight": "#8899aa", "optimizer_state": "#aabbcc", "statistic": "#556677", "scalars": "#334455", "input": "#ee8866",
}  # fmt: skip
"""Colours by Paul Tol's schemes, which colour-blind readers can tell apart."""
WAITING = "////"
PALE = 0.55
"""Hatching and opacity of waits, in lanes and in the legend."""
ARTICLE = {"offload": "copy-outs", "prefetch": "copy-ins", "memory": "memory", "codec": "codecs"}
LANES = {"memory": "copies", "d2h": "copy-out", "h2d": "copy-in"}
"""What the rows of copy lanes are called; others bear the lane's name."""
SMALLEST = 1 / 1200
"""Share of the time axis that can still be seen."""
HEADING, MEMORY = 0.36, 0.95
"""Inches above a timeline's lanes, and of its memory curve with the gap between the two."""


@drawing()
def timeline_plot(timelines: Timeline | Mapping[str, Timeline], path: Path | None = None, *, title: str = "") -> bytes:
    """Lanes against time, the memory curve below; several timelines by name stand below each other on the same axes of
    time and memory.

    Returns the PNG and writes it to `path` where given. A lane is solid where it works. Hatched in red, green, purple
    and brown are waits for an offload, a prefetch, memory, a codec; in `compute`: nothing computes for that reason.
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else timelines
    if not named:
        raise ArgumentError("timelines is empty; give at least one")
    lanes = [0.3 * len(_rows(line)) for line in named.values()]
    sheet = _Sheet(11, sum(lanes) + len(lanes) * (HEADING + MEMORY) + 0.45, title)
    end = max(line.end_ms for line in named.values())
    peak = max((nbytes for line in named.values() for _, nbytes in line.memory), default=0)
    for (name, line), height in zip(named.items(), lanes, strict=True):
        sheet.skip(HEADING)
        top = sheet.axes(height)
        sheet.skip(0.08)
        bottom = sheet.axes(MEMORY - 0.08)
        _draw_lanes(top, line, end)
        _draw_memory(bottom, line, end, peak)
        top.set_title(name, loc="left", fontsize=9, fontweight="bold", color=INK)
        top.set_title(_summary(line), loc="right", fontsize=8, color=INK)
        bottom.tick_params(axis="x", labelbottom=False)
    bottom.tick_params(axis="x", labelbottom=True)
    bottom.set_xlabel("time in the iteration (ms)", fontsize=8)
    waits = {f"wait for {cause}": STALL[cause] for cause in CAUSES}
    sheet.legend({**WORK, **waits}, _seen(named.values(), end))
    return sheet.png(path)


@drawing()
def memory_map(schedule: Schedule, path: Path | None = None, *, title: str = "") -> bytes:
    """Address against schedule position, coloured by what the bytes are; grey is memory that nobody uses.

    Returns the PNG and writes it to `path` where given. Raises ArgumentError for a live placement, whose addresses are
    only known at run time.
    """
    if schedule.placement == "live":
        raise ArgumentError("placement is 'live'; a memory map needs the addresses of a planned placement")
    sizes = f"arena {format_size(schedule.peak_bytes)}, pool {format_size(schedule.pool_bytes)}"
    sheet = _Sheet(11, 5.4, f"{title or schedule.plan.mode}: {sizes}")
    sheet.skip(0.2)
    axes = sheet.axes(4.4)
    scale, unit = (GiB, "GiB") if schedule.peak_bytes >= 4 * GiB else (MiB, "MiB")
    length, top = len(schedule.actions), schedule.peak_bytes / scale
    stays = [(buffer, 0, length) for buffer in schedule.persistent] + _stays(schedule)
    axes.axhspan(0, top, color=HOLE, zorder=0, linewidth=0)
    seen = _draw_stays(axes, schedule, stays, scale)
    axes.axhline(schedule.persistent_bytes / scale, color=INK, linewidth=0.8, linestyle=":")
    if schedule.graph.training:
        forward = next((i for i, a in enumerate(schedule.actions) if a.op >= schedule.graph.forward_ops), length)
        axes.axvline(forward, color=INK, linewidth=0.8)
        for x, text in ((forward / 2, "forward"), ((forward + length) / 2, "backward")):
            axes.annotate(text, (x, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xlim(0, length)
    axes.set_ylim(0, top)
    _layer_ticks(axes, schedule)
    axes.set_ylabel(f"address ({unit})", fontsize=8)
    sheet.legend(ROLES, seen)
    return sheet.png(path)


# -- timelines ---------------------------------------------------------------------------------------------------------


def _row(lane: str) -> str:
    """The row of a lane: workers of one kind share theirs."""
    return lane.partition("-")[0]


def _rows(line: Timeline) -> dict[str, int]:
    """Rows, from the top: compute, copies, workers, host; with their heights above the axis."""
    last = {COMPUTE: 0, "release": 2, "codec": 2, HOST: 3}
    names = sorted({_row(lane) for lane in line.lanes}, key=lambda row: (last.get(row, 1), row))
    return {name: len(names) - 1 - i for i, name in enumerate(names)}


def _kind(span: Span) -> str:
    """Which colour a span of work has."""
    if span.lane == COMPUTE:
        phase = span.label.rpartition(":")[2]
        return "update" if phase == "update" else "backward" if phase.startswith("backward") else "forward"
    return span.label.partition(" ")[0]


def _summary(line: Timeline) -> str:
    """Time, peak, and what nothing was computed for."""
    parts = [f"{format_ms(line.end_ms)} ms"]
    if line.memory:
        parts.append(f"peak {format_size(max(nbytes for _, nbytes in line.memory))}")
    waits = [
        f"{format_ms(ms)} ms for {ARTICLE[cause]}" for cause, ms in line.stall_ms.items() if ms > line.end_ms * SMALLEST
    ]
    return ", ".join([*parts, f"stalled {' and '.join(waits)}" if waits else "never stalled"])


def _draw_lanes(axes: Axes, line: Timeline, end: float) -> None:
    rows = _rows(line)
    rim = 0.25 if len(line.spans) < 800 else 0.0
    bars: dict[tuple[str, int, bool], list[tuple[float, float]]] = {}
    for span in line.spans:
        row, width = rows[_row(span.lane)], span.end_ms - span.start_ms
        if span.lane != COMPUTE:
            width = max(width, end * SMALLEST)  # at least a tick
        if not span.stall:
            bars.setdefault((WORK.get(_kind(span), RULE), row, False), []).append((span.start_ms, width))
            _name_span(axes, span, row, end)
        elif span.lane != COMPUTE:
            bars.setdefault((STALL[span.stall], row, True), []).append((span.start_ms, width))
    if COMPUTE in rows:
        for _, cause, start, stop in line.stalls():
            bars.setdefault((STALL[cause], rows[COMPUTE], True), []).append((start, stop - start))
    for (colour, row, waiting), stretches in bars.items():
        axes.broken_barh(stretches, (row - 0.4, 0.8), facecolors=colour, alpha=PALE if waiting else 1,
                         hatch=WAITING if waiting else "", edgecolor="white", linewidth=rim)  # fmt: skip
    axes.set_yticks(list(rows.values()), [LANES.get(row, row) for row in rows])
    axes.set_ylim(-0.55, len(rows) - 0.45)
    axes.set_xlim(0, end)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _name_span(axes: Axes, span: Span, row: int, end: float) -> None:
    """Write what a wide span is about: the name, or, where there is less room, the number of the layer."""
    name = span.label.rpartition(":")[0] if span.lane == COMPUTE else span.label.rpartition(" ")[2]
    for text in (name, name.removesuffix(".y").rpartition(".")[2]):
        if text and span.end_ms - span.start_ms > end * 0.0055 * (len(text) + 1.5):
            axes.text((span.start_ms + span.end_ms) / 2, row, text, ha="center", va="center", fontsize=6.5,
                      color="white" if _kind(span) == "forward" else INK)  # fmt: skip
            return


def _draw_memory(axes: Axes, line: Timeline, end: float, highest: int) -> None:
    """Bytes in use, on the scale of `highest` bytes that all curves of a sheet share; dotted is this one's peak."""
    if line.memory:
        peak = max(nbytes for _, nbytes in line.memory)
        scale, unit = (GiB, "GiB") if highest >= 4 * GiB else (MiB, "MiB")
        times = [*(ms for ms, _ in line.memory), line.end_ms]
        used = [nbytes / scale for _, nbytes in line.memory]
        axes.fill_between(times, [*used, used[-1]], step="post", color=WORK["backward"], alpha=0.6, linewidth=0)
        axes.axhline(peak / scale, color=INK, linewidth=0.7, linestyle=":")
        axes.set_ylim(0, highest / scale * 1.15)
        axes.set_ylabel(f"memory\n({unit})", fontsize=7.5)
    axes.set_xlim(0, end)


def _seen(lines: Iterable[Timeline], end: float) -> set[str]:
    """What a legend must explain: work, and waits long enough to be seen."""
    found = set()
    for line in lines:
        found |= {_kind(s) for s in line.spans if not s.stall}
        found |= {f"wait for {cause}" for _, cause, start, stop in line.stalls() if stop - start > end * SMALLEST}
        found |= {f"wait for {s.stall}" for s in line.spans if s.stall and s.end_ms - s.start_ms > end * SMALLEST}
    return found


# -- memory maps -------------------------------------------------------------------------------------------------------


def _stays(schedule: Schedule) -> list[tuple[Buffer, int, int]]:
    """Each buffer of the pool with the positions at which it begins and ends."""
    begun: dict[str, int] = {}
    found = []
    for change in changes(schedule.actions):
        if change.begins:
            begun[change.buffer.key] = change.at
        else:
            found.append((change.buffer, begun.pop(change.buffer.key), change.at))
    return found


def _draw_stays(axes: Axes, schedule: Schedule, stays: list[tuple[Buffer, int, int]], scale: int) -> set[str]:
    """One rectangle a stay; returns the roles that are large enough to be seen."""
    from matplotlib.collections import PolyCollection

    corners, colours, seen = [], [], set()
    for buffer, start, end in stays:
        role = pool_role(schedule.graph, schedule.plan, buffer)
        low, high = buffer.offset / scale, buffer.end / scale
        corners.append([(start, low), (end, low), (end, high), (start, high)])
        colours.append(ROLES.get(role, RULE))
        if buffer.nbytes * 500 >= schedule.peak_bytes:
            seen.add(role)
    # A white rim would hide thin ones.
    rims = [0.5 if buffer.nbytes * 150 >= schedule.peak_bytes else 0.0 for buffer, _, _ in stays]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=rims))
    return seen


def _layer_ticks(axes: Axes, schedule: Schedule) -> None:
    """Name layers where their stages begin, as many as there is room for."""
    first: dict[tuple[int, bool], int] = {}
    for i, action in enumerate(schedule.actions):
        if isinstance(action, Launch):
            first.setdefault((action.launch.layer, action.launch.forward), i)
    positions = sorted((at, schedule.graph.layers[layer].name) for (layer, _), at in first.items())
    room, last = len(schedule.actions) / 45, -1e9
    shown = []
    for at, name in positions:
        if at - last >= room:
            shown.append((at, name))
            last = at
    axes.set_xticks([at for at, _ in shown], [name for _, name in shown], rotation=60, ha="right", fontsize=6.5,
                    rotation_mode="anchor")  # fmt: skip


# -- sheets ------------------------------------------------------------------------------------------------------------


class _Sheet:
    """A figure that is filled from the top; lengths in inches."""

    LEFT, RIGHT, HEAD = 0.85, 0.15, 0.56

    def __init__(self, width: float, height: float, title: str) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height + self.HEAD
        self.figure: Figure = Figure(figsize=(self.width, self.height), dpi=130, facecolor="white")
        self.used = self.HEAD
        x = self.LEFT / self.width
        self.figure.text(
            x, 1 - 0.1 / self.height, drawable(title), va="top", fontsize=10.5, fontweight="bold", color=INK
        )

    def skip(self, height: float) -> None:
        """Leave space."""
        self.used += height

    def axes(self, height: float) -> Axes:
        """The next axes down the sheet."""
        self.used += height
        wide = self.width - self.LEFT - self.RIGHT
        box = (self.LEFT / self.width, 1 - self.used / self.height, wide / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7.5, colors=INK)
        return axes

    def legend(self, colours: Mapping[str, str], seen: set[str]) -> None:
        """Explain the colours that are seen, under the title."""
        from matplotlib.patches import Patch

        handles = [
            Patch(facecolor=colour, label=name.replace("_", " "), edgecolor="white", linewidth=0,
                  alpha=PALE if waits else 1, hatch=WAITING if waits else "")
            for name, colour in colours.items()
            if name in seen
            for waits in (name.startswith("wait"),)
        ]  # fmt: skip
        many = len(handles) > 10  # with compression there are that many
        self.figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(self.LEFT / self.width, 1 - 0.34 / self.height),
            ncols=max(len(handles), 1), frameon=False, fontsize=6.3 if many else 7.5, handlelength=1.1,
            columnspacing=0.8 if many else 1.2, borderpad=0, borderaxespad=0,
        )  # fmt: skip

    def png(self, path: Path | None) -> bytes:
        """The sheet as a PNG, also written to `path` where given."""
        return png(self.figure, path)

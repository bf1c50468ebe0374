"""One page that explains a comparison of memory modes: table, bars, timelines, memory maps. It loads nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from minidnn.report.plots import STALL, WORK, memory_map, timeline_plot
from minidnn.report.tables import COLUMNS, Row, base_ms, mode_cells, total_ms
from minidnn.run.timeline import CAUSES, Timeline
from minidnn.schedule.actions import Schedule
from minidnn.units import format_ms

STYLE = """
:root { color-scheme: light; --ink: #222; --soft: #666; --rule: #ddd; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p, figcaption { color: var(--soft); max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 2px solid var(--ink); } tr.no td { color: #999; }
img, svg { max-width: 100%; height: auto; } figure { margin: .6rem 0 1.6rem; }
"""

MEANING = (
    "Relative is the time over that of base. A stall is time in which nothing computes because a copy-out, a copy-in "
    "or free memory has to be waited for. Peak is the whole arena: weights and pool. Pinned is host memory for "
    "offloaded tensors."
)


def html_report(
    title: str, rows: Sequence[Row], timelines: Mapping[str, Timeline] = {}, memory_maps: Mapping[str, Schedule] = {}
) -> str:  # fmt: skip
    """A self-contained page; `rows` as in `modes_table`, timelines and schedules by mode."""
    parts = [f"<h1>{escape(title)}</h1>", _table(rows), f"<p>{escape(MEANING)}</p>", _bars(rows)]
    if timelines:
        parts.append("<h2>Timelines</h2>")
        parts += [_figure(name, timeline_plot(line)) for name, line in timelines.items()]
    if memory_maps:
        parts.append("<h2>Memory maps</h2><p>Address against the position in the schedule. Grey is unused.</p>")
        parts += [_figure(name, memory_map(schedule)) for name, schedule in memory_maps.items()]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    page = f'<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>'
    return f"<!DOCTYPE html>\n{page}\n"


def _table(rows: Sequence[Row]) -> str:
    def line(cells: Sequence[str], tag: str, kind: str) -> str:
        return f'<tr class="{kind}">' + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(COLUMNS, "th", "head")]
    lines += [
        line(cells, "td", "yes" if row["fits"] else "no") for row, cells in zip(rows, mode_cells(rows), strict=True)
    ]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _bars(rows: Sequence[Row]) -> str:
    """Time of each mode as a bar: what it computes, and what it waits for."""
    timed = [row for row in rows if row["iteration_ms"] is not None]
    if not timed:
        return ""
    longest = max(row["iteration_ms"] for row in timed)
    scale, high = 620 / longest, 22
    shapes = []
    for i, row in enumerate(timed):
        y, x = i * high, 190.0
        stalls = row["stall_ms"] if isinstance(row["stall_ms"], Mapping) else {"offload": row["stall_ms"] or 0.0}
        pieces = [(row["iteration_ms"] - (total_ms(stalls) or 0.0), WORK["forward"], "busy")]
        pieces += [(stalls.get(cause, 0.0), STALL[cause], f"waits for {cause}") for cause in CAUSES]
        shapes.append(f'<text x="182" y="{y + 15}" text-anchor="end">{escape(row["mode"])}</text>')
        for ms, colour, what in pieces:
            tip = escape(f"{row['mode']} {what}: {format_ms(ms)} ms")
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{ms * scale:.1f}" height="{high - 6}" fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
            x += ms * scale
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{format_ms(row["iteration_ms"])} ms</text>')
    base = base_ms(timed)
    if base:
        at = 190 + base * scale
        shapes.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{len(timed) * high}" stroke="#222" '
                      'stroke-dasharray="2 3"/>')  # fmt: skip
    caption = "Blue: computing or issuing. Red, green, purple: waiting for a copy-out, a copy-in, memory. Dotted: base."
    return (
        f'<figure><svg viewBox="0 0 900 {len(timed) * high}" width="900" font-family="system-ui, sans-serif" '
        f'font-size="12" role="img" aria-label="time of each mode">{"".join(shapes)}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _figure(name: str, png: bytes) -> str:
    data = b64encode(png).decode("ascii")
    return (
        f"<figure><h3>{escape(name)}</h3>"
        f'<img alt="{escape(name)}" src="data:image/png;base64,{data}"></figure>'
    )  # fmt: skip

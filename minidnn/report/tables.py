"""Text tables. A table of modes is made of the same objects that the JSON output lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minidnn.run.timeline import Timeline
from minidnn.units import format_ms, format_size

Row = Mapping[str, Any]
"""A memory mode's results: mode, iteration_ms, stall_ms (a number, or ms by cause), peak_bytes, pool_bytes,
pinned_bytes, offloaded_bytes, fits. Times are None where it does not fit."""

BARS = " ▁▂▃▄▅▆▇█"
COLUMNS = ("mode", "ms/iteration", "relative", "stall ms", "peak", "pool", "pinned", "offloaded", "fits")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need be: the first flush left, the others flush right; a rule under the header."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def sparkline(line: Timeline, most: int | None = None, width: int = 100) -> str:
    """The memory curve as one line of text: per slice of time the most bytes in use, as a share of `most` bytes."""
    top = most or max((nbytes for _, nbytes in line.memory), default=1)
    slices = [0] * width
    moments = [*(ms for ms, _ in line.memory), line.end_ms]
    for (start, nbytes), end in zip(line.memory, moments[1:], strict=True):
        first, last = (int(width * ms / line.end_ms) if line.end_ms else 0 for ms in (start, end))
        for i in range(first, min(max(last, first + 1), width)):
            slices[i] = max(slices[i], nbytes)
    return "".join(BARS[min(len(BARS) - 1, -(-(len(BARS) - 1) * nbytes // top))] for nbytes in slices)


def modes_table(rows: Sequence[Row]) -> str:
    """One line per mode; `relative` is its time over that of the first `base` row."""
    return text_table(COLUMNS, mode_cells(rows))


def mode_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table of modes."""
    base = base_ms(rows)
    cells = []
    for row in rows:
        ms, stalls = row["iteration_ms"], total_ms(row["stall_ms"])
        sizes = [format_size(row[f"{name}_bytes"]) for name in ("peak", "pool", "pinned", "offloaded")]
        relative = f"{ms / base:.3f}" if ms is not None and base else "-"
        cells.append([row["mode"], format_ms(ms), relative, format_ms(stalls), *sizes, "yes" if row["fits"] else "no"])
    return cells


def compression_table(rows: Sequence[Row]) -> str:
    """What compression does in each mode that has it; `change` is that of the iteration time, `cpu` in cores."""
    cells = []
    for row in rows:
        if not row.get("compressed"):
            continue
        ms, plain, share = row["iteration_ms"], row["uncompressed_ms"], row["cpu_share"]
        cells.append([
            row["mode"], format_size(row["pinned_bytes"]), format_size(row["pinned_raw_bytes"]),
            format_size(row["packed_bytes"]), f"{row['density']:.3f}", f"{row['ratio']:.2f}",
            "-" if share is None else f"{share:.2f}", f"{100 * (ms / plain - 1):+.1f} %" if ms and plain else "-",
        ])  # fmt: skip
    return text_table(("mode", "pinned", "uncompressed", "packed", "density", "ratio", "cpu", "change"), cells)


def densities_table(rows: Sequence[Row]) -> str:
    """Density and ratio of each compressed tensor, by the first mode that has it."""
    found = {tensor["tensor"]: tensor for row in reversed(rows) for tensor in row.get("compressed", ())}
    cells = [
        [name, t["layer"] or "-", format_size(t["raw_bytes"]), format_size(t["packed_bytes"]), f"{t['density']:.3f}",
         f"{t['ratio']:.2f}"]
        for name, t in found.items()
    ]  # fmt: skip
    return text_table(("tensor", "read by", "bytes", "packed", "density", "ratio"), cells)


def base_ms(rows: Sequence[Row]) -> float | None:
    """Time of the first `base` row that has one."""
    times = (row["iteration_ms"] for row in rows if row["mode"].startswith("base"))
    return next((ms for ms in times if ms is not None), None)


def total_ms(stalls: float | Mapping[str, float] | None) -> float | None:
    """Stalls of all causes together."""
    return sum(stalls.values()) if isinstance(stalls, Mapping) else stalls

"""Markdown of result files: tables, where numbers come from, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minidnn.units import format_ms, format_size

Result = Mapping[str, Any]


def files(results: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    """Name and content of the result files of a bench, sorted by name."""
    for path in sorted(results.glob(pattern)):
        yield path.name, json.loads(path.read_text(encoding="utf-8"))


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table: the first column flush left, the others flush right. Nothing where there is no line."""
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    if not rows:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *rows]) + "\n\n"


def heading(text: str) -> str:
    """The title of a table."""
    return f"**{text}**\n\n"


def origin(file: str, found: Result, bench: str) -> str:
    """Where numbers come from: bench, file, card or processor, versions, date, commit."""
    rows = found.get("rows")
    places = [environment(row) for row in rows.values()] if isinstance(rows, Mapping) else [environment(found)]
    machines = dict.fromkeys(
        ", ".join(filter(None, (found.get("card"), f"{p['cpu']} ({p['cores']} cores)", f"Python {p['python']}",
                                *(f"{name} {v}" for name, v in p["versions"].items() if v)))) for p in places
    )  # fmt: skip
    dates = sorted(dict.fromkeys(p["date"] for p in places))
    commits = dict.fromkeys(short(p["commit"]) for p in places)
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    where = "; ".join(machines)
    return f"<sub>`bench/{bench}`, `bench/results/{file}`: {where}; {when}; commit {', '.join(commits)}</sub>\n\n"


def environment(found: Result) -> dict[str, Any]:
    """What a result says of where it was made, whichever bench wrote it."""
    flat = {**found, **found.get("machine", {}), **found.get("environment", {})}
    names = ("numpy", "numba", "blosc2", "blas")
    versions = flat.get("versions") or {name: flat[name] for name in names if name in flat}
    return {**{key: flat.get(key) for key in ("cpu", "cores", "python", "date", "commit")}, "versions": versions}


def short(commit: str | None) -> str:
    """A commit's first characters; a plus sign says that files differed from it."""
    return "unknown" if commit is None else commit[:10] + ("+" if commit.endswith("+") else "")


def milliseconds(ms: float | None) -> str:
    """A time, or a dash."""
    return "-" if ms is None else format_ms(ms)


def size(nbytes: int | None) -> str:
    """A size, or a dash."""
    return "-" if nbytes is None else format_size(nbytes)


def megabytes(value: float | None) -> str:
    """MB, whole where the paper has whole ones, else with one digit; or a dash."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}"


def share(value: float | None) -> str:
    """Percent, or a dash."""
    return "-" if value is None else f"{value:.1f} %"


def percent(nbytes: int, of: int) -> str:
    """How much more, in percent."""
    return f"{100 * (nbytes / of - 1):.1f} %"

"""Progress bars, in one way for all of minidnn."""

from __future__ import annotations

import sys
from typing import Any


def bar(title: str, total: int | None = None, wanted: bool | None = None, delay: float = 1.0) -> Any:
    """A tqdm bar that goes away when it is closed: `with bar(title, total) as done: ... done.update()`.

    `total`: None where nobody knows it. `wanted`: None shows it on a terminal alone, and only where the work takes
    longer than `delay`, in seconds.
    Nothing is shown where nobody could see it: no stderr, or one that is closed.
    tqdm's own class starts a thread that watches over its bars for good; this one starts none.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        monitor_interval = 0

    terminal = _is_terminal()
    disable, delay = (not terminal, delay) if wanted is None else (not wanted or terminal is None, 0.0)
    return Bar(total=total, desc=title, leave=False, disable=disable, delay=delay)


def _is_terminal() -> bool | None:
    """Of stderr; None where nothing can be written to it."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return None

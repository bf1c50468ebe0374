"""Progress bars, in one way for all of minidnn."""

from __future__ import annotations

from typing import Any


def bar(title: str, total: int | None = None, wanted: bool | None = None, delay: float = 1.0) -> Any:
    """A tqdm bar that goes away when it is closed: `with bar(title, total) as done: ... done.update()`.

    `total`: None where nobody knows it. `wanted`: None shows it on a terminal alone, and only where the work takes
    longer than `delay`, in seconds.
    tqdm's own class starts a thread that watches over its bars for good; this one starts none.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        monitor_interval = 0

    disable, delay = (None, delay) if wanted is None else (not wanted, 0.0)
    return Bar(total=total, desc=title, leave=False, disable=disable, delay=delay)

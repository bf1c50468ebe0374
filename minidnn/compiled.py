"""Loops that numba compiles, in one way for all of minidnn: the machine code stays on disk where possible, and a
terminal sees what the first use after an installation spends seconds on.

Modules that import this one are imported when there is something to compute: minidnn itself never waits for numba.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba
from numba.core import event as events
from numba.core.caching import FunctionCache

from minidnn.progress import bar

F = TypeVar("F", bound=Callable[..., Any])

_njit: Any = numba.njit  # numba's own annotations differ between its versions


def compiled(function: F, signatures: Sequence[Any] | None = None, **options: Any) -> F:
    """The function as machine code: for these signatures now, else for each kind of arguments at the first call with
    it. `options` are numba's."""
    loop = _njit(**options)(function)
    with suppress(RuntimeError):  # no folder where a cache could be written
        loop._cache = _Cache(function)  # type: ignore[no-untyped-call,unused-ignore]
    if signatures is not None:
        for signature in signatures:
            loop.compile(signature)
        loop.disable_compile()
    return cast(F, loop)


class _Cache(FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache on disk, which may be damaged, and may be full: then the loop is compiled, and all goes on."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        cache: Any = super()
        try:
            return cache.load_overload(sig, target_context)
        except Exception:
            with suppress(Exception):
                cache.flush()  # what is compiled now takes its place
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        cache: Any = super()
        with suppress(Exception):
            cache.save_overload(sig, data)


class _Bars(events.Listener):  # type: ignore[misc,unused-ignore]
    """A bar while one of minidnn's loops is compiled, and what that calls. What comes from disk is no such event."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        ours = str(function.__module__).partition(".")[0] == "minidnn"
        first = ours and all(shown is None for shown in self.shown)
        self.shown.append(None)
        with suppress(Exception):  # a terminal that has gone must not end what is compiled
            self.shown[-1] = bar(f"compiling {function.__name__}, once", delay=0.0) if first else None

    def on_end(self, event: Any) -> None:
        shown = self.shown.pop()
        with suppress(Exception):
            if shown is not None:
                shown.close()


events.register("numba:compile", _Bars())  # type: ignore[no-untyped-call,unused-ignore]

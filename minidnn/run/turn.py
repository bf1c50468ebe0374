"""Whose turn it is: a trainer does one thing at a time, because all that it does shares batch slots, arena and streams.

What a user's own code does inside an iteration (a schedule, a loss, a data set's `read`) or in another thread would
write over images that are on their way, without an error: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from minidnn.errors import ArgumentError


class Turn:
    """A turn that is taken by one at a time."""

    def __init__(self) -> None:
        self._holder: dict[str, tuple[int, object]] = {}  # nobody or one; a dict asks and takes in one atomic step

    @contextmanager
    def taken(self, inside: bool = False) -> Iterator[None]:
        """Have the turn meanwhile; `inside`: also within what this thread has it for. Raises ArgumentError."""
        mine = (get_ident(), object())
        try:
            holder = self._holder.setdefault("holder", mine)
            if holder is not mine and not (inside and holder[0] == mine[0]):
                raise ArgumentError("trainer is in an iteration; use it between steps or in on_epoch, from one thread")
            yield
        finally:
            if self._holder.get("holder") is mine:
                del self._holder["holder"]

    def end(self) -> None:
        """Nothing of this thread's runs any more: a turn that an interrupt has left taken is over."""
        if self._holder.get("holder", (0, None))[0] == get_ident():
            del self._holder["holder"]

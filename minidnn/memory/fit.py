"""Placement heuristics of a run-time pool: which free block a request gets, and which end of it.

A heuristic is one small class with `choose`; add an instance to `FITS` to give it a name on the command line, or hand
one to `Pool` directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from minidnn.errors import ArgumentError
from minidnn.memory.freelist import FreeList
from minidnn.memory.trace import KEPT, OFFLOADED


class Fit(ABC):
    """Where a request goes."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        """Address for `nbytes` (rounded, above 0) within one free block; None where this heuristic has no place."""

    def reach(self, free: FreeList, role: str) -> int:
        """Bytes of the largest request of this role that `choose` could serve now."""
        return free.largest


class BestFit(Fit):
    """CNMeM's: the smallest block that is large enough, of equal ones the lowest; its low end."""

    name = "best-fit"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        found = free.smallest(nbytes)
        return found[0] if found else None


class FirstFit(Fit):
    """The block with the lowest address that is large enough; its low end."""

    name = "first-fit"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        return free.first(nbytes)


class ExactThenFirst(Fit):
    """moDNN, section 3.3: a block of exactly this size, because sizes repeat in a network; otherwise first fit."""

    name = "exact-then-first"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        found = free.smallest(nbytes)
        return found[0] if found and found[1] == nbytes else free.first(nbytes)


class WorstFit(Fit):
    """The largest block, of equal ones the lowest; its low end."""

    name = "worst-fit"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        found = free.smallest(max(nbytes, free.largest))
        return found[0] if found else None


class HighEnd(Fit):
    """vDNN++, section IV-B: requests of one role go to the top end, all others best-fit and low.

    "The top" is the rightmost free block alone, as in the paper's experiments: where it is too small the request fails,
    even if another block would do.
    """

    high: ClassVar[str]

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        if role != self.high:
            found = free.smallest(nbytes)
            return found[0] if found else None
        last = free.last
        return last[0] + last[1] - nbytes if last and last[1] >= nbytes else None

    def reach(self, free: FreeList, role: str) -> int:
        if role != self.high:
            return free.largest
        return free.last[1] if free.last else 0


class HighEndKept(HighEnd):
    """As the heuristic is named, and as Table V was made: activations that are *not* offloaded lie at the top."""

    name = "high-end"
    high = KEPT


class HighEndOffloaded(HighEnd):
    """As the section's text says: activations that will be offloaded lie at the top."""

    name = "high-end-offloaded"
    high = OFFLOADED


FITS: Mapping[str, Fit] = MappingProxyType(
    {f.name: f for f in (BestFit(), FirstFit(), ExactThenFirst(), WorstFit(), HighEndKept(), HighEndOffloaded())}
)
"""The heuristics by name."""


def named_fit(name: str) -> Fit:
    """The heuristic called `name`. Raises ArgumentError with the names that exist."""
    if name not in FITS:
        raise ArgumentError(f"fit is {name!r}; choose one of {', '.join(FITS)}")
    return FITS[name]

"""Placement heuristics of a run-time pool: which free block a request gets, and which end of it.

A heuristic is one small class with `choose`; add an instance to `FITS` to give it a name on the command line, or hand
one to `Pool` directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from minidnn.arguments import choice
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


class HighEnd(BestFit):
    """vDNN++, section IV-B, as its name says and as Table V was made: activations that are *not* offloaded go to the
    top end of the rightmost free block, everything else best-fit and low.

    Where the rightmost block is too small the request fails, even if another block would do.
    """

    name = "high-end"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        if role != KEPT:
            return super().choose(free, nbytes, role)
        last = free.last
        return last[0] + last[1] - nbytes if last and last[1] >= nbytes else None

    def reach(self, free: FreeList, role: str) -> int:
        if role != KEPT:
            return free.largest
        return free.last[1] if free.last else 0


class HighEndOffloaded(BestFit):
    """vDNN++, section IV-B, as its text says: activations that will be offloaded go to the highest address where there
    is room, everything else best-fit and low."""

    name = "high-end-offloaded"

    def choose(self, free: FreeList, nbytes: int, role: str) -> int | None:
        if role != OFFLOADED:
            return super().choose(free, nbytes, role)
        found = free.highest(nbytes)
        return found[0] + found[1] - nbytes if found else None


FITS: Mapping[str, Fit] = MappingProxyType(
    {f.name: f for f in (BestFit(), FirstFit(), ExactThenFirst(), WorstFit(), HighEnd(), HighEndOffloaded())}
)
"""The heuristics by name."""


def named_fit(name: str) -> Fit:
    """The heuristic called `name`. Raises ArgumentError with the names that exist."""
    return FITS[choice(name, "fit", FITS)]

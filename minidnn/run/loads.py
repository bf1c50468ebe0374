"""How long copies take beside what computes: some kernels leave them less than the link's rate (`Algorithm.shares`)."""

from __future__ import annotations

from bisect import bisect_right

from minidnn.profile.profile import UNDISTURBED, Shares


class Loads:
    """When a computation slowed copies, in ms from the iteration's begin, in order."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.shares: list[Shares] = []

    def add(self, begin: float, end: float, shares: Shares) -> None:
        """A computation after those before. One that leaves copies alone is none."""
        if shares != UNDISTURBED:
            self.begins.append(begin)
            self.ends.append(end)
            self.shares.append(shares)

    def repeated(self, period: float) -> Loads:
        """The same, and once more in an iteration of that length before: where an early batch is copied."""
        found = Loads()
        found.begins = [at - period for at in self.begins] + self.begins
        found.ends = [at - period for at in self.ends] + self.ends
        found.shares = self.shares * 2
        return found

    def near(self, other: Loads, ms: float) -> bool:
        """Whether the same computations begin and end then, but for so many ms."""
        pairs = zip(self.begins + self.ends, other.begins + other.ends, strict=False)
        return len(self.ends) == len(other.ends) and all(abs(a - b) <= ms for a, b in pairs)

    def copy_ms(self, begin: float, alone_ms: float, to_host: bool) -> float:
        """Time of a copy that begins then and takes `alone_ms` where nothing slows it."""
        at, left, lost = begin, alone_ms, 0.0
        for i in range(bisect_right(self.ends, begin), len(self.ends)):
            free = self.begins[i] - at
            if left <= free:
                break
            if free > 0:
                at, left = self.begins[i], left - free
            share = self.shares[i].d2h if to_host else self.shares[i].h2d
            slowed = min(left / share, self.ends[i] - at)
            at, left, lost = at + slowed, left - slowed * share, lost + slowed * (1 - share)
            if left <= 0:
                break
        return alone_ms + lost

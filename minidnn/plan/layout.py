"""Where the buffers of an arrangement lie. Its moments fill the pool nearly to the last byte nearly all the time, which
leaves a placement no freedom; so places come first, with every offloaded tensor on the device only while ops use it,
and then each gets as much of the time that the arrangement gives it as it finds a free range for.

What comes out always fits: a copy-out for which no range stays free long enough is waited for earlier, a copy-in for
which none is free early enough begins later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from minidnn.memory.place import Interval, place
from minidnn.memory.trace import GRANULARITY
from minidnn.plan.outline import Arrangement, lifetime
from minidnn.units import round_up

EFFORT = 20_000
"""What the search for a placement of the shortest stays may cost."""


def lay_out(arrangement: Arrangement, pool: int) -> Arrangement | None:
    """The arrangement with offsets, its moments changed where need be; None where no placement was found."""
    board = _Board(_shortest_stays(arrangement), pool)
    if not (board.stack(arrangement.outline.graph.forward_ops) or board.search()):
        return None
    until, fetch = dict(arrangement.free_before), dict(arrangement.fetch)
    for m in arrangement.offload:
        if m.name in until:
            until[m.name] = board.lengthen(f"{m.name}#0", until[m.name])
    begun = 0
    for m in arrangement.by_need:
        begun = fetch[m.name] = max(begun, board.begin_earlier(f"{m.name}#1", fetch[m.name]))
    return replace(arrangement, free_before=until, fetch=fetch, offsets=board.offsets())


def _shortest_stays(arrangement: Arrangement) -> dict[str, tuple[int, int, int]]:
    """Key of the stay -> bytes, first and last op; offloaded tensors are there only from use to use."""
    graph = arrangement.outline.graph
    away = {m.name: m for m in arrangement.offload}
    stays = {}
    for name, t in graph.tensors.items():
        if graph.is_persistent(name):
            continue
        nbytes = round_up(t.nbytes, GRANULARITY)
        first, last = lifetime(graph, name)
        if name in away:
            stays[f"{name}#0"] = (nbytes, first, away[name].left)
            stays[f"{name}#1"] = (nbytes, away[name].needed, last)
        else:
            stays[f"{name}#0"] = (nbytes, first, last)
    for i, algorithm in enumerate(arrangement.algorithms):
        if algorithm.workspace:
            stays[f"workspace@{i}#0"] = (round_up(algorithm.workspace, GRANULARITY), i, i)
    return stays


class _Board:
    """Address against op. A stay may move while it is lengthened; all others keep their places."""

    def __init__(self, stays: Mapping[str, tuple[int, int, int]], pool: int) -> None:
        self.index = {key: i for i, key in enumerate(stays)}
        rows = np.array(list(stays.values()), np.int64).reshape(-1, 3)
        self.nbytes, self.first, self.last = rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy()
        self.low = np.zeros(len(stays), np.int64)
        self.there = np.zeros(len(stays), bool)
        self.pool = pool

    def stack(self, turn: int) -> bool:
        """Place all: what is there when forward ends, op `turn`, from the bottom in the order of its beginning (it goes
        in the opposite order, so no holes are left), the rest from the top, the largest first. False where one of them
        finds no room."""
        kept = (self.first < turn) & (self.last >= turn)
        order = sorted(range(len(self.low)), key=lambda i: (not kept[i], self.first[i] if kept[i] else -self.nbytes[i]))
        for i in order:
            tops, gaps = self._gaps(i, int(self.first[i]), int(self.last[i]))
            wide = np.flatnonzero(gaps >= self.nbytes[i])
            if not len(wide):
                return False
            gap = wide[0] if kept[i] else wide[-1]
            self.low[i] = tops[gap] + (0 if kept[i] else gaps[gap] - self.nbytes[i])
            self.there[i] = True
        return True

    def search(self) -> bool:
        """Place all by search. False where none is found."""
        stays = zip(self.index, self.nbytes, self.first, self.last, strict=True)
        intervals = [Interval(key, int(n), int(first), int(last) + 1) for key, n, first, last in stays]
        placed = place(intervals, self.pool, effort=EFFORT)
        self.low = np.array([placed.offsets[key] for key in self.index], np.int64)
        self.there[:] = True
        return placed.nbytes <= self.pool

    def offsets(self) -> dict[str, int]:
        """Offset in the pool of every stay. Addresses at which nothing ever lies are left out: a pool that is larger
        than need be is not taken whole."""
        order = np.argsort(self.low, kind="stable")
        tops = np.maximum.accumulate(self.low[order] + self.nbytes[order])
        unused = np.maximum(self.low[order] - np.concatenate([[0], tops])[:-1], 0)
        low = self.low.copy()
        low[order] -= np.cumsum(unused)
        return {key: int(low[i]) for key, i in self.index.items()}

    def lengthen(self, key: str, until: int) -> int:
        """Let the stay end as late as it can, before op `until` at the latest; returns the op before which it ends."""
        i = self.index[key]
        shortest, longest = int(self.last[i]), until - 1
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if self._move(i, int(self.first[i]), middle):
                shortest = middle
            else:
                longest = middle - 1
        return int(self.last[i]) + 1

    def begin_earlier(self, key: str, start: int) -> int:
        """Let the stay begin as early as it can, with op `start` at the earliest; returns the op."""
        i = self.index[key]
        earliest, latest = start, int(self.first[i])
        while earliest < latest:
            middle = (earliest + latest) // 2
            if self._move(i, middle, int(self.last[i])):
                latest = middle
            else:
                earliest = middle + 1
        return int(self.first[i])

    def _move(self, i: int, first: int, last: int) -> bool:
        """Give the stay this time, in the smallest gap that is free for all of it."""
        tops, gaps = self._gaps(i, first, last)
        wide = np.flatnonzero(gaps >= self.nbytes[i])
        if not len(wide):
            return False
        gap = wide[np.argmin(gaps[wide])]
        self.low[i], self.first[i], self.last[i] = tops[gap], first, last
        return True

    def _gaps(self, i: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the gaps begin that no other stay of this time is in, and how large each is."""
        there = self.there & (self.first <= last) & (self.last >= first)
        there[i] = False
        low, high = self.low[there], self.low[there] + self.nbytes[there]
        order = np.argsort(low, kind="stable")
        bottoms: NDArray[np.int64] = np.append(low[order], self.pool)
        tops: NDArray[np.int64] = np.concatenate([[0], np.maximum.accumulate(high[order])])
        return tops, bottoms - tops

"""Where the buffers of an arrangement lie. Its moments fill the pool nearly to the last byte nearly all the time, which
leaves a placement no freedom; so places come first, with every offloaded tensor on the device only while ops use it,
and then each gets as much of the time that the arrangement gives it as it finds a free range for.

What comes out always fits: a copy-out for which no range stays free long enough is waited for earlier, a copy-in for
which none is free early enough begins later. How long that takes depends on where the large buffers lie: from the first
order and sides that work a seeded search goes on to others, for as long as it may and the clock says that it gains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from minidnn.memory.place import Interval, place
from minidnn.memory.trace import GRANULARITY
from minidnn.plan.outline import Arrangement, lifetime
from minidnn.units import round_up

SHORTEST = 20_000
"""What the search for a placement of the shortest stays may cost, where stacking them does not do."""
LARGE = 64
"""A stay of less than the pool by this factor is in nobody's way."""
SIDES, LENGTHS = 0.3, 0.2  # shares of steps that change a stay's end of the pool, or its time, and not the order
NEAR = 1.0005
"""So near to what the arrangement promises a layout is not improved."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Way:
    """How stays are placed: in which order, which of them from the top, and which for as long as they wish."""

    order: Ints
    high: Bools
    long: Bools

    def changed(self, stays: list[int], random: Random) -> _Way:
        """The same with one of these stays placed earlier, at the other end, or for another time."""
        stay = random.choice(stays)
        kind = random.random()
        if kind < SIDES:
            return replace(self, high=_flipped(self.high, stay))
        if kind < SIDES + LENGTHS:
            return replace(self, long=_flipped(self.long, stay))
        at = int(np.flatnonzero(self.order == stay)[0])
        return replace(self, order=np.insert(np.delete(self.order, at), random.randrange(at + 1), stay))


def _flipped(column: Bools, i: int) -> Bools:
    column = column.copy()
    column[i] = not column[i]
    return column


@dataclass(frozen=True, slots=True)
class _Layout:
    """ms by the clock, the addresses, the moments that they leave, and how it was made."""

    ms: float
    low: Ints
    until: Ints
    fetch: Ints
    way: _Way


def lay_out(arrangement: Arrangement, pool: int, effort: int = 0) -> Arrangement | None:
    """The arrangement with offsets, its moments and its ms changed where need be; None where no placement was found.

    `effort` is what may be spent to find a faster one, in pairs of stays that are compared.
    """
    board = _Board(arrangement, pool)
    found = board.best(effort // max(len(board.nbytes), 1) ** 2)
    if found is None:
        return None
    clock = arrangement.outline.clock
    until = {name: int(found.until[clock.index[name]]) for name in arrangement.free_before}
    fetch = {name: int(found.fetch[clock.index[name]]) for name in arrangement.fetch}
    offsets = board.offsets(found.low)
    return replace(arrangement, free_before=until, fetch=fetch, offsets=offsets, ms=found.ms)


class _Board:
    """Address against op."""

    def __init__(self, arrangement: Arrangement, pool: int) -> None:
        from minidnn.plan import places  # numba, when there is something to place

        self.places, self.arrangement, self.pool = places, arrangement, pool
        self.outline, self.clock = arrangement.outline, arrangement.outline.clock
        stays = _shortest_stays(arrangement)
        self.index = {key: i for i, key in enumerate(stays)}
        rows = np.array(list(stays.values()), np.int64).reshape(-1, 3)
        self.nbytes, self.first, self.last = (rows[:, k].copy() for k in range(3))
        self.wishes = np.stack([self.first, self.last])
        names = [m.name for m in self.outline.movable]
        self.out, self.back, self.until, self.fetch = (np.full(len(names), -1, np.int64) for _ in range(4))
        for m in arrangement.offload:
            j = self.clock.index[m.name]
            self.out[j], self.back[j] = self.index[f"{m.name}#0"], self.index[f"{m.name}#1"]
            self.until[j], self.fetch[j] = arrangement.free_before.get(m.name, -1), arrangement.fetch[m.name]
            self.wishes[0, self.back[j]] = self.fetch[j]
            self.wishes[1, self.out[j]] = max(self.until[j] - 1, self.last[self.out[j]])
        self.away = self.clock.mask(arrangement.offload)
        self.ms, _ = self.clock.columns(arrangement.algorithms)

    def best(self, tries: int) -> _Layout | None:
        """The fastest layout found."""
        starts = [_Way(*self._stacked(), wishing) for wishing in (self.wishing, self.wishing & False)]
        found = min(filter(None, map(self._layout, starts)), key=lambda layout: layout.ms, default=None)
        if found is None:
            found = self._layout(_Way(*self._searched(), self.wishing & False))
        random = Random(0)
        large = [int(i) for i in np.flatnonzero(self.nbytes * LARGE >= self.pool)]
        for _ in range(tries if len(large) > 1 else 0):
            if found is None or found.ms <= self.arrangement.ms * NEAR:
                break
            other = self._layout(found.way.changed(large, random))
            if other is not None and other.ms <= found.ms:
                found = other
        return found

    @cached_property
    def wishing(self) -> Bools:
        """The stays that would rather be longer."""
        longer: Bools = (self.wishes[0] < self.first) | (self.wishes[1] > self.last)
        return longer

    def _layout(self, way: _Way) -> _Layout | None:
        """What becomes of all stays when they are placed this way."""
        clock, outline = self.clock, self.outline
        low = np.zeros(len(way.order), np.int64)
        until, fetch = self.until.copy(), self.fetch.copy()
        wishes = np.where(way.long, self.wishes, np.stack([self.first, self.last]))
        ms = self.places.layout(
            self.nbytes, self.first.copy(), self.last.copy(), low, way.order, way.high, wishes, self.out,
            self.back, self.pool, clock.made, clock.needed, clock.out_ms, clock.in_ms, self.away, clock.order,
            clock.needs, self.ms, outline.load_ms, outline.return_ms, outline.link.duplex, until, fetch,
        )  # fmt: skip
        return _Layout(float(ms), low, until, fetch, way) if ms < inf else None

    def _stacked(self) -> tuple[Ints, Bools]:
        """What is there when forward ends from the bottom in the order of its beginning (it goes in the opposite order,
        so no holes are left), the rest from the top, the largest first."""
        turn = self.outline.graph.forward_ops
        kept = (self.first < turn) & (self.last >= turn)
        order = np.lexsort((np.where(kept, self.first, -self.nbytes), ~kept))
        return order.astype(np.int64), ~kept

    def _searched(self) -> tuple[Ints, Bools]:
        """From the bottom in the order of the addresses that a search finds, which changes none that matters."""
        stays = zip(self.index, self.nbytes, self.first, self.last, strict=True)
        intervals = [Interval(key, int(n), int(first), int(last) + 1) for key, n, first, last in stays]
        placed = place(intervals, self.pool, effort=SHORTEST)
        order = np.argsort([placed.offsets[key] for key in self.index], kind="stable")
        return order.astype(np.int64), np.zeros(len(order), np.bool_)

    def offsets(self, low: Ints) -> dict[str, int]:
        """Offset in the pool of every stay. A pool that is larger than need be is not taken whole: where nothing
        leaves, every stay sinks onto those below it; else addresses at which nothing ever lies are left out, and all
        that a copy may wait for stays as it is."""
        order = np.argsort(low, kind="stable")
        low = low.copy()
        if self.arrangement.offload:
            tops = np.maximum.accumulate(low[order] + self.nbytes[order])
            low[order] -= np.cumsum(np.maximum(low[order] - np.concatenate([[0], tops])[:-1], 0))
        else:
            for k, i in enumerate(order):
                below = order[:k]
                meets = (self.first[below] <= self.last[i]) & (self.last[below] >= self.first[i])
                low[i] = (low[below] + self.nbytes[below])[meets].max(initial=0)
        return {key: int(low[i]) for key, i in self.index.items()}


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
